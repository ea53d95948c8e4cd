"""Tests of `waveform.models`."""
