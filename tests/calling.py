"""Calls the command within the test's process, on small models and synthesised audio."""

import io
import json
import os
import signal
import wave
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml
from pytest import MonkeyPatch

from tests.faults import forks
from waveform.audio.demo_speech import demo_speech_dir
from waveform.cli import main
from waveform.engine.learner import Learner

Main = Callable[[list[str]], int]
Capsys = pytest.CaptureFixture[str]
MODELS = ("compressive_transformer", "transformer_xl", "wavenet")
SMALL = {
    "compressive_transformer": "num_layers=1 d_model=16 num_heads=2 d_feedforward=16 window=64 memory=64 compressed=16",
    "transformer_xl": "num_layers=1 d_model=16 num_heads=2 d_feedforward=16 window=64 memory=64",
    "wavenet": "num_stacks=1 layers_per_stack=4 kernel_size=2 residual_channels=8 gate_channels=8 skip_channels=8",
}
TRAIN = [
    *("train.max_steps=6", "train.batch_size=2", "train.chunk=64", "train.evaluate_every=6", "train.device=cpu"),
    *("train.checkpoint_every=3", "train.log_every=2", "train.sample_seconds=0.01", "train.evaluate_tokens=4000"),
]


def settings(model: str) -> list[str]:
    """Those of a small model that trains for six steps."""
    return [f"model={model}", *(f"model.{field}" for field in SMALL[model].split()), *TRAIN]


def cli(*arguments: Any, main: Main = main) -> None:
    """Run `waveform ARGUMENTS`, or those of another command's `main`, which must succeed."""
    assert main([str(argument) for argument in arguments]) == 0


def figures_of(file: Path, *arguments: Any, main: Main = main) -> Any:
    """What a command writes into `file` as its JSON."""
    cli(*arguments, "--json", file, main=main)
    return json.loads(file.read_bytes())


def printed(*arguments: Any, main: Main = main) -> str:
    """What a command, which must succeed, prints on stdout."""
    with redirect_stdout(io.StringIO()) as out:
        cli(*arguments, main=main)
    return out.getvalue()


def mistake(arguments: Sequence[Any], *, main: Main = main, name: str = "waveform") -> str:
    """The one line that a mistaken command prints."""
    with redirect_stderr(io.StringIO()) as said:
        code = main([str(argument) for argument in arguments])
    err = said.getvalue().strip()
    assert code == 2 and err.startswith(f"{name} {arguments[0]}: "), err
    assert "Traceback" not in err and len(err.splitlines()) == 1, err
    return err


def write_tones(folder: Path, *, num: int, seconds: float = 0.4) -> None:
    """Tones with some noise, as files with odd characters in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    time_s = np.arange(round(24_000 * seconds)) / 24_000
    for i in range(num):
        noise = 0.01 * np.random.default_rng(i).standard_normal(len(time_s))
        soundfile.write(folder / f"tone {i} ä.wav", 0.4 * np.sin(2 * np.pi * (150 + 40 * i) * time_s) + noise, 24_000)


def write_speech(folder: Path) -> None:
    """The beginning of a recording of real speech for each split."""
    for split in ("train", "valid", "test"):
        (folder / split).mkdir(parents=True)
        samples, rate_hz = soundfile.read(min((demo_speech_dir() / split).glob("*.flac")))
        soundfile.write(folder / split / "beginning.flac", samples[: rate_hz // 2], rate_hz)


def write_splits(folder: Path, *, train: int = 1, valid: int = 1, test: int = 1, seconds: float = 0.4) -> Path:
    """So many tones in each split; returns the folder."""
    for split, num in (("train", train), ("valid", valid), ("test", test)):
        write_tones(folder / split, num=num, seconds=seconds)
    return folder


def prepared_tones(place: Path, **tones: Any) -> Path:
    """audio/ in `place`, as of `write_splits`, and the data set of it, which is returned."""
    write_splits(place / "audio", **tones)
    cli("prepare", place / "audio", place / "data")
    return place / "data"


def before(monkeypatch: MonkeyPatch, owner: Any, name: str, action: Callable[..., object]) -> None:
    """As `forks.before`, until the test ends; the function may be a module's, a class's or an object's."""
    monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it comes back
    forks.before(owner, name, action)


def interrupt_training(monkeypatch: MonkeyPatch, *, at: int) -> list[int]:
    """Have this process sent SIGINT at an update, counted from 1; returns the numbers of all that are made."""
    made = list[int]()

    def count(_: Learner) -> None:
        made.append(len(made) + 1)
        if made[-1] == at:
            os.kill(os.getpid(), signal.SIGINT)

    before(monkeypatch, Learner, "update", count)
    return made


def config_of(run: Path) -> dict[str, Any]:
    """What the config.yaml of a run says."""
    config: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return config


def pcm_of(file: Path) -> bytes:
    """The samples of a WAV file."""
    with wave.open(str(file)) as sound:
        return sound.readframes(sound.getnframes())
