"""The paper's text benchmarks on the engine of `waveform`: `python -m recipes`."""
