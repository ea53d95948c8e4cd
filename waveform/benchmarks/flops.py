"""Counts the FLOPs of a model's matrix products, convolutions and attention (2 FLOPs per multiply-add).

Model FLOPs are 3 x those of one forward with full memories, the usual convention: backward costs twice forward, and
what a backward pass recomputes is not useful work. Forwards of auxiliary losses count once, a lower bound: they stop
most gradients, and counting them 3 x would give 8% more than the Compressive Transformer computes in all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from waveform.engine.interface import SequenceModel, State

BACKWARD_FACTOR = 3  # forward and backward together, in forwards
_aten = torch.ops.aten


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _addmm_flops(out: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    batch = a[0] if len(a) == 3 else 1
    return 2 * batch * a[-2] * a[-1] * b[-1]


# Products that torch's counter does not know; it counts all others, also inside custom autograd functions.
_MORE_PRODUCTS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten.addmm_: _addmm_flops,
    _aten.baddbmm_: _addmm_flops,
}


def counted_flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of the matrix products, convolutions and attention in a call."""
    with FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) as counter:
        function()
    return int(counter.get_total_flops())


def forward_flops(model: SequenceModel, tokens: Tensor, state: State) -> int:
    """Return the FLOPs of one forward pass: tokens [B, T] through trunk, head and, with gradients, auxiliary losses."""

    def forward() -> None:
        step = model.forward(tokens, state)
        model.head.nll(step.hidden, tokens)

    return counted_flops(forward)


def model_flops(model: SequenceModel, tokens: Tensor, state: State) -> int:
    """Return the model FLOPs, defined above, of training on tokens [B, T]: forward and backward."""
    with torch.no_grad():
        without_aux = forward_flops(model, tokens, state)
    return BACKWARD_FACTOR * without_aux + max(0, forward_flops(model, tokens, state) - without_aux)
