"""Exact attention on a CPU as an operation of autograd, by blocks of a head's queries, so that scores stay in cache.

p: a record of addresses and sizes (`_call`). Threads work on heads of their own.

Shape letters: B rows, H heads, N = B H, T queries, K slots, d head width, P position features, E = d + P.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from waveform.kernels.compiling import kernel
from waveform.kernels.product import ROWS, product
from waveform.kernels.record import make_record
from waveform.kernels.rows import softmax_rows, softmax_rows_gradient, transpose, zero
from waveform.kernels.threads import share
from waveform.kernels.vectors import at, padded
from waveform.system.threads import kernel_threads, run_parts

_QUERIES = 8 * ROWS  # queries of a block; their scores of 2,304 slots are at most 590 kB, which an L2 cache holds


@kernel
def _seen(p, query):
    """How many slots a query sees."""
    return p.num_slots - p.num_queries + query + 1 if p.causal else p.num_slots


@kernel
def _weights(p, q, keys_t, first, num_queries, scores):
    """Attention weights [num_queries, K] of the queries from `first` on; returns how many slots the last one sees."""
    K, d, P = p.num_slots, p.d_head, p.num_features
    end = _seen(p, first + num_queries - 1)
    product(at(q, first * (d + P)), d + P, 1, keys_t, K, scores, K, num_queries, padded(end), d, False)
    if P:
        product(at(q, first * (d + P) + d), d + P, 1, p.encoding_t, K, scores, K, num_queries, padded(end), P, True)
    softmax_rows(scores, K, num_queries, _seen(p, first), p.causal, padded(end), p.scale)
    return end


@kernel
def _forward(p, n, scratch):
    T, K, d, P = p.num_queries, p.num_slots, p.d_head, p.num_features
    q, k, v = at(p.q, n * T * (d + P)), at(p.k, n * K * d), at(p.v, n * K * d)
    keys_t, scores = scratch, at(scratch, K * d)
    transpose(k, d, keys_t, K, d)
    for first in range(0, T, _QUERIES):
        m = min(_QUERIES, T - first)
        end = _weights(p, q, keys_t, first, m, scores)
        product(scores, K, 1, v, d, at(p.out, (n * T + first) * d), d, m, d, end, False)


@kernel
def _backward(p, n, scratch):
    T, K, d, P = p.num_queries, p.num_slots, p.d_head, p.num_features
    q, grad_q = at(p.q, n * T * (d + P)), at(p.grad_q, n * T * (d + P))
    k, v = at(p.k, n * K * d), at(p.v, n * K * d)
    grad_k, grad_v = at(p.grad_k, n * K * d), at(p.grad_v, n * K * d)
    keys_t, values_t = scratch, at(scratch, K * d)
    weights, grads = at(scratch, 2 * K * d), at(scratch, 2 * K * d + _QUERIES * K)
    transpose(k, d, keys_t, K, d)
    transpose(v, d, values_t, K, d)
    zero(grad_k, K * d)
    zero(grad_v, K * d)
    for first in range(0, T, _QUERIES):
        m = min(_QUERIES, T - first)
        end = _weights(p, q, keys_t, first, m, weights)
        grad_out = at(p.grad_out, (n * T + first) * d)
        product(weights, 1, K, grad_out, d, grad_v, d, end, d, m, True)
        product(grad_out, d, 1, values_t, K, grads, K, m, padded(end), d, False)
        softmax_rows_gradient(weights, grads, K, m, _seen(p, first), p.causal, padded(end), p.scale)
        product(grads, 1, K, at(q, first * (d + P)), d + P, grad_k, d, end, d, m, True)
        product(grads, K, 1, k, d, at(grad_q, first * (d + P)), d + P, m, d, end, False)
        if P:
            product(grads, K, 1, p.encoding, P, at(grad_q, first * (d + P) + d), d + P, m, P, end, False)


@kernel(entry=True)
def _run(is_backward, part, plan):
    """The heads of `part`; parts may run side by side."""
    p = plan[0]
    first, last = share(p.num_heads, part, p.num_threads)
    scratch = at(p.scratch, part * p.scratch_size)
    for n in range(first, last):
        if is_backward:
            _backward(p, n, scratch)
        else:
            _forward(p, n, scratch)


def attention_in_kernels(
    q_BHTE: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, *, scale: float, causal: bool, encoding: Tensor | None
) -> Tensor:
    """What `softmax_attention` of models/attention.py computes, [B, H, T, d], in fp32; see `_takes_kernels` there."""
    return _Attention.apply(q_BHTE, k_BHKd, v_BHKd, scale, causal, encoding)


def compile_kernels() -> None:
    """Compile the kernels, or load them from disk, before their first use: attends to nothing."""
    nothing = torch.zeros(1, 1, 1, 0)
    attention_in_kernels(nothing, nothing, nothing, scale=1.0, causal=True, encoding=None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTE: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, scale: float, causal: bool, encoding: Tensor | None
    ) -> Tensor:
        q_BHTE, k_BHKd, v_BHKd = (x.contiguous() for x in (q_BHTE, k_BHKd, v_BHKd))
        out = q_BHTE.new_empty(*q_BHTE.shape[:3], v_BHKd.shape[-1])
        ctx.numbers = {"causal": int(causal), "scale": scale}
        _call(q_BHTE, k_BHKd, v_BHKd, encoding, ctx.numbers, out=out)
        ctx.save_for_backward(q_BHTE, k_BHKd, v_BHKd, encoding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, encoding = ctx.saved_tensors
        grads = {"grad_q": torch.empty_like(q), "grad_k": torch.empty_like(k), "grad_v": torch.empty_like(v)}
        _call(q, k, v, encoding, ctx.numbers, grad_out=grad_out.contiguous(), **grads)
        return (*grads.values(), None, None, None)


def _call(
    q: Tensor, k: Tensor, v: Tensor, encoding: Tensor | None, numbers: dict[str, float], **others: Tensor
) -> None:
    """numbers: `causal` and `scale`; others: `out` of a forward pass, or `grad_out` and what a backward pass makes."""
    (num_queries, _), (num_slots, d_head) = q.shape[2:], k.shape[2:]
    num_heads = q.shape[:2].numel()  # heads of all rows
    num_threads = min(kernel_threads(), num_heads)
    # For each thread: transposed keys and values, and two blocks of scores.
    scratch = q.new_empty(num_threads, 2 * num_slots * (d_head + _QUERIES))
    encoding = q.new_empty(1, num_slots, 0) if encoding is None else encoding.contiguous()
    encoding_t = encoding.transpose(1, 2).contiguous()
    plan = make_record({
        "num_heads": num_heads, "num_queries": num_queries, "num_slots": num_slots,
        "d_head": d_head, "num_features": encoding.shape[2], "num_threads": num_threads, **numbers,
        "q": q, "k": k, "v": v, "encoding": encoding, "encoding_t": encoding_t,
        "scratch": scratch, "scratch_size": scratch.shape[1],
        **dict.fromkeys(("out", "grad_out", "grad_q", "grad_k", "grad_v"), 0), **others,
    })  # fmt: skip
    with record_function("waveform::attention"):
        run_parts(_run, num_threads, "grad_out" in others, plan)
