"""Dense layers with weights in fp32 or int8, which every compiled decoder is made of.

They are written in the instructions of vectors.py. Every value of a row is computed by the same operations in the same
order, whatever the number of rows, so a stream does not depend on the streams sampled with it. Weights are read from
RAM once, for all rows.

Shape letters: R rows, N outputs, K inputs, both padded to whole vectors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from waveform.kernels.compiling import kernel
from waveform.kernels.product import GROUP, group_row, group_tile, vector_of_product
from waveform.kernels.vectors import LANES, at, bytes_of, fill, fma, gelu, load, maximum, padded, stack_tile, store

SET, ADD, GELU, RELU = range(4)  # what `dense` does with its result: store it, add it to what is there, or activate it
_WIDTH = GROUP * LANES  # outputs computed together, from weights that lie together


class DenseWeights:
    """Weights of L layers of one shape, laid out for `dense`: float32, or int8 with a scale for each output.

    `data` [L, bytes]: a layer's weights in the order in which they are read, first [N / 64, K, 4, 16], groups of four
    vectors of outputs, then [..., K, 16], the vectors that are left over; then its scales and biases [N] float32.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, *, int8: bool) -> None:
        stacked = pad_last(torch.stack([weight.detach().float() for weight in weights]))
        _, num_outputs, self.num_inputs = stacked.shape
        self.num_outputs = padded(num_outputs)
        stacked = F.pad(stacked, (0, 0, 0, self.num_outputs - num_outputs))
        scales = torch.ones(stacked.shape[:2])
        if int8:
            stacked, scales = quantise(stacked)
        num_grouped = self.num_outputs // _WIDTH * _WIDTH
        groups = stacked[:, :num_grouped].unflatten(1, (-1, GROUP, LANES)).permute(0, 1, 4, 2, 3)
        others = stacked[:, num_grouped:].unflatten(1, (-1, LANES)).transpose(2, 3)
        given = torch.zeros_like(scales) if biases is None else torch.stack([bias.detach().float() for bias in biases])
        parts = (torch.cat([groups.flatten(1), others.flatten(1)], dim=1), scales, pad_last(given))
        self.data = torch.cat([part.view(torch.uint8) for part in parts], dim=1).numpy()

    @property
    def size(self) -> int:
        """How many weights a step multiplies with."""
        return len(self.data) * self.num_outputs * self.num_inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pad_last(x: Tensor) -> Tensor:
    """Pad the last dimension with zeros to whole vectors."""
    return F.pad(x, (0, padded(x.shape[-1]) - x.shape[-1]))


def as_vectors(*x: Any) -> np.ndarray:
    """Tensors [..., n] -> [len(x), ..., n'] fp32: a copy for a kernel to read."""
    return pad_last(torch.stack([each.detach().float() for each in x])).contiguous().numpy()


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
    """out [R, N] = or += x [R, K] @ W^T + b, or its GELU or ReLU, for ranges of rows and of vectors of outputs.

    weights: address of `DenseWeights`, of the type of `kind`; shape: (K, N); x, out: addresses. vectors: whole groups,
    see `GROUP`. The order in which an output is summed depends on its group alone.
    """
    num_inputs, num_outputs = shape
    num_bytes = num_outputs * num_inputs * bytes_of(kind)
    weights += layer * (num_bytes + 2 * num_outputs * 4)
    scales = weights + num_bytes
    biases, sums = at(scales, num_outputs), stack_tile()
    vector = vectors[0]
    while vector < vectors[1]:
        output, row = vector * LANES, rows[0]
        matrix = weights + output * num_inputs * bytes_of(kind)
        scale, bias = at(scales, output), at(biases, output)
        is_group = vector + GROUP <= num_outputs // LANES
        while row < rows[1]:
            num_together = 4 if is_group and row + 4 <= rows[1] else 1
            source = at(x, row * num_inputs)
            if num_together == 4:
                group_tile(source, num_inputs, 1, matrix, _WIDTH, sums, _WIDTH, num_inputs, False, kind)
            elif is_group:
                group_row(source, num_inputs, 1, matrix, _WIDTH, sums, _WIDTH, num_inputs, False, kind)
            else:
                store(sums, 0, vector_of_product(source, matrix, LANES, num_inputs, kind))
            for i in range(num_together):
                target = at(out, (row + i) * num_outputs + output)
                for j in range(0, _WIDTH if is_group else LANES, LANES):
                    _finish(load(sums, i * _WIDTH + j), j, scale, bias, target, mode)
            row += num_together
        vector += GROUP if is_group else 1


@kernel
def _finish(sums, j, scale, bias, out, mode):
    """Scale the sums of the outputs from `j` on, add biases, and store, add or activate the result as `mode` says."""
    value = fma(sums, load(scale, j), load(bias, j))
    if mode == ADD:
        value = value + load(out, j)
    elif mode == GELU:
        value = gelu(value)
    elif mode == RELU:
        value = maximum(value, fill(np.float32(0)))
    store(out, j, value)
