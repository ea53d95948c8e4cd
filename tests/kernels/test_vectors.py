"""The elementary functions of the kernels."""

import math

import numpy as np

from waveform.kernels import vectors
from waveform.kernels.compiling import kernel
from waveform.kernels.record import address


@kernel(entry=True)
def _apply(which, x, out, size):
    for i in range(0, size, 16):
        value = vectors.load(x, i)
        if which == 0:
            value = vectors.exp(value)
        elif which == 1:
            value = vectors.gelu(value)
        elif which == 2:
            value = vectors.tanh(value)
        else:
            value = vectors.sigmoid(value)
        vectors.store(out, i, value)


def test_elementary_functions() -> None:
    x = np.linspace(-30, 30, 1 << 14, dtype=np.float32)
    exact = x.astype(np.float64)
    results = [np.empty_like(x) for _ in range(4)]
    for which, out in enumerate(results):
        _apply(which, address(x), address(out), x.size)
    exp, gelu, tanh, sigmoid = (out.astype(np.float64) for out in results)
    assert np.abs(exp / np.exp(exact) - 1).max() < 1.5e-7
    erf = np.array([math.erf(value / math.sqrt(2)) for value in exact])
    assert np.abs(gelu - exact / 2 * (1 + erf)).max() < 1e-6
    assert np.abs(tanh - np.tanh(exact)).max() < 3e-7
    assert np.abs(sigmoid * (1 + np.exp(-exact)) - 1).max() < 3e-7
    far = np.array([-np.inf, -1e30, -88, 88] * 4, dtype=np.float32)
    _apply(0, address(far), address(results[0]), 16)
    assert results[0][:3].tolist() == [0, 0, 0] and results[0][3] > 1e38
