"""The benchmark of preparing."""

from pathlib import Path

import numpy as np
import pytest

from waveform.benchmarks.preparation import measure_preparation, synthesise


@pytest.mark.parametrize("num_channels", [1, 2])
def test_preparation_is_measured_with_its_limit(num_channels: int, tmp_path: Path) -> None:
    options = {"audio_format": {"sample_rate_hz": 16_000}, "scratch": tmp_path}
    figures = measure_preparation(0.1, num_channels=num_channels, **options)
    assert (figures["channels"], figures["files"], figures["audio_seconds"]) == (num_channels, 3, 45)
    parts = [figures["decode_times_real_time"]["median"], figures["resample_times_real_time"]["median"]]
    limit = figures["limit_times_real_time"]
    assert limit == pytest.approx(1 / sum(1 / part for part in parts)) and limit < min(parts)
    assert figures["share_of_limit"] == pytest.approx(figures["times_real_time"]["median"] / limit)
    # Only the fastest of the repeats are compared, because another program may slow down any of them.
    total, *parts = (figures[f"{part}times_real_time"]["max"] for part in ("", "decode_", "resample_"))
    assert 0 < total < 1.5 / sum(1 / part for part in parts)
    assert figures["times_real_time"]["repeats"] >= 3


def test_synthesised_files_differ_and_do_not_clip() -> None:
    first, second = (synthesise(1, seed=seed, num_channels=2) for seed in (0, 1))
    assert first.shape == (44_100, 2) and first.dtype == np.float32
    assert not np.allclose(first, second)
    assert 0.05 < np.abs(first).max() < 0.999
