"""`train.compile`: figures of compiled layers are those of torch's operations, from few graphs; what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_trainer import assert_exact_resume
from tests.engine.training import small_learner, small_trainer
from tests.laws import CONFIGS, first_fields
from waveform.engine import model_options
from waveform.engine.model_options import why_no_compiler
from waveform.engine.token_set import TokenSet
from waveform.models import run_layers
from waveform.models.compressive_transformer import Layer
from waveform.system.errors import UserError

FIELDS = CONFIGS["compressive_transformer"]["conv"]
LENGTHS = [60, 45, 33, 80, 21, 52, 70, 9]  # rows begin and end utterances at different times
NUM_UPDATES = 12


@pytest.fixture(name="compiles")
def start_afresh(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile, with nothing compiled yet; skips if it does not work on this machine.

    Without --faults=long, torch runs the same graphs, forward and backward: making them C++ takes 40 s.
    """
    if pytestconfig.getoption("faults") == "short":
        only_traced = torch.compile(Layer.step, dynamic=False, backend="aot_eager")
        monkeypatch.setattr(run_layers, "compiled_step", lambda step: only_traced)
        monkeypatch.setattr(model_options, "why_no_compiler", lambda device: None)
    elif (reason := why_no_compiler(torch.device("cpu"))) is not None:
        pytest.skip(f"torch.compile does not work here: {reason}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def trained(tokens: TokenSet, **train: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums of each update, and the weights after the last."""
    learner = small_learner("compressive_transformer", tokens, fields=FIELDS, max_steps=100, **train)
    sums = torch.stack([learner.update()[0] for _ in range(NUM_UPDATES)])
    return sums, learner.module.state_dict()


# Warnings of torch about itself: the first it would hide if warnings were not errors.
_TORCHS_OWN = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Guards may run slower on Python 3.13.0"
)


@pytest.mark.slow
@pytest.mark.usefixtures("compiles")
@_TORCHS_OWN
@pytest.mark.parametrize("train", [{}, {"unroll": 2}, {"checkpoint_activations": True}])
def test_figures_are_those_of_torchs_operations(train: dict[str, Any], tokens: TokenSet) -> None:
    expected, weights = trained(tokens, **train)
    torch._dynamo.utils.counters.clear()
    sums, compiled_weights = trained(tokens, compile=True, **train)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled_weights, weights, rtol=1e-3, atol=1e-3)
    counters, graphs = torch._dynamo.utils.counters, 2 if "unroll" in train else 1
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"], counters


@pytest.mark.slow
@pytest.mark.usefixtures("compiles")
@_TORCHS_OWN
def test_a_run_that_was_saved_continues_as_if_it_had_not_stopped(tokens: TokenSet, tmp_path: Path) -> None:
    options = {"fields": FIELDS, "evaluate_tokens": 0, "decay_steps": 8}
    assert_exact_resume("compressive_transformer", tokens, tmp_path, compile=True, **options)
    assert small_trainer("compressive_transformer", tokens, tmp_path / "parts", **options).learner.step == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of torch 2.13 as its compiler loads
def test_without_a_compiler_it_is_refused(tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    why_no_compiler.cache_clear()
    torch._dynamo.reset()
    says = r"^train\.compile=true, but .*no-such-compiler.*; install a C\+\+ compiler"
    try:
        with pytest.raises(UserError, match=says):
            small_learner("compressive_transformer", tokens, fields=FIELDS, compile=True)
    finally:
        why_no_compiler.cache_clear()
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "fields", "train", "expected"),
    [
        ("wavenet", {}, {}, "train.compile: WaveNet.* has no layers that can be compiled; leave it false"),
        ("transformer_xl", {"attention": "reference"}, {}, r"model.attention=fused \(here reference\)"),
        ("compressive_transformer", {"compression": "most_used"}, {}, r"at attention weights \(here most_used\)"),
        ("compressive_transformer", {}, {"window": 2}, r"train.window \(2\) a multiple of model.window \(4\)"),
    ],
)
def test_what_it_cannot_do_is_refused(
    model: str, fields: dict[str, Any], train: dict[str, Any], expected: str, tokens: TokenSet
) -> None:
    with pytest.raises(UserError, match=expected):
        small_learner(model, tokens, fields=first_fields(model) | fields, compile=True, **train)


def test_no_preset_compiles() -> None:
    root = Path(__file__).parents[2]
    presets = [path for path in root.glob("*/conf/**/*.yaml") if "preset" in str(path)]
    assert presets and not any("compile" in path.read_text() for path in presets)
