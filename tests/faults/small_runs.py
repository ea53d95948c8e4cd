"""Tiny runs on speech, on text and of an agent, with two checkpoints each, for faults to damage."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from recipes.cli import main as recipes
from tests.calling import write_splits
from tests.faults.calling import must_work
from tests.recipes.corpus_files import sentences, write_folder
from waveform.cli import main as waveform

_MODEL = [
    "model.num_layers=1", "model.d_model=8", "model.num_heads=2", "model.d_feedforward=8", "model.window=16",
    "model.memory=16", "model.compressed=8", "model.num_position_features=4",
]  # fmt: skip
_TRAIN = [
    "train.max_steps=4", "train.batch_size=2", "train.chunk=32", "train.checkpoint_every=2", "train.evaluate_every=2",
    "train.log_every=1", "train.device=cpu", "train.evaluate_tokens=200", "train.warmup_steps=1", "train.lr=1e-3",
    "train.update_period=1", "train.decay_steps=6", "train.keep_checkpoints=2",
]  # fmt: skip
WAVENET = [
    "model.num_stacks=1", "model.layers_per_stack=3", "model.residual_channels=8", "model.gate_channels=8",
    "model.skip_channels=8",
]  # fmt: skip
WAVENET_SETTINGS = ["model=wavenet", *WAVENET, *_TRAIN, "train.sample_seconds=0"]
TEXT_SETTINGS = ["model=compressive_transformer", *_MODEL, *_TRAIN]
SETTINGS = [*TEXT_SETTINGS, "train.sample_seconds=0"]
SUBWORDS = ["corpus.tokens=subwords", "corpus.vocab_size=280"]
AGENT_SETTINGS = [
    "preset=smoke", "train.max_steps=4", "train.checkpoint_every=2", "train.keep_checkpoints=2", "train.log_every=1",
    "train.device=cpu",
]  # fmt: skip
_make = partial(must_work, seconds=240)  # the first one on a machine compiles kernels


write_audio = partial(write_splits, train=3, valid=1, test=2, seconds=0.03)


def write_texts(folder: Path) -> None:
    """A few short texts."""
    write_folder(folder, {f"{i}.txt": "\n".join(sentences(6, seed=i)) + "\n" for i in range(6)})


def make_speech_run(folder: Path, settings: Sequence[str] = SETTINGS) -> None:
    """audio/, data/ and run/ in `folder`."""
    write_audio(folder / "audio")
    _make(waveform, ["prepare", folder / "audio", folder / "data"])
    _make(waveform, ["train", folder / "data", folder / "run", *settings])


def make_text_run(folder: Path) -> None:
    """texts/, data/ and run/ in `folder`."""
    write_texts(folder / "texts")
    _make(recipes, ["prepare", "folder", folder / "texts", folder / "data", *SUBWORDS])
    _make(recipes, ["train", folder / "data", folder / "run", "preset=smoke", *TEXT_SETTINGS])


_MAKERS: dict[str, Callable[[Path], None]] = {
    "speech": make_speech_run,
    "text": make_text_run,
    "agent": lambda folder: _make(recipes, ["train", "object_matching", folder / "run", *AGENT_SETTINGS]),
    "wavenet": partial(make_speech_run, settings=WAVENET_SETTINGS),
}


@cache
def whole(kind: str) -> Path:
    """A folder with a run of this kind and its data, made once for all faults of a process; .whole is a copy of it."""
    folder = Path(tempfile.mkdtemp(prefix="waveform-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _MAKERS[kind](folder / kind)
    shutil.copytree(folder / kind, folder / f"{kind}.whole")
    return folder / kind


def restored(kind: str) -> Path:
    """The same folder as it was before faults changed it: a run knows where its data is, so all have one place."""
    shutil.rmtree(whole(kind))
    return shutil.copytree(whole(kind).with_suffix(".whole"), whole(kind))  # with the times that `prepare` knows
