"""The compiled layers of small models against the same layers by torch: outputs, states, losses and every gradient."""

import copy
import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from tests import laws
from waveform.analyses.hooks import observe_attention, observe_compression_loss
from waveform.engine.interface import state_tensors
from waveform.kernels import layers_op
from waveform.models import compression
from waveform.models.compression import Convolution
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.token_model import TokenState
from waveform.models.transformer_config import CompressiveTransformerConfig
from waveform.system.threads import kernel_threads, torch_in_one_thread

_ROWS, _WINDOW = 3, 16
_BASE = CompressiveTransformerConfig(
    vocab_size=11, num_layers=2, d_model=32, num_heads=2, d_feedforward=48, num_position_features=10,
    window=_WINDOW, memory=_WINDOW, compressed=6, compression_rate=4,
)  # fmt: skip
_VARIANTS: dict[str, dict[str, Any]] = {
    "conv": {},
    "one head": {"num_heads": 1, "num_position_features": 34},
    "longer memory": {"memory": 40},
    "shorter memory": {"memory": 8},
    "rate that leaves a remainder": {"compression_rate": 3},
    "a rate longer than memory": {"compressed_position": "window", "compression_rate": 20},
    "memory as long as what is compressed": {"memory": 15, "compression_rate": 3},
    "nothing compressed": {"compressed": 0, "memory": 24},
    "no memory": {"compressed": 0, "memory": 0},
    "mean": {"compression": "mean"},
    "a loss that trains keys and values": {"compression_gradient": "as_run", "compression_rate": 3},
    "dropout": {"dropout": 0.3},
    "dilated": {"compression": "dilated"},
    "autoencode": {"compression_loss": "autoencode"},
    "zeros": {"empty_memory": "zeros"},
    "contiguous": {"compressed_position": "contiguous"},
    "by layer": {"num_layers": 3, "memory": [16, 32, 32], "compressed": [0, 6, 6]},
    "by layer, neighbours unlike": {"num_layers": 3, "compressed": [6, 9, 6], "compression_rate": [4, 2, 4]},
    "by layer, mean": {"memory": [16, 24], "compression": "mean"},
}
_NUM_CALLS = {"by layer": 2, "by layer, neighbours unlike": 3, "by layer, mean": 2}  # of each piece; otherwise 1
# Lengths of calls, and how many of the pieces that windows cut them into are long enough for kernels.
_CUTS = {
    "windows": ([_WINDOW] * 7, 7),
    "parts of windows": ([_WINDOW, 9, 7, 3, 13, *[_WINDOW] * 4], 7),
    "longer calls": ([40, 56, 16], 8),
}


@pytest.fixture(name="compiled")
def mocked_kernels(monkeypatch: MonkeyPatch) -> Mock:
    """The compiled layers, whose calls are counted."""
    compiled = Mock(side_effect=layers_op.layers_in_kernels)
    monkeypatch.setattr(layers_op, "layers_in_kernels", compiled)
    return compiled


def make_model(**changes: Any) -> CompressiveTransformer:
    torch.manual_seed(0)
    model = CompressiveTransformer(dataclasses.replace(_BASE, **changes))
    return laws.randomise(model, std=0.1).float()  # no gain of 1, no bias of 0


def run(model: CompressiveTransformer, lengths: list[int]) -> dict[str, Tensor]:
    """What a model computes of the same random tokens, call by call, and the gradient of it all."""
    torch.manual_seed(1)  # of dropout
    generator = torch.Generator().manual_seed(1)
    state, found = model.init_state(_ROWS, dtype=next(model.parameters()).dtype), {}
    loss = torch.zeros(())
    for i, length in enumerate(lengths):
        hidden, state, aux = model(torch.randint(11, (_ROWS, length), generator=generator), state)
        found[f"hidden {i}"] = hidden.detach()
        loss = loss + (torch.randn(hidden.shape, generator=generator) * hidden).sum()
        for value in aux.values():
            found[f"loss {i}"] = value.detach()
            loss = loss + (value * torch.tensor([1.0, 2.0, 3.0])).sum()
    loss.backward()
    found |= {f"state {i}": tensor for i, tensor in enumerate(state_tensors(state))}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def run_by_torch(model: CompressiveTransformer, lengths: list[int]) -> dict[str, Tensor]:
    with MonkeyPatch.context() as patch:
        patch.setattr(CompressiveTransformer, "_takes_kernels", lambda *_: False)
        return run(model, lengths)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor] | None = None) -> None:
    """exact: in fp64; where sums cancel, torch's own rounding, which differs by processor, is the measure."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        tolerance = 4e-5 * (expected[name].double().norm() + 1e-6)
        if exact is not None:
            tolerance = max(tolerance, 2 * (expected[name] - exact[name]).double().norm())
        assert (value - expected[name]).double().norm() < tolerance, name


@pytest.mark.parametrize(
    ("variant", "cut"),
    [("conv", "windows"), ("conv", "longer calls"), *((each, "parts of windows") for each in _VARIANTS)],
)
def test_equal_to_torch(variant: str, cut: str, compiled: Mock) -> None:
    model, (lengths, num_calls) = make_model(**_VARIANTS[variant]), _CUTS[cut]
    expected = run_by_torch(model, lengths)
    assert not compiled.call_count
    found = run(model, lengths)
    assert compiled.call_count == num_calls * _NUM_CALLS.get(variant, 1)
    # For dropout, other random numbers are drawn in fp64.
    exact = None if model.config.dropout else run_by_torch(copy.deepcopy(model).double(), lengths)
    assert_near(found, expected, exact)


@pytest.mark.parametrize("variant", ["conv", "nothing compressed"])
def test_threads_change_no_output_and_gradients_by_rounding(variant: str, monkeypatch: MonkeyPatch) -> None:
    model, found = make_model(**_VARIANTS[variant]), []
    for threads in (1, 2, 3):
        monkeypatch.setattr("waveform.kernels.layers_op.kernel_threads", lambda threads=threads: threads)
        found.append(run(model, [_WINDOW] * 7))
    for name, value in found[0].items():
        tolerance = 1e-4 if name in dict(model.named_parameters()) else 0
        for other in found[1:]:
            torch.testing.assert_close(other[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    model = make_model()
    tokens = torch.randint(11, (_ROWS, 5 * _WINDOW))
    with torch.no_grad():
        together = model(tokens, model.init_state(_ROWS)).hidden
        for row in range(_ROWS):
            assert torch.equal(together[row : row + 1], model(tokens[row : row + 1], model.init_state(1)).hidden)


def test_a_row_that_is_not_a_number_stays_alone() -> None:
    """And no attention weight hides it."""
    model = make_model()
    trunk = model.init_state(_ROWS).trunk._replace(steps=torch.full((_ROWS,), 4))
    trunk.window[1, :, :4] = float("nan")
    hidden = model(torch.zeros(_ROWS, 12, dtype=torch.int64), TokenState(trunk)).hidden
    assert hidden[1].isnan().all() and not hidden[[0, 2]].isnan().any()


class Halved(Convolution):
    """As a package of your own may have it: a convolution, and something more."""

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        return super().forward(slots_BnD, usage_Bn) / 2


def test_what_inherits_from_the_convolution_compresses_in_its_own_way(compiled: Mock, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(compression.FUNCTIONS, "halved", Halved)
    model = make_model(compression="halved")
    expected = run_by_torch(model, [_WINDOW] * 7)
    assert_near(run(model, [_WINDOW] * 7), expected)
    assert compiled.call_count == 7


NOT_FOR_KERNELS: dict[str, dict[str, Any]] = {
    "post-norm": {"norm": "post"},
    "reference attention": {"attention": "reference"},
    "dropout of attention": {"attention_dropout": 0.1},
    "relu": {"activation": "relu"},
    "clamped": {"clamp_len": 5},
    "same length": {"same_length": True, "compressed": 0},
    "most used": {"compression": "most_used"},
    "narrow heads": {"num_heads": 4},
    "ragged feed-forward": {"d_feedforward": 50},
}


@pytest.mark.parametrize("reason", NOT_FOR_KERNELS)
def test_other_models_run_by_torch(reason: str) -> None:
    assert not make_model(**NOT_FOR_KERNELS[reason]).has_own_threads


def test_other_calls_run_by_torch(compiled: Mock) -> None:
    tokens = torch.zeros(_ROWS, _WINDOW, dtype=torch.int64)
    model = make_model()
    state = model.init_state(_ROWS)
    model.double()(tokens, model.init_state(_ROWS, dtype=torch.float64))
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens, state)
    model(tokens[:, :7], state)
    model(tokens[:, :8], TokenState(state.trunk._replace(steps=torch.tensor([0, 2, 4]))))
    model.carry_gradient = True
    model(tokens, state)
    model.carry_gradient, model.checkpoint_activations = False, True
    model(tokens, state)
    assert not model.has_own_threads
    with torch.no_grad():
        assert model.has_own_threads
    model.checkpoint_activations = False
    seen: list[int] = []
    with observe_attention(model, lambda layer, *of_call: seen.append(layer)):
        model(tokens, state)
    assert seen == [0, 1]
    with observe_compression_loss(model, lambda layer, loss: None):
        model(tokens, state)
    assert not compiled.call_count
    model(tokens, state)
    assert compiled.call_count == 1


def test_kernels_have_the_threads_that_torch_leaves() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch_in_one_thread(), torch_in_one_thread():
            assert torch.get_num_threads() == 1 and kernel_threads() == 2
        assert torch.get_num_threads() == kernel_threads() == 2
    finally:
        torch.set_num_threads(before)
