"""Trained runs that come with waveform: each an archive NAME.zip made by `waveform export`, found by its name."""
