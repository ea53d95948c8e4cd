"""Kernels that every compiled decoder shares: dense layers with weights in fp32 or int8, layer norms, copies.

They are written in the instructions of simd.py. Every value of a row is computed by the same operations in the same
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

from waveform.decoding.simd import (
    LANES,
    add,
    bytes_of,
    compiled,
    fill,
    fma,
    gelu,
    get,
    load,
    multiply,
    put,
    store,
    total,
)

_TILE = 4  # outputs computed together, from weights that lie together

F32 = np.float32(0)  # says which type to load
SET, ADD, GELU = 0, 1, 2  # what `dense` does with its result: store, add to what is there, or store its GELU


def padded(size: int) -> int:
    """`size` rounded up to whole vectors."""
    return -(-size // LANES) * LANES


class DenseWeights:
    """Weights of L layers of one shape, laid out for `dense`: float32, or int8 with a scale for each output.

    weights [L, N, K], in tiles of 4 outputs by 16 inputs; scales, biases [L, N] float32.
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
        num_layers, num_outputs, self.num_inputs = stacked.shape
        self.num_outputs = padded(num_outputs)
        stacked = F.pad(stacked, (0, 0, 0, self.num_outputs - num_outputs))
        scales = torch.ones(stacked.shape[:2])
        if int8:
            stacked, scales = quantise(stacked)
        tiles = stacked.unflatten(2, (-1, LANES)).unflatten(1, (-1, _TILE)).transpose(2, 3)
        self.weights = tiles.contiguous().view(num_layers, -1).numpy()
        self.scales = scales.numpy()
        self.biases = np.zeros(self.scales.shape, dtype=np.float32)
        self.biases[:, num_outputs:] = padding
        if biases is not None:
            self.biases[:, :num_outputs] = torch.stack([bias.detach().float() for bias in biases]).numpy()

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.weights, self.scales, self.biases

    @property
    def size(self) -> int:
        """Numbers that a step reads."""
        return sum(array.size for array in self.arrays)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


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


@compiled
def of_layer(matrix, layer, num_inputs, num_outputs, kind):
    """The addresses of one layer of `DenseWeights`, from those of the first."""
    outputs = layer * num_outputs
    return (
        matrix[0] + outputs * num_inputs * bytes_of(kind),
        matrix[1] + outputs * 4,
        matrix[2] + outputs * 4,
    )


@compiled
def dense(matrix, x, out, num_inputs, num_outputs, rows, vectors, mode, kind):
    """out [R, N] = or += x [R, K] @ W^T + b, or its GELU, for ranges of rows and of vectors of outputs.

    matrix: addresses of weights [N, K] (of the type of `kind`), scales and biases [N]; x, out: addresses.
    """
    for tile in range(vectors[0] * 4, vectors[1] * 4):
        row = rows[0]
        while row + 4 <= rows[1]:
            _four_rows(matrix, tile, x, row, num_inputs, out, num_outputs, mode, kind)
            row += 4
        while row < rows[1]:
            _one_row(matrix, tile, x, row, num_inputs, out, num_outputs, mode, kind)
            row += 1
    if mode == GELU:
        for row in range(rows[0], rows[1]):
            for i in range(row * num_outputs + vectors[0] * 16, row * num_outputs + vectors[1] * 16, 16):
                store(out, i, gelu(load(out, i, F32)))


@compiled
def _finish(matrix, i, summed, out, row, num_outputs, mode):
    at = row * num_outputs + i
    value = summed * get(matrix[1], i, F32) + get(matrix[2], i, F32)
    put(out, at, get(out, at, F32) + value if mode == ADD else value)


@compiled
def _one_row(matrix, tile, x, row, num_inputs, out, num_outputs, mode, kind):
    weights, w, at = matrix[0], tile * 4 * num_inputs, row * num_inputs
    a = b = c = d = fill(np.float32(0))
    for k in range(at, at + num_inputs, LANES):
        x_k = load(x, k, F32)
        a = fma(load(weights, w, kind), x_k, a)
        b = fma(load(weights, w + 16, kind), x_k, b)
        c = fma(load(weights, w + 32, kind), x_k, c)
        d = fma(load(weights, w + 48, kind), x_k, d)
        w += 64
    i = 4 * tile
    _finish(matrix, i, total(a), out, row, num_outputs, mode)
    _finish(matrix, i + 1, total(b), out, row, num_outputs, mode)
    _finish(matrix, i + 2, total(c), out, row, num_outputs, mode)
    _finish(matrix, i + 3, total(d), out, row, num_outputs, mode)


@compiled
def _finish_four(matrix, i, sums, out, row, num_outputs, mode):
    _finish(matrix, i, total(sums[0]), out, row, num_outputs, mode)
    _finish(matrix, i, total(sums[1]), out, row + 1, num_outputs, mode)
    _finish(matrix, i, total(sums[2]), out, row + 2, num_outputs, mode)
    _finish(matrix, i, total(sums[3]), out, row + 3, num_outputs, mode)


@compiled
def _four_rows(matrix, tile, x, row, num_inputs, out, num_outputs, mode, kind):
    weights, w, at = matrix[0], tile * 4 * num_inputs, row * num_inputs
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = fill(np.float32(0))
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = fill(np.float32(0))
    for k in range(at, at + num_inputs, LANES):
        x0, x1 = load(x, k, F32), load(x, k + num_inputs, F32)
        x2, x3 = load(x, k + 2 * num_inputs, F32), load(x, k + 3 * num_inputs, F32)
        w_k = load(weights, w, kind)
        a0, a1, a2, a3 = fma(w_k, x0, a0), fma(w_k, x1, a1), fma(w_k, x2, a2), fma(w_k, x3, a3)
        w_k = load(weights, w + 16, kind)
        b0, b1, b2, b3 = fma(w_k, x0, b0), fma(w_k, x1, b1), fma(w_k, x2, b2), fma(w_k, x3, b3)
        w_k = load(weights, w + 32, kind)
        c0, c1, c2, c3 = fma(w_k, x0, c0), fma(w_k, x1, c1), fma(w_k, x2, c2), fma(w_k, x3, c3)
        w_k = load(weights, w + 48, kind)
        d0, d1, d2, d3 = fma(w_k, x0, d0), fma(w_k, x1, d1), fma(w_k, x2, d2), fma(w_k, x3, d3)
        w += 64
    i = 4 * tile
    _finish_four(matrix, i, (a0, a1, a2, a3), out, row, num_outputs, mode)
    _finish_four(matrix, i + 1, (b0, b1, b2, b3), out, row, num_outputs, mode)
    _finish_four(matrix, i + 2, (c0, c1, c2, c3), out, row, num_outputs, mode)
    _finish_four(matrix, i + 3, (d0, d1, d2, d3), out, row, num_outputs, mode)


@compiled
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


@compiled
def copy(source, target, width):
    """Copy `width` float32 (whole vectors) from one address to another."""
    for i in range(0, width, LANES):
        store(target, i, load(source, i, F32))
