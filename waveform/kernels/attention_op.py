"""Attention on a CPU as one operation of autograd: the kernels of waveform/kernels/attention.py.

Shape letters: B rows, H heads, N = B H, T queries, K slots, d head width, P position features, E = d + P.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from waveform.kernels.attention import run, scratch_size
from waveform.kernels.record import make_record
from waveform.system.threads import kernel_threads, run_parts


def attention_in_kernels(
    q_BHTE: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, *, scale: float, causal: bool, encoding: Tensor | None
) -> Tensor:
    """What `softmax_attention` computes, [B, H, T, d]: if `_takes_kernels` of attention.py says so, in fp32."""
    out: Tensor = _Attention.apply(q_BHTE, k_BHKd, v_BHKd, scale, causal, encoding)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTE: Tensor,
        k_BHKd: Tensor,
        v_BHKd: Tensor,
        scale: float,
        causal: bool,
        encoding: Tensor | None,
    ) -> Tensor:
        q_BHTE, k_BHKd, v_BHKd = q_BHTE.contiguous(), _with_whole_rows(k_BHKd), _with_whole_rows(v_BHKd)
        out = q_BHTE.new_empty(*q_BHTE.shape[:3], v_BHKd.shape[-1])
        _call(q_BHTE, k_BHKd, v_BHKd, encoding, scale=scale, causal=causal, backward=False, out=out)
        ctx.save_for_backward(q_BHTE, k_BHKd, v_BHKd, encoding)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, encoding = ctx.saved_tensors
        grads = {"grad_q": torch.empty_like(q), "grad_k": q.new_empty(k.shape), "grad_v": q.new_empty(v.shape)}
        options = {"scale": ctx.scale, "causal": ctx.causal, "backward": True}
        _call(q, k, v, encoding, **options, grad_out=grad_out.contiguous(), **grads)
        return (*grads.values(), None, None, None)


def _with_whole_rows(x_BHKd: Tensor) -> Tensor:
    return x_BHKd if x_BHKd.stride(-1) == 1 else x_BHKd.contiguous()


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Tensor | None,
    *,
    scale: float,
    causal: bool,
    backward: bool,
    **others: Tensor,
) -> None:
    """others: `out` of a forward pass; of a backward pass `grad_out` and what becomes of it."""
    (num_rows, num_heads, num_queries, _), (num_slots, d_head) = q.shape, k.shape[2:]
    num_threads = min(kernel_threads(), num_rows * num_heads)
    scratch = q.new_empty(num_threads, scratch_size(num_slots, d_head))
    encoding = q.new_empty(1, num_slots, 0) if encoding is None else encoding.contiguous()
    encoding_t = encoding.transpose(1, 2).contiguous()
    names = ("out", "grad_out", "grad_q", "grad_k", "grad_v")
    plan = make_record({
        "num_rows": num_rows,
        "num_heads": num_heads,
        "num_queries": num_queries,
        "num_slots": num_slots,
        "d_head": d_head,
        "num_features": encoding.shape[2],
        "num_threads": num_threads,
        "causal": int(causal),
        "scale": scale,
        "q": q,
        **{f"k_{axis}": k.stride(i) for i, axis in enumerate(("row", "head", "slot"))},
        **{f"v_{axis}": v.stride(i) for i, axis in enumerate(("row", "head", "slot"))},
        "k": k,
        "v": v,
        "encoding": encoding,
        "encoding_t": encoding_t,
        "scratch": scratch,
        "scratch_size": scratch.shape[1],
        **{name: others.get(name, 0) for name in names},
    })  # fmt: skip
    with record_function("waveform::attention"):
        run_parts(run, num_threads, backward, plan)
