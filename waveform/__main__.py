"""`python -m waveform`, also under torchrun."""

import sys

from waveform.cli import main

if __name__ == "__main__":
    sys.exit(main())
