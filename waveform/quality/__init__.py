"""How samples sound, in figures, beside real clips and white noise: `evaluate --quality` and `compare --quality`."""
