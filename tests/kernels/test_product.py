"""Compiled products against numpy's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from waveform.kernels.compiling import kernel
from waveform.kernels.product import product
from waveform.kernels.record import make_record


@kernel(entry=True)
def _product(plan):
    p = plan[0]
    product(p.a, p.a_row, p.a_step, p.b, p.b_row, p.c, p.c_row, p.m, p.n, p.k, p.adds != 0)


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
    _product(make_record({**given, "adds": 1}))
    np.testing.assert_allclose(c[:, :n], before[:, :n] + expected, rtol=0, atol=2e-5)
    _product(make_record({**given, "adds": 0}))
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
