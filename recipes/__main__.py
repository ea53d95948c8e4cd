"""`python -m recipes`, also under torchrun."""

import sys

from recipes.cli import main

if __name__ == "__main__":
    sys.exit(main())
