"""Synthesised audio for the tests, so that no recording is needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.calling import before
from waveform.audio.corpus import groups, workers


def write_audio(path: Path, *, seed: int = 0, duration_s: float = 0.5, sample_rate_hz: int = 24_000, channels: int = 1,
                subtype: str | None = None) -> np.ndarray:  # fmt: skip
    """Write a chirp with some noise; return the samples [n, channels]."""
    random = np.random.default_rng(seed)
    num = round(duration_s * sample_rate_hz)
    time_s = np.arange(num) / sample_rate_hz
    tone = 0.3 * np.sin(2 * np.pi * (200 + 50 * seed + 300 * time_s) * time_s)
    samples = (tone[:, None] + 0.02 * random.standard_normal((num, channels))).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    container = {".opus": "OGG", ".aif": "AIFF"}.get(path.suffix.lower())
    codec = "OPUS" if path.suffix == ".opus" else subtype
    with soundfile.SoundFile(path, "w", sample_rate_hz, channels, format=container, subtype=codec) as file:
        for start in range(0, num, 4096):  # libsndfile's Vorbis encoder crashes on one large write
            file.write(samples[start : start + 4096])
    return samples


@pytest.fixture
def corpus_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve short files of several sample rates in a train/valid/test layout, for several shards of each split."""
    monkeypatch.setattr(groups, "_MIN_GROUP_BYTES", 40_000)
    folder = tmp_path / "audio"
    for index, split in enumerate(["train"] * 8 + ["valid"] * 2 + ["test"] * 2):
        rate = (24_000, 44_100, 16_000)[index % 3]
        write_audio(folder / split / f"clip{index}.wav", seed=index, duration_s=0.3, sample_rate_hz=rate)
    return folder


def interrupt(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], Any], *, after: int) -> None:
    """Call what prepares, and interrupt it when it has prepared so many groups."""
    calls = []

    def count(group: groups.Group, **_: Path) -> None:
        calls.append(group)
        if len(calls) > after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before(patch, workers, "prepare_group", count)
        prepare()
