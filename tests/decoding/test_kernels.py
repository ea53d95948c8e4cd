"""Weights laid out for the kernels."""

import torch

from waveform.decoding.kernels import DenseWeights, pad_last


def test_int8_weights_are_within_half_a_step() -> None:
    weight = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    matrix = DenseWeights([weight], int8=True)
    tiles = torch.from_numpy(matrix.weights).view(8, 3, 4, 16).transpose(1, 2).reshape(32, 48)
    restored = tiles * torch.from_numpy(matrix.scales)[0, :, None]
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((restored[:20, :40] - weight).abs() <= step / 2 + 1e-7).all()
    assert not restored[20:].any() and not restored[:, 40:].any()
    assert pad_last(weight).shape == (20, 48)
