"""Kernels that every compiled decoder shares: dense layers with weights in fp32 or int8, layer norms, copies.

They are written in the instructions of vectors.py. Every value of a row is computed by the same operations in the same
order, whatever the number of rows, so a stream does not depend on the streams sampled with it. Weights are read from
RAM once, for all rows.

Shape letters: R rows, N outputs, K inputs, both padded to whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from waveform.kernels.vectors import (
    F32,
    LANES,
    add,
    bytes_of,
    fill,
    fma,
    gelu,
    get,
    kernel,
    load,
    multiply,
    padded,
    store,
    total,
)

GROUP = 4  # vectors of outputs computed together, from weights that lie together
SET, ADD, GELU = 0, 1, 2  # what `dense` does with its result: store, add to what is there, or store its GELU


class DenseWeights:
    """Weights of L layers of one shape, laid out for `dense`: float32, or int8 with a scale for each output.

    `data` [L, bytes]: a layer's weights in the order in which they are read, first [N / 64, K, 4, 16], groups of four
    vectors of outputs, then [..., K, 16], the vectors that are left over; then its scales and biases [N] float32.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        int8: bool,
        padding: float = 0,
    ) -> None:
        """padding: the value of outputs that are there only to fill a vector."""
        stacked = pad_last(torch.stack([weight.detach().float() for weight in weights]))
        _, num_outputs, self.num_inputs = stacked.shape
        self.num_outputs = padded(num_outputs)
        stacked = F.pad(stacked, (0, 0, 0, self.num_outputs - num_outputs))
        scales = torch.ones(stacked.shape[:2])
        if int8:
            stacked, scales = quantise(stacked)
        num_grouped = self.num_outputs // (GROUP * LANES) * GROUP * LANES
        groups = stacked[:, :num_grouped].unflatten(1, (-1, GROUP, LANES)).permute(0, 1, 4, 2, 3)
        others = stacked[:, num_grouped:].unflatten(1, (-1, LANES)).transpose(2, 3)
        all_biases = torch.full_like(scales, padding)
        all_biases[:, :num_outputs] = 0 if biases is None else torch.stack([bias.detach().float() for bias in biases])
        parts = (torch.cat([groups.flatten(1), others.flatten(1)], dim=1), scales, all_biases)
        self.data = torch.cat([part.view(torch.uint8) for part in parts], dim=1).numpy()

    @property
    def size(self) -> int:
        """Numbers that a step multiplies with."""
        return len(self.data) * self.num_outputs * self.num_inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pad_last(x: Tensor) -> Tensor:
    """Pad the last dimension with zeros to whole vectors."""
    return F.pad(x, (0, padded(x.shape[-1]) - x.shape[-1]))


def zeros(*shape: int) -> np.ndarray:
    """A float32 array for a kernel to write to."""
    return np.zeros(shape, dtype=np.float32)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 [..., K] and scales [...]; their product differs from x by at most half a step."""
    scales = x.abs().amax(dim=-1) / 127
    scales = torch.where(scales > 0, scales, 1)
    return (x / scales[..., None]).round().to(torch.int8), scales


@kernel
def dense(weights, layer, x, out, shape, rows, vectors, mode, kind):
    """out [R, N] = or += x [R, K] @ W^T + b, or its GELU, for ranges of rows and of vectors of outputs.

    weights: address of `DenseWeights`, of the type of `kind`; shape: (K, N); x, out: addresses. vectors: whole groups,
    see `GROUP`. The order in which an output is summed depends on its group alone.
    """
    num_inputs, num_outputs = shape
    num_bytes = num_outputs * num_inputs * bytes_of(kind)
    weights += layer * (num_bytes + 2 * num_outputs * 4)
    matrix = (weights, weights + num_bytes, weights + num_bytes + num_outputs * 4)  # weights, scales, biases
    vector = vectors[0]
    while vector < vectors[1]:
        grouped = vector + GROUP <= num_outputs // LANES
        row = rows[0]
        while grouped and row + 4 <= rows[1]:
            _four_rows(matrix, vector, x, row, num_inputs, out, num_outputs, mode, kind)
            row += 4
        while row < rows[1]:
            if grouped:
                _four_vectors(matrix, vector, x, row, num_inputs, out, num_outputs, mode, kind)
            else:
                _one_vector(matrix, vector, x, row, num_inputs, out, num_outputs, mode, kind)
            row += 1
        vector += GROUP if grouped else 1


@kernel
def _finish(matrix, vector, sums, out, row, num_outputs, mode):
    i = 16 * vector
    at = row * num_outputs + i
    value = fma(sums, load(matrix[1], i, F32), load(matrix[2], i, F32))
    if mode == ADD:
        value = add(value, load(out, at, F32))
    elif mode == GELU:
        value = gelu(value)
    store(out, at, value)


@kernel
def _finish_four(matrix, vector, sums, out, row, num_outputs, mode):
    _finish(matrix, vector, sums[0], out, row, num_outputs, mode)
    _finish(matrix, vector + 1, sums[1], out, row, num_outputs, mode)
    _finish(matrix, vector + 2, sums[2], out, row, num_outputs, mode)
    _finish(matrix, vector + 3, sums[3], out, row, num_outputs, mode)


@kernel
def _one_vector(matrix, vector, x, row, num_inputs, out, num_outputs, mode, kind):
    weights, w, at = matrix[0], vector * 16 * num_inputs, row * num_inputs
    a = b = c = d = fill(np.float32(0))
    for k in range(at, at + num_inputs, 4):
        a = fma(load(weights, w, kind), fill(get(x, k, F32)), a)
        b = fma(load(weights, w + 16, kind), fill(get(x, k + 1, F32)), b)
        c = fma(load(weights, w + 32, kind), fill(get(x, k + 2, F32)), c)
        d = fma(load(weights, w + 48, kind), fill(get(x, k + 3, F32)), d)
        w += 64
    _finish(matrix, vector, add(add(a, b), add(c, d)), out, row, num_outputs, mode)


@kernel
def _four_vectors(matrix, vector, x, row, num_inputs, out, num_outputs, mode, kind):
    weights, w, at = matrix[0], vector * 16 * num_inputs, row * num_inputs
    a = b = c = d = fill(np.float32(0))
    for k in range(at, at + num_inputs):
        x_k = fill(get(x, k, F32))
        a = fma(load(weights, w, kind), x_k, a)
        b = fma(load(weights, w + 16, kind), x_k, b)
        c = fma(load(weights, w + 32, kind), x_k, c)
        d = fma(load(weights, w + 48, kind), x_k, d)
        w += 64
    _finish_four(matrix, vector, (a, b, c, d), out, row, num_outputs, mode)


@kernel
def _four_rows(matrix, vector, x, row, num_inputs, out, num_outputs, mode, kind):
    """`_four_vectors` for four rows, with the same sums."""
    weights, w, at = matrix[0], vector * 16 * num_inputs, row * num_inputs
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = fill(np.float32(0))
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = fill(np.float32(0))
    for k in range(at, at + num_inputs):
        wa, wb = load(weights, w, kind), load(weights, w + 16, kind)
        wc, wd = load(weights, w + 32, kind), load(weights, w + 48, kind)
        x_k = fill(get(x, k, F32))
        a0, b0, c0, d0 = fma(wa, x_k, a0), fma(wb, x_k, b0), fma(wc, x_k, c0), fma(wd, x_k, d0)
        x_k = fill(get(x, k + num_inputs, F32))
        a1, b1, c1, d1 = fma(wa, x_k, a1), fma(wb, x_k, b1), fma(wc, x_k, c1), fma(wd, x_k, d1)
        x_k = fill(get(x, k + 2 * num_inputs, F32))
        a2, b2, c2, d2 = fma(wa, x_k, a2), fma(wb, x_k, b2), fma(wc, x_k, c2), fma(wd, x_k, d2)
        x_k = fill(get(x, k + 3 * num_inputs, F32))
        a3, b3, c3, d3 = fma(wa, x_k, a3), fma(wb, x_k, b3), fma(wc, x_k, c3), fma(wd, x_k, d3)
        w += 64
    _finish_four(matrix, vector, (a0, b0, c0, d0), out, row, num_outputs, mode)
    _finish_four(matrix, vector, (a1, b1, c1, d1), out, row + 1, num_outputs, mode)
    _finish_four(matrix, vector, (a2, b2, c2, d2), out, row + 2, num_outputs, mode)
    _finish_four(matrix, vector, (a3, b3, c3, d3), out, row + 3, num_outputs, mode)


@kernel
def layer_norm(x, out, gain, bias, width, num_features, epsilon):
    """out = the layer norm of x, both `width` wide with zeros after the features; all are addresses; out may be x."""
    sums = fill(np.float32(0))
    for i in range(0, width, LANES):
        sums = add(sums, load(x, i, F32))
    mean = total(sums) / np.float32(num_features)
    squares, away = fill(np.float32(0)), fill(-mean)
    for i in range(0, width, LANES):
        centred = add(load(x, i, F32), away)
        squares = fma(centred, centred, squares)
    padding = np.float32(width - num_features) * mean * mean  # what the zeros after the features added
    variance = (total(squares) - padding) / np.float32(num_features)
    factor = fill(np.float32(1) / np.float32(math.sqrt(variance + epsilon)))
    for i in range(0, width, LANES):
        scaled = multiply(multiply(add(load(x, i, F32), away), factor), load(gain, i, F32))
        store(out, i, add(scaled, load(bias, i, F32)))


@kernel
def copy(source, target, width):
    """Copy `width` float32 (whole vectors) from one address to another."""
    for i in range(0, width, LANES):
        store(target, i, load(source, i, F32))
