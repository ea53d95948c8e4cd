"""Kernels on rows: copies, sums, norms, GELU, softmax and their gradients, in the instructions of vectors.py.

Arguments that name memory are addresses. A row [n] is a whole number of vectors, and may also be a whole matrix without
gaps; the rows of a matrix [m, n] are `stride` floats apart.
"""

import math

import numpy as np

from waveform.kernels import vectors as v
from waveform.kernels.compiling import kernel


@kernel
def copy(source, target, n):
    for j in range(0, n, v.LANES):
        v.store(target, j, v.load(source, j))


@kernel
def zero(target, n):
    for j in range(0, n, v.LANES):
        v.store(target, j, v.fill(np.float32(0)))


@kernel
def repeat_row(row, target, m, n):
    """Every row of `target` [m, n] = `row` [n]."""
    for i in range(m):
        copy(row, v.at(target, i * n), n)


@kernel
def add_rows(a, a_stride, b, b_stride, target, stride, m, n):
    """target = a + b; with a stride of 0, one row is added to all."""
    for i in range(m):
        for j in range(0, n, v.LANES):
            v.store(target, i * stride + j, v.load(a, i * a_stride + j) + v.load(b, i * b_stride + j))


@kernel
def add_column_sums(source, stride, sums, m, n):
    """sums [n] += the sums of each column."""
    for j in range(0, n, v.LANES):
        s = v.load(sums, j)
        for i in range(m):
            s = s + v.load(source, i * stride + j)
        v.store(sums, j, s)


@kernel
def _moments(x, width, n, epsilon):
    """The mean of the first `n` of x [width], after which there are zeros, and 1 / their standard deviation."""
    sums = v.fill(np.float32(0))
    for j in range(0, width, v.LANES):
        sums = sums + v.load(x, j)
    mean = v.total(sums) / np.float32(n)
    squares, whole = v.fill(np.float32(0)), n - n % v.LANES
    for j in range(0, whole, v.LANES):
        centred = v.load(x, j) - v.fill(mean)
        squares = v.fma(centred, centred, squares)
    total = v.total(squares)
    for j in range(whole, n):  # without the zeros: taken off afterwards, they would leave their rounding
        total += (v.get(x, j) - mean) * (v.get(x, j) - mean)
    return mean, np.float32(1) / np.float32(math.sqrt(total / np.float32(n) + epsilon))


@kernel
def layer_norm(x, out, gain, bias, width, n, epsilon):
    """out = the layer norm of x, both [width] with zeros after `n` features; out may be x."""
    mean, factor = _moments(x, width, n, epsilon)
    for j in range(0, width, v.LANES):
        standardised = (v.load(x, j) - v.fill(mean)) * v.fill(factor)
        v.store(out, j, standardised * v.load(gain, j) + v.load(bias, j))


@kernel
def standardise(x, out, factors, m, n, epsilon):
    """out [m, n] = each row of x minus its mean, times `factors` [m] = 1 / its standard deviation."""
    for i in range(m):
        row = v.at(x, i * n)
        mean, factor = _moments(row, n, n, epsilon)
        v.put(factors, i, factor)
        for j in range(0, n, v.LANES):
            v.store(out, i * n + j, (v.load(row, j) - v.fill(mean)) * v.fill(factor))


@kernel
def add_standardise_gradient(grad, standardised, factors, out, m, n):
    """out [m, n] += the gradient of the input of `standardise`, from `grad`, that of its output."""
    for i in range(m):
        first = i * n
        sums, products = v.fill(np.float32(0)), v.fill(np.float32(0))
        for j in range(first, first + n, v.LANES):
            g = v.load(grad, j)
            sums, products = sums + g, v.fma(g, v.load(standardised, j), products)
        away, along = v.fill(-v.total(sums) / np.float32(n)), v.fill(-v.total(products) / np.float32(n))
        factor = v.fill(v.get(factors, i))
        for j in range(first, first + n, v.LANES):
            g = v.fma(along, v.load(standardised, j), v.load(grad, j) + away)
            v.store(out, j, v.fma(factor, g, v.load(out, j)))


@kernel
def gelu_rows(x, out, size):
    for j in range(0, size, v.LANES):
        v.store(out, j, v.gelu(v.load(x, j)))


@kernel
def multiply_by_gelu_slope(x, grad, size):
    for j in range(0, size, v.LANES):
        v.store(grad, j, v.load(grad, j) * v.gelu_slope(v.load(x, j)))


@kernel
def multiply(a, b, out, n):
    for j in range(0, n, v.LANES):
        v.store(out, j, v.load(a, j) * v.load(b, j))


@kernel
def scale_by(factor, x, n):
    for j in range(0, n, v.LANES):
        v.store(x, j, v.load(x, j) * v.fill(factor))


@kernel
def largest_of(x, n):
    """The largest element of x [n]."""
    peaks = v.load(x, 0)
    for j in range(v.LANES, n, v.LANES):
        peaks = v.maximum(peaks, v.load(x, j))
    return v.largest(peaks)


@kernel
def softmax_rows(scores, stride, m, num_seen, causal, width, scale):
    """In place: softmax of scale * scores [m, width] over the first `num_seen` of each row; zeros after them.

    causal: each row sees one more than the row before.
    """
    for i in range(m):
        row, seen = v.at(scores, i * stride), num_seen + i if causal else num_seen
        end = v.padded(seen)
        for j in range(seen, end):
            v.put(row, j, np.float32(-3e38))
        away, sums = v.fill(-scale * largest_of(row, end)), v.fill(np.float32(0))
        for j in range(0, end, v.LANES):
            share = v.exp(v.fma(v.load(row, j), v.fill(scale), away))
            sums = sums + share
            v.store(row, j, share)
        factor = v.fill(np.float32(1) / v.total(sums))
        for j in range(0, end, v.LANES):
            v.store(row, j, v.load(row, j) * factor)
        zero(v.at(row, end), width - end)


@kernel
def softmax_rows_gradient(weights, grads, stride, m, num_seen, causal, width, scale):
    """In place: turn `grads`, the gradient of the `weights` that `softmax_rows` made, into that of the scores."""
    for i in range(m):
        row, grad = v.at(weights, i * stride), v.at(grads, i * stride)
        end = v.padded(num_seen + i if causal else num_seen)
        products = v.fill(np.float32(0))
        for j in range(0, end, v.LANES):
            products = v.fma(v.load(row, j), v.load(grad, j), products)
        away, factor = v.fill(-v.total(products)), v.fill(scale)
        for j in range(0, end, v.LANES):
            v.store(grad, j, v.load(row, j) * factor * (v.load(grad, j) + away))
        zero(v.at(grad, end), width - end)


@kernel
def transpose(source, stride, target, m, n):
    """target [n, m] = source [m, n] transposed; both whole vectors, rows of the target one after another."""
    for i in range(0, m, v.LANES):
        for j in range(0, n, v.LANES):
            v.transpose16(v.at(source, i * stride + j), stride, v.at(target, j * m + i), m)


@kernel
def rotate_rows(source, sin_cos, target, m, half):
    """target [m, 2 half]: position queries rotated to the queries' times (`rotate_to_time` in attention.py)."""
    for i in range(m):
        for j in range(0, half, v.LANES):
            s_at = i * 2 * half + j
            c_at = s_at + half
            sin, cos = v.load(sin_cos, s_at), v.load(sin_cos, c_at)
            a_s, a_c = v.load(source, s_at), v.load(source, c_at)
            v.store(target, s_at, v.fma(a_c, sin, v.fill(np.float32(-1)) * a_s * cos))
            v.store(target, c_at, v.fma(a_s, sin, a_c * cos))


@kernel
def sum_of_squares(x, size):
    sums = v.fill(np.float32(0))
    for j in range(0, size, v.LANES):
        value = v.load(x, j)
        sums = v.fma(value, value, sums)
    return v.total(sums)


@kernel
def fold(weight, bias, gain, shift, out, out_bias, m, n):
    """Fold a norm's gain and shift [n] into a linear layer [m, n] after it; bias: its address, 0 for none."""
    for i in range(m):
        sums = v.fill(np.float32(0))
        for j in range(0, n, v.LANES):
            w = v.load(weight, i * n + j)
            v.store(out, i * n + j, w * v.load(gain, j))
            sums = v.fma(w, v.load(shift, j), sums)
        value = v.total(sums)
        v.put(out_bias, i, value + v.get(bias, i) if bias else value)


@kernel
def unfold(grad, grad_bias, weight, gain, shift, grad_gain, grad_shift, m, n):
    """In place: turn the gradients of what `fold` made into that of the weight; add to those of gain and shift."""
    for i in range(m):
        of_bias = v.fill(v.get(grad_bias, i))
        for j in range(0, n, v.LANES):
            g, w = v.load(grad, i * n + j), v.load(weight, i * n + j)
            v.store(grad, i * n + j, v.fma(g, v.load(gain, j), of_bias * v.load(shift, j)))
            v.store(grad_gain, j, v.fma(g, w, v.load(grad_gain, j)))
            v.store(grad_shift, j, v.fma(of_bias, w, v.load(grad_shift, j)))
