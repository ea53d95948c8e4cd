"""The elementary functions of the kernels."""

import math

import numpy as np

from waveform.kernels import vectors
from waveform.kernels.compiling import kernel
from waveform.kernels.record import address


@kernel(entry=True)
def _apply(x, exp, gelu, slope, tanh, sigmoid, size):
    """All of them in one entry, because each would compile the kernels again."""
    for i in range(0, size, 16):
        value = vectors.load(x, i)
        vectors.store(exp, i, vectors.exp(value))
        vectors.store(gelu, i, vectors.gelu(value))
        vectors.store(slope, i, vectors.gelu_slope(value))
        vectors.store(tanh, i, vectors.tanh(value))
        vectors.store(sigmoid, i, vectors.sigmoid(value))


def applied(x: np.ndarray) -> list[np.ndarray]:
    results = [np.empty_like(x) for _ in range(5)]
    _apply(address(x), *map(address, results), x.size)
    return [each.astype(np.float64) for each in results]


def test_elementary_functions() -> None:
    x = np.linspace(-30, 30, 1 << 14, dtype=np.float32)
    exact = x.astype(np.float64)
    exp, gelu, slope, tanh, sigmoid = applied(x)
    assert np.abs(exp / np.exp(exact) - 1).max() < 1.5e-7
    cumulative = np.array([1 + math.erf(value / math.sqrt(2)) for value in exact]) / 2
    assert np.abs(gelu - exact * cumulative).max() < 1e-6
    density = np.exp(-(exact**2) / 2) / math.sqrt(2 * math.pi)
    assert np.abs(slope - (cumulative + exact * density)).max() < 1e-6
    assert np.abs(tanh - np.tanh(exact)).max() < 3e-7
    assert np.abs(sigmoid * (1 + np.exp(-exact)) - 1).max() < 3e-7
    far = applied(np.array([-np.inf, -1e30, -88, 88] * 4, dtype=np.float32))[0]
    assert far[:3].tolist() == [0, 0, 0] and far[3] > 1e38
