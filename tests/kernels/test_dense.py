"""Weights laid out for the kernels."""

import torch

from waveform.kernels.dense import DenseWeights, pad_last


def test_int8_weights_are_within_half_a_step() -> None:
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    matrix = DenseWeights([weight], int8=True)
    laid_out, scales, biases = torch.from_numpy(matrix.data)[0].split([80 * 48, 80 * 4, 80 * 4])
    laid_out, scales = laid_out.view(torch.int8), scales.view(torch.float32)
    group, rest = laid_out[: 64 * 48].view(48, 64), laid_out[64 * 48 :].view(48, 16)
    restored = torch.cat([group.t(), rest.t()]) * scales[:, None]
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((restored[:70, :40] - weight).abs() <= step / 2 + 1e-7).all()
    assert not restored[70:].any() and not restored[:, 40:].any()
    assert not biases.any() and matrix.size == 80 * 48
    assert pad_last(weight).shape == (70, 48)
