"""Exact softmax attention on a CPU, a block of queries at a time: scores stay in cache, none is kept for backward.

Shape letters: B rows, H heads, N = B H, T queries, K slots, d head width, E width of queries, P = E - d.

The scores of a window fill tens of megabytes a layer, and weights kept for backward would fill several times that.
Here a block of scores is made, used and overwritten; backward makes it again (one more product), as FlashAttention does
(Dao et al. 2022), but with the matrix library's own products. Blocks end at the last slot that their queries see, so
that a causal window costs half. waveform/kernels/attention.py is faster for what it can do.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_SCORES = 1_500_000  # scores held at a time: 6 MB in fp32, which share L3 with the queries and slots
_BLOCK_QUERIES = 128


class Mask(NamedTuple):
    """Which slots queries see: up to their own if `causal`, else those of `visible`, else all."""

    causal: bool = False  # query i sees slots up to K - T + i, as queries that are the last T slots do
    visible: Tensor | None = None  # [1 or B, 1, T, K] bool
    bias: Tensor | None = None  # `visible` as 0 and -inf, for `softmax_attention` of attention.py


UNMASKED = Mask()


def block_attention(
    q_BHTE: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, *, scale: float, mask: Mask, encoding: Tensor | None = None
) -> Tensor:
    """softmax(scale q [k; encoding]^T) v, of which the weights never exist all at once: -> [B, H, T, d].

    encoding [1, K, P]: constant, further columns of every head's keys (None if E = d). fp32, fp64 or bf16 (then
    scores and weights are rounded to bf16 too). Gradients reach q, k and v.
    """
    out: Tensor = _BlockAttention.apply(q_BHTE, k_BHKd, v_BHKd, mask, scale, encoding)
    return out


@torch.no_grad()
def received_weight(q_BHTE: Tensor, k_BHKd: Tensor, *, scale: float, mask: Mask, encoding: Tensor) -> Tensor:
    """Attention weight that each slot receives, summed over queries and averaged over heads: [B, K]."""
    blocks = _Blocks(q_BHTE, k_BHKd, encoding, mask, scale)
    received_NK = q_BHTE.new_zeros(blocks.k_NKE.shape[:2])
    for (rows, _, end), weights in blocks:
        received_NK[rows, :end] += weights.sum(dim=1)
    return received_NK.unflatten(0, q_BHTE.shape[:2]).mean(dim=1)


@lru_cache(maxsize=16)
def _future(num_queries: int, device: torch.device) -> Tensor:
    """[T, T]: whether the slot of the column comes after the query of the row."""
    return torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).triu(1)


class _Block(NamedTuple):
    """Queries and heads of rows whose scores are made together."""

    rows: slice  # of N
    queries: slice  # of T
    end: int  # slots from here on are seen by none of the queries


class _Blocks:
    """Makes the attention weights of one block after another, in the same buffer."""

    def __init__(self, q_BHTE: Tensor, k_BHKd: Tensor, encoding: Tensor | None, mask: Mask, scale: float) -> None:
        self.q_NTE, self.k_NKE = q_BHTE.flatten(0, 1), long_keys(k_BHKd, encoding).flatten(0, 1)
        self._mask, self._scale, self._num_heads = mask, scale, q_BHTE.shape[1]
        num_rows, num_queries, num_slots = *self.q_NTE.shape[:2], self.k_NKE.shape[1]
        self._num_queries = num_queries
        if num_rows * num_queries * num_slots > _BLOCK_SCORES:
            self._num_queries = min(num_queries, _BLOCK_QUERIES)
        self._num_rows = max(1, min(num_rows, _BLOCK_SCORES // (self._num_queries * num_slots)))
        self._buffer = self.new_buffer()
        self._future = _future(self._num_queries, q_BHTE.device) if mask.causal else None

    def new_buffer(self) -> Tensor:
        """Room for the scores of any block."""
        return self.q_NTE.new_empty(self._num_rows * self._num_queries * self.k_NKE.shape[1])

    def __iter__(self) -> Iterator[tuple[_Block, Tensor]]:
        """Blocks and their weights [rows, queries, end], which the next block overwrites."""
        num_rows, num_queries, num_slots = *self.q_NTE.shape[:2], self.k_NKE.shape[1]
        for row in range(0, num_rows, self._num_rows):
            for first in range(0, num_queries, self._num_queries):
                last = min(first + self._num_queries, num_queries)
                end = num_slots if self._future is None else num_slots - num_queries + last
                block = _Block(slice(row, min(row + self._num_rows, num_rows)), slice(first, last), end)
                yield block, self._weights(block)

    def shaped(self, buffer: Tensor, block: _Block) -> Tensor:
        """`buffer` as the scores of `block`: [rows, queries, end]."""
        rows, queries = block.rows.stop - block.rows.start, block.queries.stop - block.queries.start
        return buffer[: rows * queries * block.end].view(rows, queries, block.end)

    def _weights(self, block: _Block) -> Tensor:
        scores = self.shaped(self._buffer, block)
        q, k = self.q_NTE[block.rows, block.queries], self.k_NKE[block.rows, : block.end]
        torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=self._scale, out=scores)
        if self._future is not None:
            last = scores.shape[1]
            scores[..., -last:].masked_fill_(self._future[:last, :last], float("-inf"))
        elif self._mask.visible is not None:
            hidden = ~self._mask.visible[:, 0, block.queries]
            if len(hidden) > 1:
                rows = torch.arange(block.rows.start, block.rows.stop, device=hidden.device) // self._num_heads
                hidden = hidden[rows]
            scores.masked_fill_(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1, out=scores)


def long_keys(k_BHKd: Tensor, encoding: Tensor | None) -> Tensor:
    """Keys and encoding [1, K, P] side by side: [B, H, K, E]."""
    if encoding is None:
        return k_BHKd
    encoding_BHKP = encoding.to(k_BHKd.dtype)[:, None].expand(*k_BHKd.shape[:3], -1)
    return torch.cat([k_BHKd, encoding_BHKP], dim=-1)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTE: Tensor,
        k_BHKd: Tensor,
        v_BHKd: Tensor,
        mask: Mask,
        scale: float,
        encoding: Tensor | None,
    ) -> Tensor:
        blocks, v_NKd = _Blocks(q_BHTE, k_BHKd, encoding, mask, scale), v_BHKd.flatten(0, 1)
        out_NTd = q_BHTE.new_empty(*blocks.q_NTE.shape[:2], v_BHKd.shape[-1])
        for (rows, queries, end), weights in blocks:
            out_NTd[rows, queries] = torch.bmm(weights, v_NKd[rows, :end])
        ctx.save_for_backward(q_BHTE, k_BHKd, v_BHKd, mask.visible, encoding)
        ctx.causal, ctx.scale = mask.causal, scale
        return out_NTd.unflatten(0, q_BHTE.shape[:2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTE, k_BHKd, v_BHKd, visible, encoding = ctx.saved_tensors
        blocks = _Blocks(q_BHTE, k_BHKd, encoding, Mask(ctx.causal, visible), ctx.scale)
        q_NTE, v_NKd, grad_NTd = blocks.q_NTE, v_BHKd.flatten(0, 1), grad_out.flatten(0, 1)
        d_head = v_BHKd.shape[-1]
        grad_q = torch.empty_like(q_NTE) if ctx.needs_input_grad[0] else None
        grad_k, grad_v = q_NTE.new_zeros(v_NKd.shape), torch.zeros_like(v_NKd)
        buffer = blocks.new_buffer()
        for block, weights in blocks:
            rows, queries, end = block
            grad_block = grad_NTd[rows, queries]
            grad_v[rows, :end].baddbmm_(weights.transpose(1, 2), grad_block)
            grad_scores = blocks.shaped(buffer, block)
            torch.bmm(grad_block, v_NKd[rows, :end].transpose(1, 2), out=grad_scores)
            torch.ops.aten._softmax_backward_data.out(grad_scores, weights, -1, weights.dtype, grad_input=grad_scores)
            if grad_q is not None:
                grad_q[rows, queries] = torch.baddbmm(
                    grad_q[rows, queries], grad_scores, blocks.k_NKE[rows, :end], beta=0, alpha=ctx.scale
                )
            grad_k[rows, :end].baddbmm_(grad_scores.transpose(1, 2), q_NTE[rows, queries, :d_head], alpha=ctx.scale)
        grads = (None if grad is None else grad.unflatten(0, k_BHKd.shape[:2]) for grad in (grad_q, grad_k, grad_v))
        return *grads, None, None, None
