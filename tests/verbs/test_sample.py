"""`waveform sample` into pipes, read by the programs that a user has, and through a sound device."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
from pytest import MonkeyPatch

from tests.audio.sound_device import SoundDevice
from tests.calling import Capsys, cli, mistake, pcm_of, settings, write_splits
from waveform.audio.files import read_audio
from waveform.cli import main
from waveform.engine.sampler import SamplingConfig
from waveform.speech.run import Run, load
from waveform.system.errors import UserError
from waveform.system.signals import Stopped

HEADER_BYTES = 44


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    cli("train", write_splits(place / "audio"), place / "run", *settings("wavenet"))
    return place / "run"


@pytest.fixture
def primer(run_dir: Path) -> Path:
    return next((run_dir.parent / "audio" / "test").iterdir())


@contextmanager
def piped_stdout(*, num_bytes: int = -1) -> Iterator[bytearray]:
    """Replace stdout by a pipe. What comes through, or the first `num_bytes`, is there when the block has ended."""
    reading, writing = os.pipe()
    content = bytearray()

    def read() -> None:
        with open(reading, "rb") as file:
            content.extend(file.read(num_bytes))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(writing, "w") as pipe, redirect_stdout(pipe):
        yield content
    reader.join()


def one_block_and_ctrl_c(self: Run, *, on_block: Callable[[np.ndarray], None], **_: Any) -> None:
    """In place of `Run.sample`."""
    on_block(np.zeros((1, 1024), dtype=np.float32))
    signal.raise_signal(signal.SIGINT)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("options", [[], ["--prime"], ["--int8"]], ids=["plain", "prime", "int8"])
def test_a_pipe_gets_the_samples_of_the_file_and_nothing_else(
    options: list[str], run_dir: Path, primer: Path, tmp_path: Path, capsys: Capsys
) -> None:
    real = read_audio(primer, sample_rate_hz=24_000) if options == ["--prime"] else np.zeros(0)
    command = ["sample", run_dir, "--seconds", 0.1, "--seed", 5, *options, *[primer] * ("--prime" in options)]
    cli(*command, "--out", tmp_path / "folder")
    cli(*command, "--out", tmp_path / "named" / "hello.wav")
    file = only_file(tmp_path / "folder")
    assert only_file(tmp_path / "named").read_bytes() == file.read_bytes()
    made = read_audio(file, sample_rate_hz=24_000)
    assert len(made) == len(real) + 2400
    np.testing.assert_allclose(made[: len(real)], real, atol=1e-4)
    expected = pcm_of(file)
    capsys.readouterr()
    with piped_stdout() as raw:
        cli(*command, "--out", "-", "--raw")
    with piped_stdout() as wav:
        cli(*command, "--out", "-")
    assert raw == wav[HEADER_BYTES:] == expected
    assert capsys.readouterr().err.count("int8: NLL") == 2 * ("--int8" in options)
    samples, rate_hz = soundfile.read(io.BytesIO(bytes(wav)), dtype="int16")
    assert rate_hz == 24_000 and samples.astype("<i2").tobytes() == expected


@pytest.mark.parametrize("file", ["taken.wav", "new.wav"])
def test_what_int8_costs_is_not_measured_for_what_is_then_refused(
    file: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("waveform.verbs.sample._int8_cost", lambda run: pytest.fail("it is measured"))
    (tmp_path / "taken.wav").touch()
    prime = ["--prime", tmp_path / "none.wav"] * (file == "new.wav")
    line = mistake(["sample", "speech-en", "--out", tmp_path / file, "--int8", *prime])
    assert ("none.wav: no such file" if prime else "taken.wav exists") in line


@pytest.mark.parametrize(
    "reader",
    ["sox -t wav - -t raw -", "sox -r 24000 -c 1 -e signed -b 16 -t raw - -t raw -", "ffmpeg -v error -i - -f s16le -"],
)
def test_programs_read_the_pipe(reader: str, run_dir: Path) -> None:
    program = shutil.which(reader.split()[0])
    if program is None:
        pytest.skip("needs sox and ffmpeg: apt install sox ffmpeg")
    command = ["sample", run_dir, "--seconds", 0.1, "--out", "-", *["--raw"] * ("-r 24000" in reader)]
    with piped_stdout() as piped:
        cli(*command)
    done = subprocess.run([program, *reader.split()[1:]], input=piped, capture_output=True, check=True)
    assert done.stdout == piped[-4800:]
    assert b"WARN" not in done.stderr


def test_blocks_are_written_as_they_are_drawn(run_dir: Path, monkeypatch: MonkeyPatch) -> None:
    """After each block, its samples are in the pipe; nothing waits in a buffer."""
    reading, writing = os.pipe()
    seen: list[int] = []

    def sample(self: Run, *, on_block: Callable[[np.ndarray], None], **_: Any) -> None:
        for length in (1024, 1024, 10):
            on_block(np.zeros((1, length), dtype=np.float32))
            seen.append(len(os.read(reading, 100_000)))

    monkeypatch.setattr(Run, "sample", sample)
    with os.fdopen(writing, "w") as pipe, redirect_stdout(pipe):
        cli("sample", run_dir, "--out", "-")
    os.close(reading)
    assert seen == [HEADER_BYTES + 2048, 2048, 20]


def test_processes_that_read_different_steps_read_again(
    run_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    reading = Mock(side_effect=load)
    monkeypatch.setattr("waveform.verbs.sample.load", reading)
    monkeypatch.setattr("waveform.ranks.distributed.World.largest", Mock(side_effect=[[9, -4], [9, -9]]))
    cli("sample", run_dir, "--out", tmp_path, "--seconds", "0.01")
    assert reading.call_count == 2


@pytest.mark.parametrize("seconds", [1e20, 1e305])
def test_more_seconds_than_the_machine_can_hold_are_refused(seconds: float, run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"[0-9] tokens would take .* GB"):
        load(run_dir).sample(seconds=seconds)


def test_nothing_is_drawn_that_is_louder_than_what_was_heard(run_dir: Path) -> None:
    run = load(run_dir)
    (recording,) = (run_dir.parent / "audio" / "train").iterdir()
    samples, _ = soundfile.read(recording, dtype="float32")
    heard = run.audio_format.encode(samples)
    assert run.config["dataset"]["token_range"] == [int(heard.min()), int(heard.max())]
    loudest = np.abs(run.audio_format.decode(heard)).max()
    hot = SamplingConfig(temperature=50)  # any class, almost
    drawn = np.abs(run.sample(seconds=0.1, sampling=hot)).max()
    run.config["dataset"].pop("token_range")
    assert drawn <= loudest < np.abs(run.sample(seconds=0.1, sampling=hot)).max()


def test_what_training_shows_is_not_louder_either(run_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    sample_tokens = Mock(side_effect=Stopped)
    monkeypatch.setattr("waveform.speech.domain.sample_tokens", sample_tokens)
    cli("train", run_dir.parent / "audio", tmp_path / "run", *settings("wavenet"), "train.max_steps=1")
    sample_tokens.assert_called_once()
    assert list(sample_tokens.call_args.kwargs["config"].classes) == load(run_dir).config["dataset"]["token_range"]


def test_a_pipe_may_have_no_end(run_dir: Path, capsys: Capsys) -> None:
    with piped_stdout(num_bytes=20_000) as reader:
        assert main(["sample", str(run_dir), "--out", "-", "--seconds", "inf"]) == 128 + signal.SIGPIPE
    assert len(reader) == 20_000 and capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_listener_who_goes_away_ends_it(run_dir: Path) -> None:
    """In a process of its own: as Python ends, it says nothing of the closed pipe either."""
    command = [sys.executable, "-m", "waveform", "sample", str(run_dir), "--out", "-", "--seconds", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert len(process.stdout.read(4096)) == 4096
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_ends_a_pipe_in_one_line(run_dir: Path, monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr(Run, "sample", one_block_and_ctrl_c)
    with piped_stdout() as reader:
        assert main(["sample", str(run_dir), "--out", "-", "--seconds", "60"]) == 128 + signal.SIGINT
    assert len(reader) == HEADER_BYTES + 2048
    assert capsys.readouterr().err == "waveform sample: stopped by SIGINT\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_a_full_disk_behind_stdout_is_one_line(run_dir: Path) -> None:
    with open("/dev/full", "w") as full, redirect_stdout(full):
        line = mistake(["sample", run_dir, "--out", "-"])
    assert line.startswith("waveform sample: cannot write stdout: the disk is full")


def test_what_is_played_is_what_a_file_holds(
    run_dir: Path, primer: Path, tmp_path: Path, sound_device: SoundDevice, capsys: Capsys
) -> None:
    command = ["sample", run_dir, "--seconds", 0.7, "--seed", 5, "--prime", primer, "--play"]
    cli(*command, "--out", tmp_path)
    both = bytes(sound_device.heard)
    assert pcm_of(only_file(tmp_path)) in both and capsys.readouterr().out == f"{only_file(tmp_path)}\n"
    sound_device.heard.clear()
    cli(*command)
    assert bytes(sound_device.heard) == both and capsys.readouterr().out == ""


def test_ctrl_c_ends_playing_and_keeps_the_file(
    run_dir: Path, tmp_path: Path, sound_device: SoundDevice, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr(Run, "sample", one_block_and_ctrl_c)
    assert main(["sample", str(run_dir), "--play", "--out", str(tmp_path), "--seconds", "inf"]) == 128 + signal.SIGINT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("waveform sample: stopped by SIGINT; what was generated is in ")
    assert line.endswith(".unfinished.wav") and len(pcm_of(only_file(tmp_path))) == 2048 and sound_device.is_closed


def test_a_file_is_finished_before_all_of_it_is_heard(
    run_dir: Path, tmp_path: Path, sound_device: SoundDevice, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(sound_device, "sleep", lambda _: signal.raise_signal(signal.SIGINT))  # while the rest is played
    assert main(["sample", str(run_dir), "--play", "--out", str(tmp_path)]) == 128 + signal.SIGINT
    assert len(pcm_of(only_file(tmp_path))) == 48_000 and ".unfinished" not in only_file(tmp_path).name


@pytest.fixture
def nothing_is_drawn(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "sample", lambda *_, **__: pytest.fail("drawing began"))


@pytest.mark.usefixtures("nothing_is_drawn")
def test_no_sound_device_is_one_line(run_dir: Path, sound_device: SoundDevice) -> None:
    sound_device.refusal = sound_device.PortAudioError("Error querying device -1")
    line = mistake(["sample", run_dir, "--play"])
    assert "no sound device can be used (Error querying device -1)" in line and "--out - | aplay" in line


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise ModuleNotFoundError('No module named sounddevice')", 'pip install "waveform[play]"'),
        ("raise OSError('PortAudio library not found')", "needs PortAudio (PortAudio library not found)"),
        ("raise Exception('Error initializing PortAudio')", "needs PortAudio (Error initializing PortAudio)"),
    ],
)
def test_a_missing_library_is_one_line(
    module: str, says: str, run_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "sounddevice.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    line = mistake(["sample", run_dir, "--play"])
    assert says in line and "--out - | aplay" in line


@pytest.mark.usefixtures("sound_device", "nothing_is_drawn")
def test_what_cannot_be_heard_is_refused(run_dir: Path, tmp_path: Path) -> None:
    sample, files = ["sample", run_dir], ["--out", tmp_path / "o"]
    assert "give --out DIR" in mistake(sample)
    assert "take one sound, not 2" in mistake([*sample, "--out", "-", "--num", 2])
    assert "take one sound, not 2" in mistake([*sample, *files, "--play", "--num", 2])
    assert "take one sound, not 2; give --out DIR" in mistake([*sample, "--out", tmp_path / "a.wav", "--num", 2])
    assert "--raw is for --out -" in mistake([*sample, *files, "--raw"])
    assert "seconds is inf" in mistake([*sample, *files, "--seconds", "inf"])
    many = mistake([*sample, *files, "--num", 10**12])  # before they are listed
    assert "memories of 1000000000000 rows would take" in many
    assert not list(tmp_path.iterdir())
    terminal, other = os.openpty()
    with os.fdopen(other, "w") as stdout, redirect_stdout(stdout):
        assert "pipe it to a player" in mistake([*sample, "--out", "-"])
    os.close(terminal)
