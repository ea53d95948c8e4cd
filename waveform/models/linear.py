"""Linear layers, by the library whose matrix products are faster on this processor.

On a CPU torch multiplies fp32 matrices with MKL, which on a Zen 5 reaches less than half of what oneDNN does, which
torch brings too; on an Intel Xeon MKL is the faster one (results/notes.md).

Shape letters: M rows, K features in, N features out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.system.fastest_way import Question, fastest_way

_MIN_MULTIPLICATIONS = 1 << 22  # of a product; below, oneDNN takes longer to begin than it saves


class Linear(nn.Linear):
    """torch's, with the faster product."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x [..., K] -> x @ weight^T + bias, [..., N]."""
    if _takes_onednn(x, num_multiplications=x.numel() * len(weight_NK)):
        return _OneDnnLinear.apply(x, weight_NK, bias_N)
    return F.linear(x, weight_NK, bias_N)


def _takes_onednn(x: Tensor, *, num_multiplications: int) -> bool:
    return (
        num_multiplications >= _MIN_MULTIPLICATIONS
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()  # it would not know the operation
        and fastest_way(LIBRARY) == "onednn"
    )


def _onednn(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    # What torch's compiler makes of a linear layer.
    return torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight_NK), bias_N, "none", [], "")


def _dense(x: Tensor) -> Tensor:
    """`x`, or a copy if its rows have gaps between them, for which oneDNN only has a reference 1,000 times as slow."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _onednn(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_MN = grad.flatten(0, -2)
        return (
            _onednn(grad, weight_NK.t()) if needs_x else None,
            _onednn(grad_MN.t(), x.flatten(0, -2).t()) if needs_weight else None,
            grad_MN.sum(dim=0) if needs_bias else None,
        )


def _calls() -> dict[str, Callable[[], object]]:
    """A layer of a 40M model and its gradient, by each library."""
    x, weight = torch.ones(768, 384, requires_grad=True), torch.ones(1536, 384, requires_grad=True)

    def by(layer: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x, weight, None).sum(), (x, weight))

    calls = {"torch": by(F.linear)}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        calls["onednn"] = by(_OneDnnLinear.apply)
    return calls


LIBRARY = Question("products", ("torch", "onednn"), calls=_calls)
