"""Resampling block by block, compared with torchaudio in fp64."""

import sys

import numpy as np
import pytest
import torch
import torchaudio

from waveform.audio.resample import import_torchaudio, resample_blocks
from waveform.system.errors import UserError


@pytest.mark.parametrize("rate", [44_100, 48_000, 22_050, 8_000, 8_010, 22_060, 96_000, 1_000, 24_000])
def test_blocks_equal_the_whole(rate: int) -> None:
    """At 22,060 Hz our own banded kernel is used instead of torchaudio's."""
    random = np.random.default_rng(rate)
    for num in (1, 5, 9 * rate + 17):
        samples = random.uniform(-1, 1, num).astype(np.float32)
        # In fp64, for in fp32 torchaudio's kernel is wrong by up to 4e-4.
        whole = torchaudio.functional.resample(torch.from_numpy(samples).double(), rate, 24_000).numpy()
        for piece in (333, 70_001, 10**7):
            pieces = [samples[start : start + piece] for start in range(0, num, piece)]
            blocks = list(resample_blocks(pieces, from_hz=rate, to_hz=24_000))
            assert sum(map(len, blocks)) == -(-num * 24_000 // rate)
            assert all(len(block) % 24_000 == 0 for block in blocks[:-1])
            np.testing.assert_allclose(np.concatenate(blocks), whole, rtol=0, atol=1e-6)


def test_rates_without_a_neat_ratio_match_the_formula_in_fp64() -> None:
    """At 44,101 Hz torchaudio's kernel would take 4 GB; evaluate torchaudio's formula at some outputs instead."""
    rate, num = 44_101, 5 * 44_101 + 3
    samples = np.random.default_rng(0).uniform(-1, 1, num).astype(np.float32)
    read = np.concatenate(list(resample_blocks([samples], from_hz=rate, to_hz=24_000)))
    assert len(read) == -(-num * 24_000 // rate)
    cutoff = 24_000 * 0.99 / rate
    for index in [0, 1, 7, 23_999, 24_000, 60_001, 96_000, len(read) - 1]:
        t = np.clip((np.arange(num) - index * rate / 24_000) * cutoff, -6, 6)
        weights = np.sinc(t) * np.cos(t * np.pi / 12) ** 2 * cutoff
        assert abs(read[index] - weights @ samples.astype(np.float64)) < 1e-6


def test_a_broken_torchaudio_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    with pytest.raises(UserError, match="install torch and torchaudio together: pip install"):
        import_torchaudio()
