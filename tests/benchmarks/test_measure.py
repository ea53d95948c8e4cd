"""What the benchmark counts, against hand counts; that its memories are full and its limits sane."""

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import record_function

from tests.engine.training import small_learner
from tests.laws import VOCAB_SIZE as V
from waveform.benchmarks.flops import counted_flops, forward_flops, model_flops, useful_flops
from waveform.benchmarks.model import random_tokens
from waveform.benchmarks.timing import matrix_rate, memory_rate, spread
from waveform.benchmarks.training import UPDATES_NEEDED, fill_memories, measure_training, profile_update
from waveform.decoding.cached import CachedDecoder
from waveform.engine import token_learner
from waveform.models.attention import softmax_attention
from waveform.models.registry import build


def full_state(model: Any, *, window: int, batch_size: int = 1) -> Any:
    state = model.init_state(batch_size, device="cpu", dtype=torch.float32)
    return fill_memories(model, state, window=window, vocab_size=V)[0]


def test_flops_of_a_compressive_transformer_are_those_counted_by_hand() -> None:
    L, W, M, C, c, d, F, P, B = 2, 16, 32, 32, 4, 64, 96, 24, 2
    model = build(
        "compressive_transformer", vocab_size=V, num_layers=L, window=W, memory=M, compressed=C, compression_rate=c,
        d_model=d, num_heads=(H := 4), d_feedforward=F, num_position_features=P,
    )  # fmt: skip
    inputs = torch.zeros(B, W, dtype=torch.int64), full_state(model, window=W, batch_size=B)
    counted = forward_flops(model, *inputs)
    K, G = M + C + W, W // c
    projections = W * d * d + 2 * K * d * d + W * d * d + W * d * P  # queries, keys and values, output, position
    pairs = W * K - W * (W - 1) // 2  # a query does not see the steps after it
    scores_and_mixing = pairs * (d + H * P) + pairs * d  # of longer queries and keys; of values
    layer = projections + scores_and_mixing + 2 * W * d * F + G * (c * d) * d  # the last makes the compressed slots
    compression_loss = 2 * B * L * (2 * G * d * d + 2 * W * W * d + 2 * W * G * d)  # their keys, two attentions
    assert counted == 2 * B * (L * layer + W * d * V) + compression_loss
    assert model_flops(model, *inputs) == 3 * (counted - compression_loss) + compression_loss


def test_of_attention_with_a_mask_visible_pairs_count() -> None:
    H, d, P = 2, 4, 6
    q, k, v, encoding = (torch.randn(shape) for shape in ((3, H, 5, d + P), (3, H, 7, d), (3, H, 7, d), (1, 7, P)))
    of_each_row = torch.rand(3, 1, 5, 7) < 0.5
    of_each_row[..., 0] = True
    bias = torch.zeros(of_each_row.shape).masked_fill_(~of_each_row, float("-inf"))
    for mask, num_pairs in (
        ({"bias": bias}, int(of_each_row.sum())),
        ({"bias": bias[:1]}, 3 * int(of_each_row[0].sum())),
        ({"first_used": (0, 2, 1)}, 3 * (5 * 7 - 10) - 5 * (0 + 2 + 1)),
    ):
        attend = partial(softmax_attention, q, k, v, scale=1.0, encoding=encoding, **mask)
        assert useful_flops(attend) == 2 * H * num_pairs * (2 * d + P) < counted_flops(attend)


def test_flops_of_a_wavenet_are_those_counted_by_hand() -> None:
    layers, taps, C, G, S, T, B = 6, 3, 16, 24, 20, 10, 3
    model = build(
        "wavenet", vocab_size=V, num_stacks=2, layers_per_stack=3, kernel_size=taps, residual_channels=C,
        gate_channels=G, skip_channels=S,
    )  # fmt: skip
    counted = forward_flops(model, torch.zeros(B, T, dtype=torch.int64), full_state(model, window=T, batch_size=B))
    convolutions = layers * taps * C * 2 * G + (layers - 1) * G * C + layers * G * S
    assert counted == 2 * B * T * (convolutions + S * S + S * V)


def test_flops_of_an_lstm_are_those_counted_by_hand() -> None:
    D, T, B = 16, 10, 3
    model: Any = build("lstm", vocab_size=V, num_layers=2, d_model=D)
    inputs = torch.zeros(B, T, dtype=torch.int64), model.init_state(B)
    layers = 2 * B * T * 2 * (4 * D * 2 * D)
    assert forward_flops(model, *inputs) == layers + 2 * B * T * D * V
    assert counted_flops(lambda: model(*inputs).hidden.sum().backward()) == 3 * layers
    of = partial(torch.empty, device="meta")
    weights = 2 * [of(4 * D, D), of(4 * D, D), of(4 * D), of(4 * D)]
    sizes: Any = (2, D, 0, 2, False, 0.0, True, False, [], None)  # of an LSTM with two layers, in training
    by_cudnn = partial(torch.ops.aten._cudnn_rnn, of(T, B, D), weights, 4, None, of(2, B, D), of(2, B, D), *sizes)
    assert counted_flops(by_cudnn) == layers


def test_attention_by_torch_is_counted_on_a_cpu() -> None:
    q = torch.randn(1, 2, 3, 8)  # widths that CPU flash attention takes
    assert counted_flops(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)) == 2 * 2 * 2 * 3 * 3 * 8


@pytest.mark.parametrize("compressed", [0, 8, 20])
def test_memories_are_full_when_reading_ends(compressed: int) -> None:
    model = build(
        "compressive_transformer", vocab_size=V, num_layers=1, d_model=8, num_heads=1, d_feedforward=8,
        num_position_features=4, window=8, memory=20, compressed=compressed, compression_rate=4,
    )  # fmt: skip
    steps = int(full_state(model, window=8).trunk.steps)
    assert steps - 8 >= 20 + 4 * compressed  # full before the last window but one


def test_a_step_reads_its_weights_and_cache_once() -> None:
    L, W, M, C, d, F, P, H, B = 2, 16, 16, 8, 32, 48, 8, 4, 3
    model = build(
        "compressive_transformer", vocab_size=V, num_layers=L, d_model=d, num_heads=H, d_feedforward=F,
        num_position_features=P, window=W, memory=M, compressed=C, compression_rate=4,
    )  # fmt: skip
    state = full_state(model, window=W, batch_size=B)
    counted = CachedDecoder(model, state).bytes_per_step
    slots = M + C + W  # with those that are masked
    weights = L * (d * (3 * d + H * P) + d * d + 2 * d * F) + d * V
    biases = L * (3 * d + H * P + F + d) + V
    assert counted == 4 * (weights + biases + L * 2 * B * slots * d + P * slots + slots)


def test_updates_are_timed_with_full_memories_and_no_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"num_layers": 1, "d_model": 8, "num_heads": 1, "d_feedforward": 8, "num_position_features": 4}
    fields |= {"window": 8, "memory": 16, "compressed": 8, "compression_rate": 4}
    tokens = random_tokens(tmp_path, vocab_size=V, num_rows=2, length=UPDATES_NEEDED * 8)
    learner = small_learner("compressive_transformer", tokens, fields=fields, batch_size=2, chunk=8, state="utterance")
    monkeypatch.setattr("waveform.benchmarks.training.matrix_rate", lambda *_, **__: lambda: 1e9)
    with mock.patch.object(token_learner, "score_window", wraps=token_learner.score_window) as scoring:
        figures = measure_training(learner)
    windows, states = zip(*(call.args[1:3] for call in scoring.call_args_list), strict=True)
    assert len(windows) == UPDATES_NEEDED - 1 == figures["tokens_per_second"]["repeats"] + 2
    assert not any(window.reset.any() for window in windows)
    assert min(int(state.trunk.steps.min()) for state in states) >= 16 + 4 * 8
    assert figures["tokens_per_update"] == 16
    # Backward does about twice the products of forward, so the rule of three is near what is carried out.
    assert 0.8 < figures["model_flops_per_token"] / figures["executed_flops_per_token"] < 1.1


def test_of_an_update_operations_that_no_other_one_calls_are_counted() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def update() -> None:
        torch.nn.functional.linear(x, x).sum().backward()  # linear, which calls others; sum; then backward's
        with record_function("waveform::kernel"):
            x.sum()
        time.sleep(0.01)

    forward = profile_update(lambda: torch.nn.functional.linear(x, x).sum())
    assert forward["num_operations"] == 2 and forward["seconds_in_operations"] > 0
    whole = profile_update(update)
    assert whole["num_operations"] > 4 and whole["seconds_between_operations"] >= 0.01
    kernel = profile_update(record_function("waveform::kernel")(x.sum))
    assert kernel["num_operations"] == 1


def test_limits_are_plausible() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < matrix_rate(cpu, dtype=torch.float32)() < 1e14
    assert 1e8 < memory_rate(cpu)() < 1e13


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "repeats": 3}
