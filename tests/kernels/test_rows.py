"""Kernels on rows, where rounding is largest: norms of few features, far from zero."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from waveform.kernels import rows, vectors
from waveform.kernels.compiling import kernel
from waveform.kernels.record import address

_WIDTH = 16


@kernel(entry=True)
def _layer_norms(x, out, gain, bias, m, n, epsilon):
    for i in range(m):
        here = i * 16
        rows.layer_norm(vectors.at(x, here), vectors.at(out, here), gain, bias, 16, n, epsilon)


@pytest.mark.parametrize("num_features", [1, 2, 3])
def test_a_norm_of_few_features_is_finite_and_as_in_torch(num_features: int) -> None:
    x = np.zeros((500, _WIDTH), dtype=np.float32)
    x[:, :num_features] = np.random.default_rng(0).normal(100, 3, (len(x), num_features))
    x[-1, 0] = np.nan  # which a training must notice
    out, one, none = np.empty_like(x), np.ones(_WIDTH, np.float32), np.zeros(_WIDTH, np.float32)
    _layer_norms(*map(address, (x, out, one, none)), len(x), num_features, np.float32(1e-5))
    expected = F.layer_norm(torch.from_numpy(x[:-1, :num_features]).double(), [num_features], eps=1e-5)
    assert np.isnan(out[-1, 0])
    np.testing.assert_allclose(out[:-1, :num_features], expected.numpy(), atol=0.02)
