"""Attention against softmax written out: output and gradients, for every mask; what is kept; and dropped weights.

And how heads start: local in the lower layers, as sharply for any width of positions, and blind above.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from waveform.models import attention
from waveform.models.attention import RelativeAttention, Slots, encode_times, softmax_attention
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.transformer_config import CompressiveTransformerConfig

_B, _H, _T, _K, _d, _P = 3, 2, 7, 12, 4, 6
_SCALE = 0.3
_FIRST_USED = (0, 4, 0)  # slots of each row


def _attention(d_model: int, *, num_heads: int = 2, **fields: Any) -> RelativeAttention:
    return RelativeAttention(CompressiveTransformerConfig(256, d_model=d_model, num_heads=num_heads, **fields))


def _bias(visible: Tensor) -> dict[str, Any]:
    return {"bias": torch.zeros(visible.shape, dtype=torch.float64).masked_fill_(~visible, float("-inf"))}


def _random_mask(num_rows: int) -> Tensor:
    mask = torch.rand(num_rows, 1, _T, _K) < 0.5
    mask[..., 0] = True  # every query sees something
    return mask


_CAUSAL = torch.ones(_T, _K, dtype=torch.bool).tril(_K - _T)
_IN_USE = _CAUSAL & (torch.arange(_K) >= torch.tensor(_FIRST_USED)[:, None, None, None])
# What is visible, and how it is said
MASKS: dict[str, Callable[[], tuple[Tensor, dict[str, Any]]]] = {
    "causal": lambda: (_CAUSAL, {"causal": True}),
    "everything": lambda: (torch.ones(_T, _K, dtype=torch.bool), {}),
    "one for all rows": lambda: ((mask := _random_mask(1)), _bias(mask)),
    "of each row": lambda: ((mask := _random_mask(_B)), _bias(mask)),
    "slots in use": lambda: (_IN_USE, {"first_used": _FIRST_USED}),
}


def written_out(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor, scale: float, encoding: Tensor | None) -> Tensor:
    if encoding is not None:
        k = torch.cat([k, encoding[:, None].expand(*k.shape[:3], -1)], dim=-1)
    logits = scale * q @ k.transpose(-1, -2)
    return logits.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ v


@pytest.mark.parametrize("positions", [False, True], ids=["content", "positions"])
@pytest.mark.parametrize("sees", MASKS)
def test_equals_softmax_written_out(sees: str, positions: bool) -> None:
    torch.manual_seed(0)
    shapes = [(_B, _H, _T, _d + (_P if positions else 0)), (_B, _H, _K, _d), (_B, _H, _K, _d)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    visible, options = MASKS[sees]()
    encoding = torch.randn(1, _K, _P, dtype=torch.float64) if positions else None
    out = softmax_attention(*inputs, scale=_SCALE, encoding=encoding, **options)
    expected = written_out(*inputs, visible=visible, scale=_SCALE, encoding=encoding)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    grad_out = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, grad_out) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("has_mask", [False, True])
def test_received_attention_is_the_sum_over_queries(has_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERIES", 3)
    torch.manual_seed(0)
    layer = _attention(8, num_position_features=4).double()
    times = torch.arange(-4.0, 7)[None].double()
    encoding = encode_times(times, num_position_features=4, dtype=torch.float64)
    visible = (torch.rand(2, 1, 7, 11) < 0.5).index_fill_(3, torch.tensor([0]), True) if has_mask else None
    slots = Slots(times[:, 4:], times, encoding[:, 4:], encoding, visible)
    bias = {} if visible is None else _bias(visible)
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    attended = layer(x[:, 4:], x[:, :4], slots._replace(**bias))
    received = layer.received_attention(attended, slots)
    weights = layer.weights(attended.queries, attended.keys, slots)
    torch.testing.assert_close(received, weights.mean(dim=1).sum(dim=1), rtol=0, atol=1e-13)


def test_keeps_nothing_quadratic_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MIN_SCORES", 1)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    num_queries, num_slots = 64, 96
    q = torch.randn(1, 1, num_queries, 16, requires_grad=True)
    k, v = (torch.randn(1, 1, num_slots, 16, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        softmax_attention(q, k, v, scale=1.0, causal=True)
    assert kept and max(kept) < num_queries * num_slots / 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("visible", [False, True], ids=["causal", "mask"])
def test_equals_the_reference(visible: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fused`, in bf16 by kernels unless there is a mask: as near the fp64 reference as rounded inputs allow."""
    monkeypatch.setattr(attention, "_MIN_SCORES", 1)
    torch.manual_seed(0)
    T, K = 200, 304
    times, query_times = torch.arange(T - K, T).double()[None], torch.arange(T).double()[None]
    mask = (times[:, None] <= query_times[..., None])[:, None] & (torch.arange(K) > 1)
    exact = _attention(32, num_position_features=6, attention="reference").double()
    for bias in (exact.content_bias, exact.position_bias):
        torch.nn.init.normal_(bias)
    exact.load_state_dict(exact.bfloat16().double().state_dict())  # weights that bf16 holds exactly
    inputs = [torch.randn(3, n, 32).bfloat16() for n in (T, K - T)]
    grad_out = torch.randn(3, T, 32).bfloat16()

    def attend(layer: RelativeAttention, dtype: torch.dtype) -> list[Tensor]:
        encodings = (encode_times(t, num_position_features=6, dtype=dtype) for t in (query_times, times))
        slots = Slots(query_times, times, *encodings, None)
        if visible:
            slots = slots._replace(visible=mask, bias=_bias(mask)["bias"].to(dtype))
        x, past = (value.to(dtype).requires_grad_() for value in inputs)
        out = layer(x, past, slots).mixed
        return [value.double() for value in (out, *torch.autograd.grad(out, (x, past), grad_out.to(dtype)))]

    expected = attend(exact, torch.float64)
    fused = _attention(32, num_position_features=6).to(dtype)
    fused.load_state_dict(exact.state_dict())
    allowed = 1e-12 if dtype == torch.float64 else 2**-8 * 3  # bf16 has eight bits of mantissa
    for actual, wanted in zip(attend(fused, dtype), expected, strict=True):
        assert (actual - wanted).norm() < allowed * wanted.norm()


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_dropped_weights(implementation: str) -> None:
    """In training some weights are zero and the others larger, so that their sum stays 1 on average; else none is."""
    torch.manual_seed(0)
    layer = _attention(8, num_position_features=4, attention=implementation, attention_dropout=0.25)
    for weight in (layer.output.weight, layer.value.weight):
        torch.nn.init.eye_(weight)  # each output is a sum of weights, of values of 1
    T = 300
    times = torch.arange(float(T))[None]
    encoding = encode_times(times, num_position_features=4, dtype=torch.float32)
    slots = Slots(times, times, encoding, encoding, None)
    ones = torch.ones(20, T, 8)
    sums = layer(ones, None, slots).mixed
    only = sums[:, 0, ::4]  # the first query's only weight, of both heads
    assert 0.05 < (only == 0).float().mean() < 0.5
    torch.testing.assert_close(only[only > 0], torch.full_like(only[only > 0], 1 / 0.75))
    assert abs(sums.mean() - 1) < 0.02 and not torch.allclose(sums, ones)
    torch.testing.assert_close(layer.eval()(ones, None, slots).mixed, ones)


@pytest.mark.parametrize("num_position_features", [24, 64, 128])
def test_a_local_head_prefers_its_distance_and_falls_off_by_the_fourth_power(num_position_features: int) -> None:
    torch.manual_seed(0)
    layer = _attention(32, num_heads=4, num_position_features=num_position_features).double()
    layer.look_back()
    encoding = encode_times(torch.arange(1300.0), num_position_features=num_position_features, dtype=torch.float64)
    # By position alone, of a query of zeros
    queries = layer.position_queries(torch.zeros(1, 4, 1, 8, dtype=torch.float64))[0]
    logits = queries[0, :, 0] @ encoding.t() / 8**0.5
    preferred = logits.argmax(dim=1).tolist()
    assert preferred == [0, 1, 2, 4]
    for head, at in zip(logits, preferred, strict=True):
        # Means over neighbours, because a sum of a few sinusoids is uneven.
        near, far = (head[at + away : at + away + away // 2].mean() for away in (8, 800))
        assert (near - far).item() / math.log(100) == pytest.approx(4, abs=0.8)


@pytest.mark.parametrize(
    ("num_layers", "share", "local"), [(4, 0.5, 2), (3, 0.5, 1), (1, 0.5, 0), (4, 1.0, 4), (4, 0.0, 0)]
)
def test_the_lower_layers_start_local(num_layers: int, share: float, local: int) -> None:
    sizes = {"d_model": 16, "num_heads": 2, "d_feedforward": 16}
    config = CompressiveTransformerConfig(vocab_size=8, num_layers=num_layers, **sizes, local_layers=share)
    layers = CompressiveTransformer(config).layers
    assert [bool(layer.attention.position_bias.any()) for layer in layers] == [i < local for i in range(num_layers)]
