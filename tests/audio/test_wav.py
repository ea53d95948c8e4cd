"""Writing WAV files that are complete at every moment."""

import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from waveform.audio.files import read_audio
from waveform.audio.sinks import Output
from waveform.audio.wav import WavWriter, write_wav
from waveform.system.errors import UserError


def test_wav_is_whole_after_every_append(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.wav"
    samples = np.random.default_rng(0).uniform(-1, 1, 1000).astype(np.float32)
    writer = WavWriter(path, sample_rate_hz=24_000)
    for start in range(0, 1000, 250):
        with wave.open(str(path)) as reader:
            assert (reader.getnframes(), reader.getframerate(), reader.getnchannels()) == (start, 24_000, 1)
        writer.append(samples[start : start + 250])
    read, rate = soundfile.read(path, dtype="float32")  # before closing, as a killed process leaves it
    writer.close()
    assert rate == 24_000 and path.stat().st_size == 44 + 2000
    np.testing.assert_allclose(read, samples, atol=0.5001 / 32768)


def test_wav_clips(tmp_path: Path) -> None:
    write_wav(tmp_path / "x.wav", np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), sample_rate_hz=8000)
    read, rate = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert rate == 8000 and read.tolist() == [-32768, -32768, 0, 16384, 32767, 32767]


def test_a_header_is_never_ahead_of_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is killed between its two writes, `append` leaves the WAV as it was before."""

    class Killed(BaseException):
        pass

    writer = WavWriter(tmp_path / "x.wav", sample_rate_hz=24_000)
    writer.append(np.zeros(100, dtype=np.float32))
    write, calls = writer._write, []

    def once(content: bytes, *, offset: int) -> None:
        if calls:
            raise Killed
        calls.append(offset)
        write(content, offset=offset)

    monkeypatch.setattr(writer, "_write", once)
    with pytest.raises(Killed):
        writer.append(np.zeros(100, dtype=np.float32))
    writer.close()
    assert (tmp_path / "x.wav").stat().st_size == 44 + 400
    assert len(read_audio(tmp_path / "x.wav", sample_rate_hz=24_000)) == 100  # and it is not refused as cut short


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    writer = WavWriter(tmp_path / "x.wav", sample_rate_hz=24_000)
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed below)
    with pytest.raises(UserError, match=r"cannot write .*x\.wav: the disk is full"):
        writer.append(np.zeros(10, dtype=np.float32))
    writer.close()


def test_a_sound_too_long_for_a_wav_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "x.wav"
    with (
        pytest.raises(UserError, match="at most 25 hours"),
        Output(path.parent).open([path], sample_rate_hz=24_000, seconds=1e6, tell=print),
    ):
        pass
    assert not path.parent.exists()


def test_a_wav_cannot_pass_4_gib(tmp_path: Path) -> None:
    writer = WavWriter(tmp_path / "x.wav", sample_rate_hz=24_000)
    writer._data_bytes = 2**32 - 50
    with pytest.raises(UserError, match="at most 25 hours"):
        writer.append(np.zeros(100, dtype=np.float32))
    writer.close()
