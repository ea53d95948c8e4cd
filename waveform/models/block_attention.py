"""Exact softmax attention on a CPU, some queries at a time: scores stay in cache, and none is kept for backward.

Shape letters: B rows, H heads, N = B * H, T queries, K slots, d head width, E width of queries, P = E - d.

The scores of a whole window fill tens of megabytes a layer, and keeping the weights for backward several times that.
Here a block of scores is made, used and overwritten; backward makes it anew (one product more), as FlashAttention does
(Dao et al. 2022), but with the matrix library's own products, which leave little to gain. Blocks end at the last slot
that their queries see, so that a causal window costs half.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_SCORES = 1_500_000  # scores held at a time: 6 MB in fp32, shared with the queries' and slots' own lines in L3
_BLOCK_QUERIES = 128


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    visible: Tensor | None = None,
    encoding: Tensor | None = None,
) -> Tensor:
    """softmax(scale q [k; encoding]^T) v, without the weights ever being whole: -> [B, H, T, d].

    q [B, H, T, E]; k, v [B, H, K, d]; encoding [1 or B, K, P], constant, further columns of every head's keys (None
    where E = d). causal: query i sees slots up to K - T + i, as queries that are the last T slots do; else those where
    visible [1 or B, 1, T, K] is true; else all. fp32, fp64 or bf16 (whose scores and weights are rounded to bf16 too).
    Gradients reach q, k and v.
    """
    out: Tensor = _BlockAttention.apply(q, k, v, _Sight(causal, visible), scale, encoding)
    return out


@torch.no_grad()
def received_weight(
    q: Tensor, k: Tensor, *, scale: float, causal: bool, visible: Tensor | None, encoding: Tensor
) -> Tensor:
    """Attention weight that each slot receives, summed over queries and averaged over heads: [B, K]."""
    scores = _Scores(q, _long_keys(k, encoding), _Sight(causal, visible), scale)
    received = q.new_zeros(scores.k.shape[:2])
    for block in scores.blocks():
        received[block.rows, : block.end] += scores.weights(block).sum(dim=1)
    return received.unflatten(0, q.shape[:2]).mean(dim=1)


class _Sight(NamedTuple):
    """What queries see: see `block_attention`."""

    causal: bool
    visible: Tensor | None


@lru_cache(maxsize=16)
def _future(num_queries: int) -> Tensor:
    """[T, T], true where the slot of the column comes after the query of the row."""
    return torch.ones(num_queries, num_queries, dtype=torch.bool).triu(1)


class _Block(NamedTuple):
    """Queries and rows whose scores are made together."""

    rows: slice  # of N
    queries: slice  # of T
    end: int  # slots from here on are seen by none of the queries


class _Scores:
    """Makes the attention weights of one block after the other in the same memory."""

    def __init__(self, q: Tensor, long_k: Tensor, sight: _Sight, scale: float) -> None:
        self.q, self.k, self.sight, self.scale = q.flatten(0, 1), long_k, sight, scale
        self._num_heads = q.shape[1]
        num_rows, num_queries, num_slots = *self.q.shape[:2], long_k.shape[1]
        self._num_queries = num_queries
        if num_rows * num_queries * num_slots > _BLOCK_SCORES:
            self._num_queries = min(num_queries, _BLOCK_QUERIES)
        self._num_rows = max(1, min(num_rows, _BLOCK_SCORES // (self._num_queries * num_slots)))
        self._memory = self.memory()
        self._future = _future(self._num_queries) if sight.causal else None

    def memory(self) -> Tensor:
        """Room for the scores of any block."""
        return self.q.new_empty(self._num_rows * self._num_queries * self.k.shape[1])

    def blocks(self) -> Iterator[_Block]:
        num_rows, num_queries, num_slots = *self.q.shape[:2], self.k.shape[1]
        for row in range(0, num_rows, self._num_rows):
            for first in range(0, num_queries, self._num_queries):
                last = min(first + self._num_queries, num_queries)
                end = num_slots if self._future is None else num_slots - num_queries + last
                yield _Block(slice(row, min(row + self._num_rows, num_rows)), slice(first, last), end)

    def shaped(self, memory: Tensor, block: _Block) -> Tensor:
        """`memory` as the scores of `block`: [rows, queries, end]."""
        rows, queries = block.rows.stop - block.rows.start, block.queries.stop - block.queries.start
        return memory[: rows * queries * block.end].view(rows, queries, block.end)

    def weights(self, block: _Block) -> Tensor:
        """Attention weights [rows, queries, end]; overwritten by the next call."""
        scores = self.shaped(self._memory, block)
        q, k = self.q[block.rows, block.queries], self.k[block.rows, : block.end]
        torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=scores)
        if self._future is not None:
            last = scores.shape[1]
            scores[..., -last:].masked_fill_(self._future[:last, :last], float("-inf"))
        elif self.sight.visible is not None:
            hidden = ~self.sight.visible[:, 0, block.queries]
            if len(hidden) > 1:
                rows = torch.arange(block.rows.start, block.rows.stop, device=hidden.device) // self._num_heads
                hidden = hidden[rows]
            scores.masked_fill_(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1, out=scores)


def _long_keys(k: Tensor, encoding: Tensor | None) -> Tensor:
    """k [B, H, K, d] and encoding [1 or B, K, P] -> [N, K, E], contiguous."""
    if encoding is not None:
        k = torch.cat([k, encoding.to(k.dtype)[:, None].expand(*k.shape[:3], -1)], dim=-1)
    return k.flatten(0, 1)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: _Sight, scale: float, encoding: Tensor | None
    ) -> Tensor:
        scores = _Scores(q, _long_keys(k, encoding), sight, scale)
        flat_v = v.flatten(0, 1)
        out = q.new_empty(*scores.q.shape[:2], v.shape[-1])
        for block in scores.blocks():
            out[block.rows, block.queries] = torch.bmm(scores.weights(block), flat_v[block.rows, : block.end])
        ctx.save_for_backward(q, k, v, sight.visible, encoding)
        ctx.causal, ctx.scale = sight.causal, scale
        return out.unflatten(0, q.shape[:2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, visible, encoding = ctx.saved_tensors
        scores = _Scores(q, _long_keys(k, encoding), _Sight(ctx.causal, visible), ctx.scale)
        flat_v, grad_out = v.flatten(0, 1), grad_out.flatten(0, 1)
        d = v.shape[-1]
        grad_q = torch.empty_like(scores.q) if ctx.needs_input_grad[0] else None
        grad_k, grad_v = scores.q.new_zeros(flat_v.shape), torch.zeros_like(flat_v)
        memory = scores.memory()
        for block in scores.blocks():
            rows, queries, end = block
            weights, grad_block = scores.weights(block), grad_out[rows, queries]
            grad_v[rows, :end].baddbmm_(weights.transpose(1, 2), grad_block)
            grad_scores = scores.shaped(memory, block)
            torch.bmm(grad_block, flat_v[rows, :end].transpose(1, 2), out=grad_scores)
            torch.ops.aten._softmax_backward_data.out(grad_scores, weights, -1, weights.dtype, grad_input=grad_scores)
            if grad_q is not None:
                grad_q[rows, queries] = torch.baddbmm(
                    grad_q[rows, queries], grad_scores, scores.k[rows, :end], beta=0, alpha=ctx.scale
                )
            grad_k[rows, :end].baddbmm_(grad_scores.transpose(1, 2), scores.q[rows, queries, :d], alpha=ctx.scale)
        shape = k.shape[:2]
        return (
            None if grad_q is None else grad_q.unflatten(0, shape),
            grad_k.unflatten(0, shape),
            grad_v.unflatten(0, shape),
            None,
            None,
            None,
        )
