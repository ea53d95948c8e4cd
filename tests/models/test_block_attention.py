"""Attention by blocks against softmax written out, at fp64: output and gradients, for every mask and block size."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from waveform.models import attention, block_attention
from waveform.models.attention import RelativeAttention, Slots, encode_times
from waveform.models.block_attention import UNMASKED, Mask

_B, _H, _T, _K, _d, _P = 3, 2, 7, 12, 4, 6
_SCALE = 0.3

MASKS: dict[str, Callable[[], Mask]] = {
    "causal": lambda: Mask(causal=True),
    "everything": lambda: UNMASKED,
    "one for all rows": lambda: Mask(visible=_random_mask(1)),
    "of each row": lambda: Mask(visible=_random_mask(_B)),
}
# queries of a block, scores of a block: whole; one row of B x H at a time; ragged blocks; one query and row at a time.
BLOCKS = {"whole": (128, 10**6), "rows": (128, _T * _K), "ragged": (3, 4 * 3 * _K), "single": (1, 1)}


def _random_mask(num_rows: int) -> Tensor:
    mask = torch.rand(num_rows, 1, _T, _K) < 0.5
    mask[..., 0] = True  # every query sees something
    return mask


def written_out(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, encoding: Tensor | None) -> Tensor:
    if encoding is not None:
        k = torch.cat([k, encoding[:, None].expand(_B, _H, -1, -1)], dim=-1)
    logits = _SCALE * q @ k.transpose(-1, -2)
    visible = torch.ones(_T, _K, dtype=torch.bool) if mask.visible is None else mask.visible
    if mask.causal:
        visible = visible.tril(_K - _T)
    return logits.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ v


def tensors(*, positions: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    width = _d + (_P if positions else 0)
    shapes = [(_B, _H, _T, width), (_B, _H, _K, _d), (_B, _H, _K, _d)]
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("positions", [False, True], ids=["content", "positions"])
@pytest.mark.parametrize("sees", MASKS)
def test_equals_softmax_written_out(sees: str, positions: bool, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, scores = BLOCKS[blocks]
    monkeypatch.setattr(block_attention, "_BLOCK_QUERIES", queries)
    monkeypatch.setattr(block_attention, "_BLOCK_SCORES", scores)
    inputs = tensors(positions=positions)
    mask = MASKS[sees]()
    encoding = torch.randn(1, _K, _P, dtype=torch.float64) if positions else None
    out = block_attention.block_attention(*inputs, scale=_SCALE, mask=mask, encoding=encoding)
    expected = written_out(*inputs, mask=mask, encoding=encoding)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    grad_out = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad(out, inputs, grad_out), torch.autograd.grad(expected, inputs, grad_out), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("sees", ["causal", "of each row"])
def test_received_weight_is_the_sum_over_queries(sees: str, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, scores = BLOCKS[blocks]
    monkeypatch.setattr(block_attention, "_BLOCK_QUERIES", queries)
    monkeypatch.setattr(block_attention, "_BLOCK_SCORES", scores)
    q, k, _ = tensors(positions=True)
    mask = MASKS[sees]()
    encoding = torch.randn(1, _K, _P, dtype=torch.float64)
    received = block_attention.received_weight(q, k, scale=_SCALE, mask=mask, encoding=encoding)
    weights = written_out(q, k, torch.eye(_K, dtype=torch.float64), mask=mask, encoding=encoding)
    torch.testing.assert_close(received, weights.mean(dim=1).sum(dim=1), rtol=0, atol=1e-13)


def test_received_weight_stays_on_the_device_of_the_queries() -> None:
    """`analyse`, and compression by use, look at it on GPUs too, where attention itself takes torch's kernels."""
    block_attention._future.cache_clear()
    with FakeTensorMode():  # refuses operations on tensors of several devices
        q, k, encoding = (torch.ones(shape, device="cuda") for shape in ((2, 2, 5, 12), (2, 2, 9, 8), (1, 9, 4)))
        received = block_attention.received_weight(q, k, scale=1.0, mask=Mask(causal=True), encoding=encoding)
        assert received.is_cuda
    block_attention._future.cache_clear()


def test_keeps_nothing_quadratic_for_backward() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    num_queries, num_slots = 64, 96
    q = torch.randn(1, 1, num_queries, 8, requires_grad=True)
    k, v = (torch.randn(1, 1, num_slots, 8, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block_attention.block_attention(q, k, v, scale=1.0, mask=Mask(causal=True))
    assert kept and max(kept) < num_queries * num_slots / 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("kernel", ["blocks", "torch"])
@pytest.mark.parametrize("visible", [False, True], ids=["causal", "mask"])
def test_equals_the_reference(visible: bool, kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fused` by either kernel: output and gradients as near the fp64 reference as rounded inputs allow."""
    monkeypatch.setattr(attention, "_takes_blocks", lambda q: kernel == "blocks")
    torch.manual_seed(0)
    T, K = 200, 300  # two blocks of queries
    times, query_times = torch.arange(T - K, T).double()[None], torch.arange(T).double()[None]
    mask = (times[:, None] <= query_times[..., None])[:, None] & (torch.arange(K) > 1)
    fields = {"num_heads": 2, "num_position_features": 6}
    exact = RelativeAttention(32, implementation="reference", **fields).double()
    for bias in (exact.content_bias, exact.position_bias):
        torch.nn.init.normal_(bias)
    exact.load_state_dict(exact.bfloat16().double().state_dict())  # weights that bf16 holds exactly
    inputs = [torch.randn(3, n, 32).bfloat16() for n in (T, K - T)]
    grad_out = torch.randn(3, T, 32).bfloat16()

    def attend(layer: RelativeAttention, dtype: torch.dtype) -> list[Tensor]:
        encodings = (encode_times(t, num_position_features=6, dtype=dtype) for t in (query_times, times))
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))  # as on a GPU
        slots = (
            Slots(query_times, times, *encodings, mask, bias)
            if visible
            else Slots(query_times, times, *encodings, None)
        )
        x, past = (value.to(dtype).requires_grad_() for value in inputs)
        out = layer(x, past, slots).mixed
        return [value.double() for value in (out, *torch.autograd.grad(out, (x, past), grad_out.to(dtype)))]

    expected = attend(exact, torch.float64)
    fused = RelativeAttention(32, implementation="fused", **fields).to(dtype)
    fused.load_state_dict(exact.state_dict())
    # bf16 has eight bits of mantissa; in blocks logits near 3 round to 2^-7, elsewhere they do not.
    allowed = 1e-12 if dtype == torch.float64 else 2**-8 * (6 if kernel == "blocks" else 3)
    for actual, wanted in zip(attend(fused, dtype), expected, strict=True):
        assert (actual - wanted).norm() < allowed * wanted.norm()


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_dropped_weights(implementation: str) -> None:
    """In training some weights are zero and the others larger, so that their sum stays 1 on average; else none is."""
    torch.manual_seed(0)
    layer = RelativeAttention(8, num_heads=2, num_position_features=4, implementation=implementation, dropout=0.25)
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


def test_causal_attention_by_torch_may_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own `causal_lower_right` cannot be made while a FLOP counter, or another dispatch mode, is active."""
    monkeypatch.setattr(attention, "_takes_blocks", lambda q: False)
    layer = RelativeAttention(16, num_heads=2, num_position_features=4, implementation="fused")
    x, past, times = torch.randn(2, 3, 16), torch.randn(2, 4, 16), torch.arange(-4.0, 3)[None]
    encoding = encode_times(times, num_position_features=4, dtype=torch.float32)
    slots = Slots(times[:, 4:], times, encoding[:, 4:], encoding, None)
    expected = layer(x, past, slots).mixed
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(layer(x, past, slots).mixed, expected)
    assert counter.get_total_flops() > 0
