"""A package of your own adds a model by one class and one entry point; then every verb works with it.

`plain_lstm` gives only what the contract requires, `full_lstm` every optional part too (tests/plugin_models.py).
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from tests import laws
from tests.calling import TRAIN, cli, figures_of, mistake, prepared_tones
from tests.plugin_models import FullLSTM
from tests.ranks.run_ranks import run_ranks
from tests.recipes.corpus_files import write_folder
from tests.test_laws import LAWS
from waveform.engine.interface import OptionalParts
from waveform.engine.metrics import read_metrics
from waveform.ranks.distributed import World
from waveform.verbs import bench

MODELS = ("plain_lstm", "full_lstm")
ROOT = Path(__file__).parents[1]
SETTINGS = [*TRAIN, "train.window=32", "train.unroll=2"]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A package whose entry points name the two models, for this process and those that it starts."""
    points = "[waveform.models]\nplain_lstm = tests.plugin_models:LSTM\nfull_lstm = tests.plugin_models:FullLSTM\n"
    site = write_folder(tmp_path / "site", {"my_models-1.0.dist-info/entry_points.txt": points})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (site, ROOT))))
    monkeypatch.setattr(FullLSTM, "used", set())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """data/, of audio."""
    prepared_tones(tmp_path, train=3, valid=1, test=2, seconds=0.2)
    return tmp_path


@pytest.mark.parametrize("model", MODELS)
def test_every_verb_works(model: str, place: Path) -> None:
    own = "train.checkpoint_activations=true" if model == "full_lstm" else "train.unroll=1"
    cli("train", place / "data", place / "run", f"model={model}", *SETTINGS, own)
    aux_losses = [record.get("aux_loss", 0) for record in read_metrics(place / "run")]
    assert any(loss > 0 for loss in aux_losses) == (model == "full_lstm")
    figures = figures_of(place / "e.json", "evaluate", place / "run")
    assert figures["model"] == model and 1 < figures["nats_per_token"] < 6
    sample = ["sample", place / "run", "--seconds", 0.01]
    cli(*sample, "--out", place / "wav", "--num", 2)
    assert len(list((place / "wav").glob("*.wav"))) == 2
    (analysed,) = figures_of(place / "a.json", "analyse", place / "run", "--tokens", 2000)["runs"]
    assert ("absent" in analysed["state_reuse"]) == (model == "plain_lstm")
    int8 = [*sample, "--out", place / "int8", "--int8"]
    if model == "plain_lstm":
        assert "this model has no int8 decoder; sample without int8" in mistake(int8)
        assert not FullLSTM.used
    else:
        cli(*int8)
        # All that OptionalParts declares, except what only several processes, a short unroll, train.compile or a model
        # with kernels of its own need.
        parts = {name for name in vars(OptionalParts) if not name.startswith("_")}
        rest = {"compile_layers", "prepare_kernels", "sharding_units", "trains_through_time", "why_no_int8"}
        assert FullLSTM.used == parts - rest | {"int8 decoder"}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bench(model: str, place: Path, monkeypatch: MonkeyPatch) -> None:
    """In this process, which spares the imports of another one; its peak of memory and its limits are not looked at."""
    for measured in ("training.matrix_rate", "sampling.memory_rate"):
        monkeypatch.setattr(f"waveform.benchmarks.{measured}", lambda *_, **__: lambda: 1e9)
    monkeypatch.setattr(bench, "run_in_child", lambda job: job.measure(**job.arguments, scratch=place))
    options = ["--model", model, "--preset", "demo", "--device", "cpu", "--audio-minutes", 0, "--batch-size", 1]
    settings = ["train.chunk=64", "train.window=32", f"train.unroll={1 + (model == 'full_lstm')}"]
    (figures,) = figures_of(place / "b.json", "bench", *options, *settings)["models"]
    assert figures["training"]["tokens_per_second"]["min"] > 0
    kinds = {case["decoder"] for case in figures["sampling"]}
    assert kinds == ({"exact"} if model == "plain_lstm" else {"exact", "int8"})


def _train(site: Path, arguments: list[object], world: World, folder: Path) -> None:
    sys.path.insert(0, str(site))
    cli("train", *arguments)


@pytest.mark.slow
def test_a_model_may_be_sharded(place: Path) -> None:
    train = [place / "data", place / "run", "model=full_lstm", *SETTINGS, "train.sharding=fsdp"]
    (place / "ranks").mkdir()
    run_ranks(partial(_train, place / "site", train), 2, place / "ranks")
    cli("evaluate", place / "run")


def test_what_a_model_lacks_is_refused(place: Path) -> None:
    train = ["train", place / "data", place / "run", *SETTINGS]
    line = mistake([*train, "model=plain_lstm", "train.unroll=1", "train.checkpoint_activations=true"])
    assert "LSTM has no layers that can be computed again" in line
    line = mistake([*train, "model=plain_lstm"])
    assert "train.unroll=2: LSTM passes no gradient from one window to the next" in line
    line = mistake([*train, "model=full_lstm", "train.unroll=1"])
    assert "some parameters of FullLSTM learn only from the losses of later windows (trains_through_time)" in line
    assert "set train.unroll=2 or more and train.chunk=64 or more" in line and "compression" not in line
    assert "trains_through_time" in FullLSTM.used


@pytest.mark.parametrize("law", [law for law in LAWS if law is not laws.check_gradient_in_state])  # which needs BPTT
@pytest.mark.parametrize("model", MODELS)
def test_the_laws_hold(model: str, law: Callable[[laws.Case], None], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(laws.CONFIGS, model, {"small": {"d_model": 6}})
    law(laws.Case(model, "small"))


def test_the_full_model_obeys_the_laws_of_gradients(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(laws.CONFIGS, "full_lstm", {"small": {"d_model": 6}})
    case = laws.Case("full_lstm", "small")
    laws.check_gradient_in_state(case)
    laws.check_gradients_of_parameters(case, carry_gradient=True)
