"""Measures how fast `prepare` is on synthesised FLAC, compared with decoding alone and resampling alone."""

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from waveform.audio.audio_format import CD_RATE_HZ
from waveform.audio.corpus.prepare import DataConfig, prepare
from waveform.audio.flac import decode_flac, flac_bytes
from waveform.audio.resample import resample_blocks
from waveform.benchmarks.timing import seconds, spread
from waveform.system.machine import peak_resident_bytes, resident_bytes
from waveform.system.threads import torch_in_one_thread

FILE_S = 15
_REPEATS = 3
_CPU = torch.device("cpu")


def synthesise(duration_s: int, *, seed: int, num_channels: int) -> np.ndarray:
    """Make audio about as hard to decode as speech: float32 [n, channels] at CD_RATE_HZ.

    Four syllables per second, of harmonics with a falling spectrum, with pauses, over noise at -60 dBFS.
    """
    rng = np.random.default_rng(seed)
    time_s = np.arange(duration_s * CD_RATE_HZ) / CD_RATE_HZ
    pitch_hz = rng.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * 0.7 * time_s))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / CD_RATE_HZ
    voice = sum(np.sin(n * phase + rng.uniform(0, 6)) / n**1.5 for n in range(1, 12))
    envelope = np.clip(np.sin(2 * np.pi * 4 * time_s + rng.uniform(0, 6)) * np.sin(2 * np.pi * 0.3 * time_s), 0, None)
    hiss = rng.standard_normal(len(time_s)) * (1e-3 + 0.03 * envelope)
    mono = (0.2 * envelope * voice + hiss).astype(np.float32)
    other = mono * np.float32(0.8) + rng.standard_normal(len(mono)).astype(np.float32) * np.float32(1e-3)
    return np.stack([mono, *[other] * (num_channels - 1)], axis=1)


def measure_preparation(
    minutes: float, *, num_channels: int, audio_format: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    """Measure preparing `minutes` of 16-bit 44.1 kHz FLAC, in files of 15 s, with one worker, in x real time.

    The limit is the time that decoding the files and resampling as much audio take alone, interleaved with the
    preparations. Loading torchaudio is not counted. audio_format: fields of `AudioFormat`. scratch: an empty folder.
    """
    num_files = max(3, round(minutes * 60 / FILE_S))  # at least one for each split
    audio_s = num_files * FILE_S
    imports_bytes = resident_bytes()
    with torch_in_one_thread():
        folder = scratch / "audio"
        for i in range(num_files):
            split_dir = folder / ("train", "valid", "test")[i if i < 3 else 0]
            split_dir.mkdir(parents=True, exist_ok=True)
            sound = synthesise(FILE_S, seed=i, num_channels=num_channels)
            (split_dir / f"{i:05}.flac").write_bytes(flac_bytes(sound, sample_rate_hz=CD_RATE_HZ))
        mono, paths = sound[:, 0].copy(), sorted(folder.rglob("*.flac"))
        config = DataConfig(num_workers=1, **audio_format)
        rate = config.sample_rate_hz

        def resample() -> None:
            deque(resample_blocks([mono], from_hz=CD_RATE_HZ, to_hz=rate), maxlen=0)

        resample()  # loads torchaudio and makes the kernel
        config.audio_format.decode(np.zeros(1, dtype=np.uint8))  # makes the table
        prepare_s, decode_s, resample_s = [], [], []
        for i in range(_REPEATS):
            preparation = partial(prepare, folder, scratch / f"data{i}", config=config, show_progress=False)
            prepare_s.append(seconds(preparation, device=_CPU))
            decode_s.append(seconds(lambda: deque(map(decode_flac, paths), maxlen=0), device=_CPU))
            resample_s.append(seconds(resample, device=_CPU))
    speed, decoding = (spread([audio_s / s for s in each]) for each in (prepare_s, decode_s))
    resampling = spread([FILE_S / s for s in resample_s])
    limit = 1 / (1 / decoding["median"] + 1 / resampling["median"])
    return {
        "sample_rate_hz": CD_RATE_HZ,
        "channels": num_channels,
        "files": num_files,
        "audio_seconds": audio_s,
        "workers": 1,
        "times_real_time": speed,
        "decode_times_real_time": decoding,
        "resample_times_real_time": resampling,
        "limit_times_real_time": limit,
        "share_of_limit": speed["median"] / limit,
        "samples_per_second": speed["median"] * rate,
        "peak_bytes": peak_resident_bytes(),
        "imports_bytes": imports_bytes,
    }
