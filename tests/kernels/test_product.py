"""Compiled products, transposition and gradients of rows against numpy and torch."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from waveform.kernels.compiling import kernel
from waveform.kernels.product import product
from waveform.kernels.record import make_record
from waveform.kernels.rows import gelu_rows, multiply_by_gelu_slope, transpose

PRODUCT, TRANSPOSE, GELU = range(3)
_ARGUMENTS = ("a", "a_row", "a_step", "b", "b_row", "c", "c_row", "m", "n", "k", "adds")


@kernel(entry=True)
def _call(which, arguments):
    """One entry for all of these, because each would compile the kernels again."""
    p = arguments[0]
    if which == PRODUCT:
        product(p.a, p.a_row, p.a_step, p.b, p.b_row, p.c, p.c_row, p.m, p.n, p.k, p.adds != 0)
    elif which == TRANSPOSE:
        transpose(p.a, p.a_row, p.c, p.c_row, p.m, p.n)
    else:
        gelu_rows(p.a, p.c, p.n)
        multiply_by_gelu_slope(p.a, p.b, p.n)


def call(which: int, **given: np.ndarray | int) -> None:
    """given: some of `_ARGUMENTS`; of an array the kernel gets the address."""
    _call(which, make_record({**dict.fromkeys(_ARGUMENTS, 0), **given}))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 32, 5), (13, 48, 16), (1, 16, 1), (70, 80, 40), (3, 16, 0)])
def test_product(m: int, n: int, k: int, transposed: bool) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if transposed else (m, k)).astype(np.float32)
    b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((k, n + 16), (m, n + 32)))
    a_row, a_step = (1, m) if transposed else (k, 1)
    given: dict[str, np.ndarray | int] = {"a": a, "a_row": a_row, "a_step": a_step, "m": m, "n": n, "k": k}
    given |= {"b": b, "b_row": n + 16, "c": c, "c_row": n + 32}
    expected = (a.T if transposed else a).astype(np.float64) @ b[:, :n]
    before = c.copy()
    call(PRODUCT, **given, adds=1)
    np.testing.assert_allclose(c[:, :n], before[:, :n] + expected, rtol=0, atol=2e-5)
    call(PRODUCT, **given, adds=0)
    np.testing.assert_allclose(c[:, :n], expected, rtol=0, atol=2e-5)
    assert np.array_equal(c[:, n:], before[:, n:])  # nothing is written beyond


@pytest.mark.slow
def test_other_registers_have_another_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same products in code for a processor without AVX."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    code = f"""
import pytest
from waveform.kernels import product
assert product.ROWS == 6
raise SystemExit(pytest.main(["-q", "-n0", {__file__ + "::test_product"!r}]))
"""
    root = Path(__file__).parents[2]
    made = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def test_transpose() -> None:
    source = np.arange(32 * 50, dtype=np.float32).reshape(32, 50)
    target = np.zeros((48, 40), dtype=np.float32)
    call(TRANSPOSE, a=source, a_row=50, c=target, c_row=40, m=32, n=48)
    assert np.array_equal(target[:, :32], source[:, :48].T)
    assert not target[:, 32:].any()


def test_gelu_and_its_slope() -> None:
    x = torch.linspace(-6, 6, 160, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    a, out, grad = x.detach().float().numpy(), np.zeros(160, dtype=np.float32), np.full(160, 2, dtype=np.float32)
    call(GELU, a=a, b=grad, c=out, n=160)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(grad, 2 * slope.numpy(), rtol=0, atol=2e-6)
