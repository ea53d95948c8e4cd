"""Exact attention, forward and backward, compiled: a block of one head's queries at a time, whose scores stay in cache.

p: a record of addresses and sizes (kernels/attention_op.py). Threads work on heads of their own.

Shape letters: N heads of all rows, T queries, K slots, d head width, P position features, E = d + P.
"""

from waveform.kernels.product import ROWS, product
from waveform.kernels.rows import softmax_rows, softmax_rows_gradient, transpose, zero
from waveform.kernels.threads import share
from waveform.kernels.vectors import at, kernel, padded

_QUERIES = 8 * ROWS  # of a block; its scores of 2,304 slots are at most 590 kB, which an L2 cache holds


def scratch_size(num_slots: int, d_head: int) -> int:
    """Floats that a thread needs: transposed keys and values, and two blocks of scores."""
    return 2 * num_slots * (d_head + _QUERIES)


@kernel
def _row_of(p, base, of_rows, of_heads, n):
    """Where head `n` of all rows begins in a tensor with these strides."""
    return at(base, n // p.num_heads * of_rows + n % p.num_heads * of_heads)


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
    q = at(p.q, n * T * (d + P))
    k, v = _row_of(p, p.k, p.k_row, p.k_head, n), _row_of(p, p.v, p.v_row, p.v_head, n)
    keys_t, scores = scratch, at(scratch, K * d)
    transpose(k, p.k_slot, keys_t, K, K, d)
    for first in range(0, T, _QUERIES):
        m = min(_QUERIES, T - first)
        end = _weights(p, q, keys_t, first, m, scores)
        product(scores, K, 1, v, p.v_slot, at(p.out, (n * T + first) * d), d, m, d, end, False)


@kernel
def _backward(p, n, scratch):
    T, K, d, P = p.num_queries, p.num_slots, p.d_head, p.num_features
    q, grad_q = at(p.q, n * T * (d + P)), at(p.grad_q, n * T * (d + P))
    k, v = _row_of(p, p.k, p.k_row, p.k_head, n), _row_of(p, p.v, p.v_row, p.v_head, n)
    grad_k, grad_v = at(p.grad_k, n * K * d), at(p.grad_v, n * K * d)
    keys_t, values_t = scratch, at(scratch, K * d)
    weights, grads = at(scratch, 2 * K * d), at(scratch, 2 * K * d + _QUERIES * K)
    transpose(k, p.k_slot, keys_t, K, K, d)
    transpose(v, p.v_slot, values_t, K, K, d)
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
        product(grads, K, 1, k, p.k_slot, at(grad_q, first * (d + P)), d + P, m, d, end, False)
        if P:
            product(grads, K, 1, p.encoding, P, at(grad_q, first * (d + P) + d), d + P, m, P, end, False)


@kernel(entry=True)
def run(is_backward, part, plan):
    """The heads of `part`; parts may run side by side."""
    p = plan[0]
    first, last = share(p.num_rows * p.num_heads, part, p.num_threads)
    scratch = at(p.scratch, part * p.scratch_size)
    for n in range(first, last):
        if is_backward:
            _backward(p, n, scratch)
        else:
            _forward(p, n, scratch)
