"""The LSTM against its formula, and the sizes that comparisons use (its laws are in tests/test_laws.py)."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.lstm import LSTM
from recipes.text import compose_config as compose_text
from tests import laws
from waveform.engine.interface import map_state
from waveform.runs.configured_model import model_from, num_parameters
from waveform.speech.config import compose_config as compose_speech


def build(**fields: Any) -> LSTM:
    torch.manual_seed(0)
    return laws.randomise(LSTM(LSTM.Config(laws.VOCAB_SIZE, **fields)))


def written_out(model: LSTM, tokens: Tensor) -> Tensor:
    """tokens [T] of a fresh stream -> h of the last layer [T, D], one step and one gate at a time."""
    config = model.config
    h, c = torch.zeros(2, config.num_layers, config.d_model, dtype=torch.float64)
    outputs = []
    for token in tokens:
        x = model.embedding(token)
        for layer in range(config.num_layers):
            weight_ih, weight_hh, bias_ih, bias_hh = model.layers.all_weights[layer]
            gates = weight_ih @ x + bias_ih + weight_hh @ h[layer] + bias_hh
            write, forget, candidate, read = gates.chunk(4)
            c[layer] = forget.sigmoid() * c[layer] + write.sigmoid() * candidate.tanh()
            h[layer] = x = read.sigmoid() * c[layer].tanh()
        outputs.append(x)
    return torch.stack(outputs)


@pytest.mark.parametrize("fields", [{"num_layers": 3, "d_model": 7}, laws.CONFIGS["lstm"]["adaptive-tied-one-layer"]])
def test_equals_the_formula(fields: dict[str, Any]) -> None:
    model = build(**fields)
    tokens = laws.random_tokens(29)
    with torch.no_grad():
        hidden = laws.run(model, tokens, laws.fresh_state(model), laws.ragged_cuts(29, longest=9))[0]
        for row, text in enumerate(tokens):
            laws.assert_same(hidden[row], written_out(model, text))


def test_gradient_flows_through_all_steps_of_a_call_and_of_an_unroll() -> None:
    """Of the first step's input, from the last step's output: the same in one call and in three."""
    model = build(num_layers=2, d_model=6)
    tokens = laws.random_tokens(12)
    found = []
    for cuts in ([12], [5, 4, 3]):
        model.carry_gradient = True
        with laws.traced_embeddings(model) as embeddings:
            hidden = laws.run(model, tokens, laws.fresh_state(model), cuts)[0]
        hidden[:, -1].sum().backward()
        found.append(embeddings[0].grad[:, 0])
    assert found[0].abs().min() > 0
    laws.assert_same(found[1], found[0])


def test_forget_gates_start_open() -> None:
    torch.manual_seed(0)
    model = LSTM(LSTM.Config(laws.VOCAB_SIZE, num_layers=2, d_model=64))
    for _, _, bias_ih, bias_hh in model.layers.all_weights:
        write, forget, candidate, read = (bias_ih + bias_hh).detach().chunk(4)
        assert forget.mean() == pytest.approx(1, abs=0.1)
        assert torch.stack([write, candidate, read]).mean().abs() < 0.1


def test_dropout_is_on_what_enters_and_leaves_layers() -> None:
    """Not on the recurrence: a state that was not zeroed in part goes in and comes out (Zaremba et al. 2014)."""
    model = build(num_layers=2, d_model=40, dropout=0.5)
    model.train()
    tokens, fresh = laws.random_tokens(5), laws.fresh_state(model)
    hidden, state, _ = model(tokens, fresh)
    assert 0.4 < (hidden == 0).double().mean() < 0.6
    assert not any((part == 0).any() for part in state.trunk)
    again = model(tokens, fresh).state
    assert not torch.equal(again.trunk.hidden[:, 0], state.trunk.hidden[:, 0])  # the input's
    model.dropout.p = 0.0
    one, other = (model(tokens, fresh).state.trunk for _ in range(2))
    assert torch.equal(one.hidden[:, 0], other.hidden[:, 0])
    assert not torch.equal(one.hidden[:, 1], other.hidden[:, 1])  # between layers
    map_state(laws.assert_same, model.eval()(tokens, fresh).state, model(tokens, fresh).state)


_enwik8, _recall = partial(compose_text, "enwik8"), partial(compose_text, "recall")


@pytest.mark.parametrize(
    ("compose", "preset", "vocab_size", "share"),
    [
        *((compose_speech, name, 256, 0.01) for name in ("demo", "ten_minutes", "small", "clips_4m", "speech_paper")),
        (compose_speech, "hour", 256, 0.02),
        (_enwik8, "small", 256, 0.01),
        (_enwik8, "cpu", 256, 0.01),
        (_enwik8, "smoke", 256, 0.02),
        (_recall, "small", 34, 0.01),
    ],
)
def test_presets_match_the_compressive_transformer(compose: Any, preset: str, vocab_size: int, share: float) -> None:
    def size(model: str) -> int:
        dataset = {"vocab_size": vocab_size, "modality": {"kind": "audio"}}
        with torch.device("meta"):
            return num_parameters(model_from(compose([f"preset={preset}", f"model={model}"]) | {"dataset": dataset}))

    others = ["lstm", "transformer_xl", *(["wavenet"] if compose is _enwik8 else [])]  # on audio it has its own
    assert list(map(size, others)) == pytest.approx([size("compressive_transformer")] * len(others), rel=share)


def test_bf16_products_on_a_processor_without_avx512() -> None:
    """torch and oneDNN are told so before they begin; its LSTM in bf16 ended in an error there."""
    program = """
import torch
from baselines.lstm import LSTM
model = LSTM(LSTM.Config(8, num_layers=2, d_model=16))
state = model.init_state(3, device="cpu", dtype=torch.float32)
with torch.autocast("cpu", dtype=torch.bfloat16):
    step = model(torch.zeros(3, 5, dtype=torch.int64), state)
    loss = model.head.nll(step.hidden, torch.zeros(3, 5, dtype=torch.int64)).sum()
loss.backward()
assert all(parameter.grad is not None for parameter in model.layers.parameters())
"""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | limits)
