"""Audio: files in, 24 kHz blocks, mu-law tokens; the other way round, WAV files and pictures out."""

SAMPLE_RATE_HZ = 24_000  # of everything that a model sees or makes
