"""Kernels on rows of matrices: norms, sums, GELU, softmax and their gradients, in the instructions of vectors.py.

Names of memory are addresses; a matrix [m, n] has rows `stride` floats apart, and n is whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from waveform.kernels.vectors import (
    F32,
    LANES,
    add,
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
    multiply,
    put,
    store,
    total,
    transpose16,
)


@kernel
def copy_rows(source, source_stride, target, target_stride, m, n):
    for i in range(m):
        for j in range(0, n, LANES):
            store(target, i * target_stride + j, load(source, i * source_stride + j, F32))


@kernel
def zero_rows(target, stride, m, n):
    zero = fill(np.float32(0))
    for i in range(m):
        for j in range(0, n, LANES):
            store(target, i * stride + j, zero)


@kernel
def repeat_row(row, target, stride, m, n):
    """Every row of `target` = `row` [n]."""
    for i in range(m):
        for j in range(0, n, LANES):
            store(target, i * stride + j, load(row, j, F32))


@kernel
def add_row(source, source_stride, row, target, target_stride, m, n):
    """target = source + `row` [n] in every row."""
    for i in range(m):
        for j in range(0, n, LANES):
            store(target, i * target_stride + j, add(load(source, i * source_stride + j, F32), load(row, j, F32)))


@kernel
def add_column_sums(source, stride, sums, m, n):
    """sums [n] += the sums of each column."""
    for j in range(0, n, LANES):
        s = load(sums, j, F32)
        for i in range(m):
            s = add(s, load(source, i * stride + j, F32))
        store(sums, j, s)


@kernel
def standardise(x, out, factors, m, n, epsilon):
    """out [m, n] = each row of x less its mean, times `factors` [m] = 1 / its standard deviation."""
    for i in range(m):
        first = i * n
        sums = fill(np.float32(0))
        for j in range(first, first + n, LANES):
            sums = add(sums, load(x, j, F32))
        away = fill(-total(sums) / np.float32(n))
        squares = fill(np.float32(0))
        for j in range(first, first + n, LANES):
            centred = add(load(x, j, F32), away)
            squares = fma(centred, centred, squares)
        factor = np.float32(1) / np.float32(math.sqrt(total(squares) / np.float32(n) + epsilon))
        put(factors, i, factor)
        factor = fill(factor)
        for j in range(first, first + n, LANES):
            store(out, j, multiply(add(load(x, j, F32), away), factor))


@kernel
def add_standardise_gradient(grad, standardised, factors, out, m, n):
    """out [m, n] += the gradient of what `standardise` was given, from that of what it made."""
    for i in range(m):
        first = i * n
        sums, products = fill(np.float32(0)), fill(np.float32(0))
        for j in range(first, first + n, LANES):
            g = load(grad, j, F32)
            sums, products = add(sums, g), fma(g, load(standardised, j, F32), products)
        away, along = fill(-total(sums) / np.float32(n)), fill(-total(products) / np.float32(n))
        factor = fill(get(factors, i, F32))
        for j in range(first, first + n, LANES):
            g = fma(along, load(standardised, j, F32), add(load(grad, j, F32), away))
            store(out, j, fma(factor, g, load(out, j, F32)))


@kernel
def gelu_rows(x, out, size):
    for j in range(0, size, LANES):
        store(out, j, gelu(load(x, j, F32)))


@kernel
def multiply_by_gelu_slope(x, grad, size):
    for j in range(0, size, LANES):
        store(grad, j, multiply(load(grad, j, F32), gelu_slope(load(x, j, F32))))


@kernel
def multiply_rows(x, factors, out, size):
    for j in range(0, size, LANES):
        store(out, j, multiply(load(x, j, F32), load(factors, j, F32)))


@kernel
def softmax_row(scores, num_seen, width, scale):
    """In place: softmax of scale * scores of the first `num_seen`; zeros in the rest of `width`."""
    end = (num_seen + LANES - 1) // LANES * LANES
    for j in range(num_seen, end):
        put(scores, j, np.float32(-3e38))
    top = load(scores, np.int64(0), F32)
    for j in range(LANES, end, LANES):
        top = maximum(top, load(scores, j, F32))
    factor = fill(scale)
    away = fill(-scale * largest(top))
    sums = fill(np.float32(0))
    for j in range(0, end, LANES):
        e = exp(fma(load(scores, j, F32), factor, away))
        sums = add(sums, e)
        store(scores, j, e)
    share = fill(np.float32(1) / total(sums))
    for j in range(0, end, LANES):
        store(scores, j, multiply(load(scores, j, F32), share))
    for j in range(end, width, LANES):
        store(scores, j, fill(np.float32(0)))


@kernel
def softmax_row_gradient(weights, grad, num_seen, width, scale):
    """In place: from the gradient of softmax(scale * scores), whose result is `weights`, to that of the scores."""
    end = (num_seen + LANES - 1) // LANES * LANES
    products = fill(np.float32(0))
    for j in range(0, end, LANES):
        products = fma(load(weights, j, F32), load(grad, j, F32), products)
    away, factor = fill(-total(products)), fill(scale)
    for j in range(0, end, LANES):
        store(grad, j, multiply(multiply(load(weights, j, F32), factor), add(load(grad, j, F32), away)))
    for j in range(end, width, LANES):
        store(grad, j, fill(np.float32(0)))


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
            sin, cos = load(sin_cos, s_at, F32), load(sin_cos, c_at, F32)
            a_s, a_c = load(source, s_at, F32), load(source, c_at, F32)
            minus = multiply(fill(np.float32(-1)), a_s)
            store(target, s_at, fma(a_c, sin, multiply(minus, cos)))
            store(target, c_at, fma(a_s, sin, multiply(a_c, cos)))


@kernel
def scale_row(row, factor, n):
    for j in range(0, n, LANES):
        store(row, j, multiply(load(row, j, F32), fill(factor)))


@kernel
def sum_of_squares(x, size):
    sums = fill(np.float32(0))
    for j in range(0, size, LANES):
        value = load(x, j, F32)
        sums = fma(value, value, sums)
    return total(sums)


@kernel
def fold(weight, bias, gain, shift, out, out_bias, m, n):
    """Fold a norm's gain and shift [n] into a linear layer [m, n] after it; bias: its address, 0 for none."""
    for i in range(m):
        sums = fill(np.float32(0))
        for j in range(0, n, LANES):
            w = load(weight, i * n + j, F32)
            store(out, i * n + j, multiply(w, load(gain, j, F32)))
            sums = fma(w, load(shift, j, F32), sums)
        value = total(sums)
        put(out_bias, i, value + get(bias, i, F32) if bias else value)


@kernel
def unfold(grad_out, grad_out_bias, weight, gain, shift, grad_weight, grad_gain, grad_shift, m, n):
    """From the gradients of what `fold` made to that of the weight; those of gain and shift are added."""
    for i in range(m):
        of_bias = fill(get(grad_out_bias, i, F32))
        for j in range(0, n, LANES):
            g, w = load(grad_out, i * n + j, F32), load(weight, i * n + j, F32)
            store(grad_weight, i * n + j, fma(g, load(gain, j, F32), multiply(of_bias, load(shift, j, F32))))
            store(grad_gain, j, fma(g, w, load(grad_gain, j, F32)))
            store(grad_shift, j, fma(of_bias, w, load(grad_shift, j, F32)))


@kernel
def spread_halves(source, target, m, half, padded_half):
    """Rows [m, 2 half] -> [m, 2 padded_half]: each half with zeros after it."""
    for i in range(2 * m):
        for j in range(padded_half):
            put(target, i * padded_half + j, get(source, i * half + j, F32) if j < half else np.float32(0))


@kernel
def join_halves(source, target, m, half, padded_half):
    """The inverse of `spread_halves`."""
    for i in range(2 * m):
        for j in range(half):
            put(target, i * half + j, get(source, i * padded_half + j, F32))
