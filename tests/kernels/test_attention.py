"""Compiled attention against softmax written out at fp64: output and gradients; and when it is taken."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.laws import assert_same
from tests.models.test_attention import written_out
from waveform.kernels import attention as kernels
from waveform.models import attention
from waveform.models.attention import softmax_attention

B, H, d, P = 2, 3, 16, 32
SCALE = 0.3
# Queries that are less than a block, a whole one, and several of which the last is not whole.
SIZES = [(1, 16), (16, 48), (64, 64), (150, 208)]


def tensors(num_queries: int, num_slots: int, *, num_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as a model makes them: parts of one product, heads side by side."""
    torch.manual_seed(0)
    q = torch.randn(B, H, num_queries, d + num_features)
    kv = torch.randn(B, num_slots, 2 * H * d)
    k, v = (x.unflatten(-1, (H, d)).transpose(1, 2) for x in kv.chunk(2, dim=-1))
    return tuple(x.detach().requires_grad_() for x in (q, k, v))


def attended(function: Any, given: tuple[Tensor, ...], grad: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    out = function(*given, scale=SCALE, **options)
    return [out, *torch.autograd.grad(out, given, grad.to(out.dtype))]


@pytest.mark.parametrize("num_features", [0, P])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equal_to_softmax_written_out(size: tuple[int, int], causal: bool, num_features: int) -> None:
    given = tensors(*size, num_features=num_features)
    encoding = torch.randn(1, size[1], P) if num_features else None
    grad = torch.randn(B, H, size[0], d)
    made = attended(kernels.attention_in_kernels, given, grad, causal=causal, encoding=encoding)
    precise = tuple(x.detach().double().requires_grad_() for x in given)
    encoding = None if encoding is None else encoding.double()
    visible = torch.ones(size, dtype=torch.bool).tril(size[1] - size[0] if causal else size[1])
    wanted = attended(written_out, precise, grad, visible=visible, encoding=encoding)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    given, grad = tensors(80, 96, num_features=P), torch.randn(B, H, 80, d)
    encoding, results = torch.randn(1, 96, P), []
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(kernels, "kernel_threads", lambda n=num_threads: n)
        results.append(attended(kernels.attention_in_kernels, given, grad, causal=True, encoding=encoding))
        assert_same(results[-1], results[0], atol=0)


@pytest.fixture(name="calls")
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The kernels, which take any size while this is open."""
    calls = Mock(side_effect=kernels.attention_in_kernels)
    monkeypatch.setattr(attention, "_MIN_SCORES", 1)
    monkeypatch.setattr(kernels, "attention_in_kernels", calls)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taken_for_whole_vectors_and_rows_with_as_many_slots(dtype: torch.dtype, calls: Mock) -> None:
    q, k, v = (x.to(dtype) for x in tensors(16, 48, num_features=0))
    assert softmax_attention(q, k, v, scale=SCALE).dtype == dtype
    softmax_attention(q, k, v, scale=SCALE, first_used=(0, 0))
    assert calls.call_count == 2
    softmax_attention(q, k, v, scale=SCALE, first_used=(16, 0))
    assert [call.args[1].shape[2] for call in calls.call_args_list[2:]] == [48, 32]


def test_positions_of_any_width_are_padded(calls: Mock) -> None:
    q, k, v = tensors(16, 48, num_features=24)
    encoding = torch.randn(1, 48, 24)
    out = softmax_attention(q, k, v, scale=SCALE, causal=True, encoding=encoding)
    visible = torch.ones(16, 48, dtype=torch.bool).tril(32)
    expected = written_out(q, k, v, visible=visible, scale=SCALE, encoding=encoding)
    calls.assert_called_once()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("why", ["a mask", "ragged slots", "fp64", "a mode", "few scores"])
def test_left_to_torch(why: str, calls: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float64 if why == "fp64" else torch.float32
    q, k, v = (x.to(dtype) for x in tensors(16, 48 if why != "ragged slots" else 47, num_features=0))
    bias = torch.zeros(1, 1, 16, 48) if why == "a mask" else None
    if why == "few scores":
        monkeypatch.setattr(attention, "_MIN_SCORES", B * H * 16 * 48 + 1)
    with FlopCounterMode(display=False) if why == "a mode" else nullcontext():
        softmax_attention(q, k, v, scale=SCALE, bias=bias)
    calls.assert_not_called()
