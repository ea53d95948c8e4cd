"""Weights in 8 bits."""

import torch

from waveform.kernels.dense import quantise


def test_int8_weights_are_within_half_a_step() -> None:
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    rounded, scales = quantise(weight)
    assert rounded.dtype == torch.int8
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded * scales[:, None] - weight).abs() <= step / 2 + 1e-7).all()
