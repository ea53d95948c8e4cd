"""Compiled products, transposition and gradients of rows against numpy and torch."""

import numpy as np
import pytest
import torch

from waveform.compiled.product import product
from waveform.compiled.rows import gelu_rows, multiply_by_gelu_slope, transpose
from waveform.compiled.simd import address, compiled


@compiled(entry=True)
def call(which, a, a_row, a_step, b, b_row, c, c_row, m, n, k, adds):  # noqa: PLR0913
    """One entry for all of these, because each would compile the kernels again."""
    if which == 0:
        product(a, a_row, a_step, b, b_row, c, c_row, m, n, k, adds)
    elif which == 1:
        transpose(a, a_row, c, c_row, m, n)
    else:
        gelu_rows(a, c, n)
        multiply_by_gelu_slope(a, b, n)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 32, 5), (13, 48, 16), (1, 16, 1), (70, 80, 40), (3, 16, 0)])
def test_product(m: int, n: int, k: int, transposed: bool) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if transposed else (m, k)).astype(np.float32)
    b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((k, n + 16), (m, n + 32)))
    strides = (1, m) if transposed else (k, 1)
    expected = (a.T if transposed else a).astype(np.float64) @ b[:, :n]
    before = c.copy()
    call(0, address(a), *strides, address(b), n + 16, address(c), n + 32, m, n, k, True)
    np.testing.assert_allclose(c[:, :n], before[:, :n] + expected, rtol=0, atol=2e-5)
    call(0, address(a), *strides, address(b), n + 16, address(c), n + 32, m, n, k, False)
    np.testing.assert_allclose(c[:, :n], expected, rtol=0, atol=2e-5)
    assert np.array_equal(c[:, n:], before[:, n:])  # nothing is written beyond


def test_transpose() -> None:
    source = np.arange(32 * 50, dtype=np.float32).reshape(32, 50)
    target = np.zeros((48, 40), dtype=np.float32)
    call(1, address(source), 50, 0, 0, 0, address(target), 40, 32, 48, 0, False)
    assert np.array_equal(target[:, :32], source[:, :48].T)
    assert not target[:, 32:].any()


def test_gelu_and_its_slope() -> None:
    x = torch.linspace(-6, 6, 160, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    a, out, grad = x.detach().float().numpy(), np.zeros(160, dtype=np.float32), np.full(160, 2, dtype=np.float32)
    call(2, address(a), 0, 0, address(grad), 0, address(out), 0, 0, 160, 0, False)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(grad, 2 * slope.numpy(), rtol=0, atol=2e-6)
