"""The paper's text benchmarks on the engine of `waveform`; not part of this version yet."""
