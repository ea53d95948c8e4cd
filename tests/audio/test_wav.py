"""Writing WAV files that are complete at every moment."""

import os
import resource
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from waveform.audio import wav
from waveform.audio.sinks import Output, wav_files
from waveform.audio.wav import wav_writer, write_wav
from waveform.system.errors import UserError


def test_wav_is_whole_after_every_append(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.wav"
    samples = np.random.default_rng(0).uniform(-1, 1, 1000).astype(np.float32)
    with wav_writer(path, sample_rate_hz=24_000) as append:
        for start in range(0, 1000, 250):
            with wave.open(str(path)) as reader:
                assert (reader.getnframes(), reader.getframerate(), reader.getnchannels()) == (start, 24_000, 1)
            append(samples[start : start + 250])
        read, rate = soundfile.read(path, dtype="float32")  # before closing, as a killed process leaves it
    assert rate == 24_000 and path.stat().st_size == 44 + 2000
    np.testing.assert_allclose(read, samples, atol=0.5001 / 32768)


def test_wav_clips(tmp_path: Path) -> None:
    write_wav(tmp_path / "x.wav", np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), sample_rate_hz=8000)
    read, rate = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert rate == 8000 and read.tolist() == [-32768, -32768, 0, 16384, 32767, 32767]


def test_a_sound_too_long_for_a_wav_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "x.wav"
    with (
        pytest.raises(UserError, match="at most 25 hours"),
        Output(path.parent).open([path], sample_rate_hz=24_000, seconds=1e6, tell=print),
    ):
        pass
    assert not path.parent.exists()


def test_a_wav_cannot_pass_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wav._MAX_WAV_BYTES == 2**32 - 1 - 44
    monkeypatch.setattr(wav, "_MAX_WAV_BYTES", 300)
    with wav_writer(tmp_path / "x.wav", sample_rate_hz=24_000) as append:
        append(np.zeros(100, dtype=np.float32))
        with pytest.raises(UserError, match="a WAV holds at most"):
            append(np.zeros(100, dtype=np.float32))
    assert (tmp_path / "x.wav").stat().st_size == 44 + 200


def test_more_sounds_than_files_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
    try:
        with (
            pytest.raises(UserError, match="too many files are open; ask for fewer at once"),
            wav_files([tmp_path / f"{i}.wav" for i in range(1000)], sample_rate_hz=24_000),
        ):
            pytest.fail("all were opened")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
