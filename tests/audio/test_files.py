"""Reading audio files: formats, channels, damage; tests/faults/hostile_audio.py has most of what is refused."""

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.audio.conftest import write_audio
from waveform.audio import decoding_child, decoding_process
from waveform.audio.decoding_child import RefusedFile
from waveform.audio.decoding_process import DecodingProcessDied
from waveform.audio.files import AUDIO_SUFFIXES, read_audio, read_blocks


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "opus", "mp3", "aiff", "aif", "WAV", "Flac"])
def test_every_format_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clip.{suffix}"
    samples = write_audio(path, duration_s=1.0)
    read = read_audio(path, sample_rate_hz=24_000)
    assert path.suffix.lower() in AUDIO_SUFFIXES
    assert read.dtype == np.float32 and abs(len(read) - 24_000) <= decoding_child._MPEG_SLACK
    if suffix.lower() in ("wav", "flac", "aiff", "aif"):
        np.testing.assert_allclose(read, samples[:, 0], atol=2 / 32768)
    else:  # a lossy codec may shift the signal by part of a frame
        assert 0.15 < read.std() < 0.3


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_sample_formats_of_wav(tmp_path: Path, subtype: str) -> None:
    samples = write_audio(tmp_path / "x.wav", duration_s=0.20004, subtype=subtype)
    np.testing.assert_allclose(read_audio(tmp_path / "x.wav", sample_rate_hz=24_000), samples[:, 0], atol=1 / 100)


def test_channels_are_averaged(tmp_path: Path) -> None:
    for channels in (2, 5):
        mean = write_audio(tmp_path / "x.wav", channels=channels, subtype="FLOAT").mean(axis=1)
        np.testing.assert_allclose(read_audio(tmp_path / "x.wav", sample_rate_hz=24_000), mean, atol=1e-6)


def test_reading_takes_constant_ram(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    with soundfile.SoundFile(path, "w", 48_000, 2) as file:
        for _ in range(20):
            file.write(np.zeros((48_000 * 30, 2), dtype=np.float32))  # 10 minutes, 220 MB as float
    next(read_blocks(path, sample_rate_hz=24_000))  # so that imports and kernels are not counted
    tracemalloc.start()
    total = sum(len(block) for block in read_blocks(path, sample_rate_hz=24_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 600 * 24_000
    assert peak < 20e6


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "opus", "mp3", "aiff"])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.97])
def test_a_file_cut_short_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / f"clip.{suffix}"
    write_audio(path, duration_s=5)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(RefusedFile) as refusal:
        read_audio(path, sample_rate_hz=24_000)
    assert "cut short" in refusal.value.reason or "not readable as audio" in refusal.value.reason


def test_a_wav_written_to_a_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stream.wav"
    write_audio(path)
    content = bytearray(path.read_bytes())
    where = content.index(b"data") + 4
    content[4:8] = content[where : where + 4] = b"\xff" * 4  # ffmpeg's "length unknown"
    path.write_bytes(content)
    assert len(read_audio(path, sample_rate_hz=24_000)) == 12_000


def test_decoding_works_without_a_limit_of_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no such limit."""
    write_audio(tmp_path / "x.wav")
    start = decoding_process._START.replace("serve()", "import resource; resource.RLIMIT_AS = -1; serve()")
    monkeypatch.setattr(decoding_process, "_START", start)
    decoding_process._end_idle()
    assert len(read_audio(tmp_path / "x.wav", sample_rate_hz=24_000)) == 12_000


def test_a_refusal_crosses_processes() -> None:
    for kind in (RefusedFile, DecodingProcessDied):
        refusal = pickle.loads(pickle.dumps(kind("a.wav", "it is empty")))
        assert type(refusal) is kind
        assert (str(refusal), refusal.reason) == ("cannot use a.wav: it is empty", "it is empty")
