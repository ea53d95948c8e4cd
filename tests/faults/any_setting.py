"""Any value of any setting of a tiny run, agent or corpus, of the right type or of a wrong one."""

import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import numpy as np
import soundfile
from hypothesis import strategies as st

from recipes.cli import main as recipes
from recipes.corpora.catalogue import find_recipe
from recipes.reinforcement.settings import compose_config as compose_agent
from recipes.text import compose_config as compose_text
from tests.faults.calling import call, forget_peak_memory, must_work, peak_memory_mb, process_memory_mb
from tests.faults.fault import fault
from waveform.cli import main as waveform
from waveform.engine.train_config import BaseTrainConfig
from waveform.models.registry import model_names
from waveform.speech.config import compose_config as compose_speech

_ATTENTION = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_feedforward": 8, "num_position_features": 4}
_TINY: dict[str, dict[str, int]] = {
    "compressive_transformer": {**_ATTENTION, "window": 4, "memory": 4, "compressed": 2, "compression_rate": 2},
    "transformer_xl": {**_ATTENTION, "window": 4, "memory": 4},
    "lstm": {"num_layers": 1, "d_model": 8},
    "wavenet": {"num_stacks": 1, "layers_per_stack": 2, "residual_channels": 8, "gate_channels": 8, "skip_channels": 8},
}
_STEP = ["train.max_steps=1", "train.batch_size=2", "train.chunk=8"]
_ON_DATA = [*_STEP, "train.window=null", "train.update_period_from=0", "train.evaluate_tokens=0"]
_SPLIT = ["data.split.valid=0.3", "data.split.test=0.3"]
_RECALL = ["corpus.keys=2", "corpus.episode=32", "corpus.train=4", "corpus.valid=2", "corpus.test=2"]
# They choose the defaults of other settings; and what takes a minute, or starts processes.
_LEFT_OUT = ("model.name", "preset", "recipe", "study", "train.compile", "env_processes")
_WHOLE = [0, 1, -1, 2, 3, 7, 2**31, 2**32 + 1, 10**11, 2**53 + 1, 2**63 - 1, 2**63, 10**21, 10**400]
_REAL = ["nan", "inf", "-inf", "0.0", "-0.0", "0.5", "1.0", "1e-9", "5e-324", "1e30", "1e300", "1e-400", "1e400"]
_OTHER = ["null", "true", "false", "", "[]", "[1,2]", "[[]]", "{}", "{a:1}", "text", "1_0", "0x10", "'3'", "cpu"]
# Sizes between are accepted and take minutes.
_WHOLE_NUMBERS = st.one_of(st.sampled_from(_WHOLE), st.integers(-3, 200), st.integers(2**31), st.integers(max_value=-1))
_REAL_NUMBERS = st.one_of(st.sampled_from(_REAL), st.floats(0, 1).map(repr), st.floats().map(repr))
_ANYTHING = st.one_of(st.sampled_from(_OTHER), _WHOLE_NUMBERS.map(str), _REAL_NUMBERS)
_BY_TYPE = {int: _WHOLE_NUMBERS.map(str), float: _REAL_NUMBERS, bool: st.sampled_from(["true", "false"])}
_MACHINE_BYTES, _MOST_MB, _MOST_S = 1 << 30, 1000, 2.0


class _Setting(NamedTuple):
    """One setting, and a command that takes it."""

    name: str
    default: Any
    main: Callable[[Sequence[str]], int]
    arguments: Sequence[str | Path]

    def values(self) -> st.SearchStrategy[str]:
        """Values of its type, and of others."""
        own = _BY_TYPE.get(type(self.default), _ANYTHING)
        return st.one_of(own, own, _ANYTHING)


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in _LEFT_OUT:
            yield f"{prefix}{key}", value


def _tiny(model: str) -> list[str]:
    return [f"model={model}", *(f"model.{name}={size}" for name, size in _TINY.get(model, {}).items())]


def _settings(folder: Path) -> Iterator[_Setting]:
    """Every setting of runs on speech and on text, of agents, and of corpora; makes their data in `folder`."""
    audio, corpus, run = folder / "audio", folder / "corpus", folder / "run"
    audio.mkdir()
    corpus.mkdir()
    for i in range(10):
        soundfile.write(audio / f"{i}.wav", np.random.default_rng(i).uniform(-0.5, 0.5, 300), 24_000)
        (corpus / f"{i}.txt").write_text("a few words, and a few words more\n" * 3)
    must_work(waveform, ["prepare", audio, folder / "speech", *_SPLIT])
    must_work(recipes, ["prepare", "recall", folder / "recall", *_RECALL])
    for model in model_names():
        tiny = [*_tiny(model), *_ON_DATA]
        for name, value in _leaves(compose_speech([f"model={model}"])):
            source = [audio, run, *_SPLIT] if name.startswith("data.") else [folder / "speech", run]
            yield _Setting(name, value, waveform, ["train", *source, *tiny, "train.sample_seconds=0"])
    for model in ("compressive_transformer", "transformer_xl"):
        tiny = ["preset=smoke", *_tiny(model)]
        for name, value in _leaves(compose_text("recall", tiny)):
            yield _Setting(name, value, recipes, ["train", folder / "recall", run, *tiny, *_ON_DATA])
    for model in ("compressive_transformer", "lstm"):
        tiny = ["preset=smoke", *_tiny(model), *_STEP]
        for recipe, own in (("object_matching", []), ("rl", ["env=CartPole-v1"])):
            for name, value in _leaves(compose_agent(recipe, [*tiny, *own])):
                yield _Setting(name, value, recipes, ["train", recipe, run, *tiny, *own])
    subwords = ["folder", corpus, folder / "made", "corpus.tokens=subwords"]
    one_file = ["enwik8", corpus / "0.txt", folder / "made", "corpus.check=false"]
    for arguments in (["recall", folder / "made", *_RECALL], subwords, one_file):
        for name, value in vars(find_recipe(str(arguments[0])).settings()).items():
            yield _Setting(f"corpus.{name}", value, recipes, ["prepare", *arguments])


@contextmanager
def _small_machine() -> Iterator[None]:
    """Estimates of what a setting takes are of a machine of 1 GB; each run makes a step, whatever its budget is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(process_memory_mb("VmData")) << 20) + 3 * _MACHINE_BYTES, hard))
    try:
        with (
            mock.patch("waveform.system.ram.memory_limit_bytes", lambda: _MACHINE_BYTES),
            mock.patch("waveform.command.outcome.limited_to_ram", nullcontext),
            mock.patch.object(BaseTrainConfig, "share", lambda self, step, seconds: float(step >= 1)),
        ):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@fault("any value of any setting", short=25, long=5000)
def change(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: a step is made with it, or one line refuses it within two seconds of the processor and 1 GB, exit code
    2.
    """
    every, outcomes = list(_settings(folder)), Counter()
    kept = set(folder.iterdir())
    changes = st.sampled_from(every).flatmap(lambda setting: st.tuples(st.just(setting), setting.values()))

    @hypothesis.seed(rng.randrange(2**32))
    @hypothesis.settings(max_examples=cases, derandomize=False, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(changes)
    def check(changed: tuple[_Setting, str]) -> None:
        setting, value = changed
        for left in set(folder.iterdir()) - kept:
            shutil.rmtree(left)
        before_mb, began = forget_peak_memory(), time.process_time()
        outcome = call(setting.main, [*setting.arguments, f"{setting.name}={value}"])
        seconds, taken_mb = time.process_time() - began, peak_memory_mb() - before_mb
        context = f"{setting}={value}: {seconds:.1f} s, {taken_mb:.0f} MB"
        refused = outcome.refused(context)
        assert not refused or (seconds < _MOST_S and taken_mb < _MOST_MB), f"it is refused too late: {context}"
        outcomes["refused" if refused else "a step was made"] += 1

    with _small_machine():
        check()
    return {"settings": len(every), "outcomes": dict(sorted(outcomes.items()))}
