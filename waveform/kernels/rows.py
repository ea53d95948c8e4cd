"""Kernels on rows: copies, sums, norms, GELU, softmax and their gradients, in the instructions of vectors.py.

Names of memory are addresses. A row [n] is whole vectors, and may as well be all rows of a matrix that lie together; a
matrix [m, n] has rows `stride` floats apart.
"""

import math

import numpy as np

from waveform.kernels.vectors import (
    LANES,
    at,
    exp,
    fill,
    fma,
    gelu,
    gelu_slope,
    get,
    kernel,
    largest,
    load,
    maximum,
    padded,
    put,
    store,
    total,
    transpose16,
)


@kernel
def copy(source, target, n):
    for j in range(0, n, LANES):
        store(target, j, load(source, j))


@kernel
def zero(target, n):
    for j in range(0, n, LANES):
        store(target, j, fill(np.float32(0)))


@kernel
def repeat_row(row, target, stride, m, n):
    """Every row of `target` = `row` [n]."""
    for i in range(m):
        copy(row, at(target, i * stride), n)


@kernel
def add_rows(a, a_stride, b, b_stride, target, stride, m, n):
    """target = a + b; of a stride of 0, one row is added to all."""
    for i in range(m):
        for j in range(0, n, LANES):
            store(target, i * stride + j, load(a, i * a_stride + j) + load(b, i * b_stride + j))


@kernel
def add_column_sums(source, stride, sums, m, n):
    """sums [n] += the sums of each column."""
    for j in range(0, n, LANES):
        s = load(sums, j)
        for i in range(m):
            s = s + load(source, i * stride + j)
        store(sums, j, s)


@kernel
def _moments(x, width, n, epsilon):
    """The mean of the first `n` of x [width], after which there are zeros, and 1 / their standard deviation."""
    sums = fill(np.float32(0))
    for j in range(0, width, LANES):
        sums = sums + load(x, j)
    mean = total(sums) / np.float32(n)
    squares = fill(np.float32(0))
    for j in range(0, width, LANES):
        centred = load(x, j) - fill(mean)
        squares = fma(centred, centred, squares)
    padding = np.float32(width - n) * mean * mean  # what the zeros added
    variance = (total(squares) - padding) / np.float32(n)
    return mean, np.float32(1) / np.float32(math.sqrt(variance + epsilon))


@kernel
def layer_norm(x, out, gain, bias, width, n, epsilon):
    """out = the layer norm of x, both [width] with zeros after `n` features; out may be x."""
    mean, factor = _moments(x, width, n, epsilon)
    for j in range(0, width, LANES):
        standardised = (load(x, j) - fill(mean)) * fill(factor)
        store(out, j, standardised * load(gain, j) + load(bias, j))


@kernel
def standardise(x, out, factors, m, n, epsilon):
    """out [m, n] = each row of x less its mean, times `factors` [m] = 1 / its standard deviation."""
    for i in range(m):
        row = at(x, i * n)
        mean, factor = _moments(row, n, n, epsilon)
        put(factors, i, factor)
        for j in range(0, n, LANES):
            store(out, i * n + j, (load(row, j) - fill(mean)) * fill(factor))


@kernel
def add_standardise_gradient(grad, standardised, factors, out, m, n):
    """out [m, n] += the gradient of what `standardise` was given, from that of what it made."""
    for i in range(m):
        first = i * n
        sums, products = fill(np.float32(0)), fill(np.float32(0))
        for j in range(first, first + n, LANES):
            g = load(grad, j)
            sums, products = sums + g, fma(g, load(standardised, j), products)
        away, along = fill(-total(sums) / np.float32(n)), fill(-total(products) / np.float32(n))
        factor = fill(get(factors, i))
        for j in range(first, first + n, LANES):
            g = fma(along, load(standardised, j), load(grad, j) + away)
            store(out, j, fma(factor, g, load(out, j)))


@kernel
def gelu_rows(x, out, size):
    for j in range(0, size, LANES):
        store(out, j, gelu(load(x, j)))


@kernel
def multiply_by_gelu_slope(x, grad, size):
    for j in range(0, size, LANES):
        store(grad, j, load(grad, j) * gelu_slope(load(x, j)))


@kernel
def multiply(a, b, out, n):
    for j in range(0, n, LANES):
        store(out, j, load(a, j) * load(b, j))


@kernel
def scale_by(factor, x, n):
    for j in range(0, n, LANES):
        store(x, j, load(x, j) * fill(factor))


@kernel
def largest_of(x, n):
    """The largest element of x [n]."""
    peaks = load(x, 0)
    for j in range(LANES, n, LANES):
        peaks = maximum(peaks, load(x, j))
    return largest(peaks)


@kernel
def softmax_rows(scores, stride, m, num_seen, causal, width, scale):
    """In place: softmax of scale * scores [m, width] over the `num_seen` first of a row, then zeros.

    causal: each row sees one more than the row before.
    """
    for i in range(m):
        row, seen = at(scores, i * stride), num_seen + i if causal else num_seen
        end = padded(seen)
        for j in range(seen, end):
            put(row, j, np.float32(-3e38))
        away, sums = fill(-scale * largest_of(row, end)), fill(np.float32(0))
        for j in range(0, end, LANES):
            share = exp(fma(load(row, j), fill(scale), away))
            sums = sums + share
            store(row, j, share)
        factor = fill(np.float32(1) / total(sums))
        for j in range(0, end, LANES):
            store(row, j, load(row, j) * factor)
        zero(at(row, end), width - end)


@kernel
def softmax_rows_gradient(weights, grads, stride, m, num_seen, causal, width, scale):
    """In place: from the gradient of what `softmax_rows` made, `weights`, to that of the scores."""
    for i in range(m):
        row, grad, end = at(weights, i * stride), at(grads, i * stride), padded(num_seen + i if causal else num_seen)
        products = fill(np.float32(0))
        for j in range(0, end, LANES):
            products = fma(load(row, j), load(grad, j), products)
        away, factor = fill(-total(products)), fill(scale)
        for j in range(0, end, LANES):
            store(grad, j, load(row, j) * factor * (load(grad, j) + away))
        zero(at(grad, end), width - end)


@kernel
def transpose(source, source_stride, target, target_stride, m, n):
    """target [n, m] = source [m, n] transposed; both whole vectors."""
    for i in range(0, m, LANES):
        for j in range(0, n, LANES):
            block = at(source, i * source_stride + j)
            transpose16(block, source_stride, at(target, j * target_stride + i), target_stride)


@kernel
def rotate_rows(source, sin_cos, target, m, half):
    """target [m, 2 half]: position queries rotated to the queries' times (`rotate_to_time` in attention.py)."""
    for i in range(m):
        for j in range(0, half, LANES):
            s_at = i * 2 * half + j
            c_at = s_at + half
            sin, cos = load(sin_cos, s_at), load(sin_cos, c_at)
            a_s, a_c = load(source, s_at), load(source, c_at)
            store(target, s_at, fma(a_c, sin, fill(np.float32(-1)) * a_s * cos))
            store(target, c_at, fma(a_s, sin, a_c * cos))


@kernel
def sum_of_squares(x, size):
    sums = fill(np.float32(0))
    for j in range(0, size, LANES):
        value = load(x, j)
        sums = fma(value, value, sums)
    return total(sums)


@kernel
def fold(weight, bias, gain, shift, out, out_bias, m, n):
    """Fold a norm's gain and shift [n] into a linear layer [m, n] after it; bias: its address, 0 for none."""
    for i in range(m):
        sums = fill(np.float32(0))
        for j in range(0, n, LANES):
            w = load(weight, i * n + j)
            store(out, i * n + j, w * load(gain, j))
            sums = fma(w, load(shift, j), sums)
        value = total(sums)
        put(out_bias, i, value + get(bias, i) if bias else value)


@kernel
def unfold(grad, grad_bias, weight, gain, shift, grad_gain, grad_shift, m, n):
    """In place: from the gradients of what `fold` made to that of the weight; those of gain and shift are added."""
    for i in range(m):
        of_bias = fill(get(grad_bias, i))
        for j in range(0, n, LANES):
            g, w = load(grad, i * n + j), load(weight, i * n + j)
            store(grad, i * n + j, fma(g, load(gain, j), of_bias * load(shift, j)))
            store(grad_gain, j, fma(g, w, load(grad_gain, j)))
            store(grad_shift, j, fma(of_bias, w, load(grad_shift, j)))


@kernel
def copy_halves(source, half, target, target_half, m):
    """Rows [m, 2 half] -> [m, 2 target_half]: each half with zeros after it."""
    for i in range(2 * m):
        for j in range(target_half):
            put(target, i * target_half + j, get(source, i * half + j) if j < half else np.float32(0))
