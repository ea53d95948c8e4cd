"""Counts the FLOPs of a model's matrix products, convolutions and attention (2 FLOPs per multiply-add).

Model FLOPs are 3 x those of one forward pass with full memories, the usual convention: backward costs twice as much as
forward, and what a backward pass recomputes is not useful work. For attention, only the visible pairs of a query and a
slot count, and not what its kernel computes besides: hidden pairs, or columns of zeros. The forward pass of auxiliary
losses counts once, which is a lower bound: they stop most gradients, and counting it 3 x would give 8% more than the
Compressive Transformer computes in all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from waveform.engine.interface import SequenceModel, State
from waveform.models.attention import softmax_attention

BACKWARD_FACTOR = 3  # FLOPs of forward and backward together, as a multiple of forward


def _of_lstm(factor: int, x: Tensor, *weights: Any, **_: Any) -> int:
    """FLOPs of a layer in oneDNN, whose weights are arguments, or of all layers in cuDNN, whose weights are a list."""
    matrices = weights[0] if isinstance(weights[0], list) else weights[:2]
    return 2 * factor * x.shape[:2].numel() * sum(each.numel() for each in matrices if each.dim() == 2)


# Products that torch's counter does not know by these names; it knows all others, also in custom autograd functions.
for _suffix, _factor in (("", 1), ("_backward", 2)):
    _name = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{_suffix}")
    _known = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{_suffix}")
    flop_registry.setdefault(_name, flop_registry[_known])
    for _lstm in ("mkldnn_rnn_layer", "_cudnn_rnn"):
        flop_registry.setdefault(getattr(torch.ops.aten, f"{_lstm}{_suffix}"), partial(_of_lstm, _factor))


def counted_flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of the matrix products, convolutions and attention in a call, as they are carried out."""
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def useful_flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of a forward pass, of whose attention only the visible pairs count."""
    with FlopCounterMode(display=False) as counter, _Excess(counter) as excess:
        function()
    return int(counter.get_total_flops()) - excess.flops


class _Excess(TorchFunctionMode):
    """Sums what the kernels of attention compute beyond what was asked of them."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counter, self.flops = counter, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if func is softmax_attention:
            self.flops += int(self._counter.get_total_flops()) - before - _visible_flops(*args, **kwargs)
        return result


def _visible_flops(
    q_BHTE: Tensor,
    k_BHKd: Tensor,
    v_BHKd: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    first_used: tuple[int, ...] | None = None,
    **_: Any,
) -> int:
    """FLOPs of the scores and of the mixing of values, of the pairs that `softmax_attention` is asked for."""
    (num_rows, num_heads, num_queries, width), num_slots = q_BHTE.shape, k_BHKd.shape[2]
    num_pairs = num_queries * (num_rows * num_slots - sum(first_used or ()))
    if causal or first_used is not None:
        num_pairs -= num_rows * num_queries * (num_queries - 1) // 2
    elif bias is not None:
        num_pairs = int((bias == 0).expand(num_rows, -1, -1, -1).sum())
    return 2 * num_heads * num_pairs * (width + v_BHKd.shape[-1])


def forward_flops(model: SequenceModel, tokens: Tensor, state: State) -> int:
    """Return the FLOPs of one forward pass: tokens [B, T] through trunk, head and, with gradients, auxiliary losses."""
    return useful_flops(lambda: model.head.nll(model.forward(tokens, state).hidden, tokens))


def model_flops(model: SequenceModel, tokens: Tensor, state: State) -> int:
    """Return the model FLOPs, defined above, of training on tokens [B, T]: forward and backward."""
    with torch.no_grad():
        without_aux = forward_flops(model, tokens, state)
    return BACKWARD_FACTOR * without_aux + max(0, forward_flops(model, tokens, state) - without_aux)
