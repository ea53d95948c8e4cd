"""Audio in and out: files become 24 kHz blocks and mu-law tokens; samples become WAV files and pictures."""

SAMPLE_RATE_HZ = 24_000  # of everything that a model reads or generates
