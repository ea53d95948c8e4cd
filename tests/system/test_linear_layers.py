"""Linear layers by oneDNN against torch's own: output and every gradient, and when they are taken."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from waveform.system import linear_layers as module
from waveform.system.linear_layers import LIBRARIES, Linear, linear

M, K, N = 40, 48, 32

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN; on x86, pip's has"
)


@pytest.fixture(name="calls", autouse=True)
def take_onednn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """oneDNN is taken, for any size; returns the inputs that it was given."""
    calls, real = [], module._onednn
    monkeypatch.setattr(module, "taken", "onednn")
    monkeypatch.setattr(module, "_MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(module, "_onednn", lambda x, *rest: calls.append(x) or real(x, *rest))
    return calls


INPUTS = {
    "rows": lambda: torch.randn(M, K),
    "a batch": lambda: torch.randn(2, M, K),
    "with gaps": lambda: torch.randn(2, M, 2 * K)[..., :K],
    "time first": lambda: torch.randn(M, 2, K).transpose(0, 1),
}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_equal_to_torch(name: str, has_bias: bool, calls: list[Tensor]) -> None:
    torch.manual_seed(0)
    given = [INPUTS[name](), torch.randn(N, K), *([torch.randn(N)] if has_bias else [])]
    for tensor in given:
        tensor.requires_grad_()
    out, expected = linear(*given), F.linear(*given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(*out.shape[:-1], 2 * N)[..., ::2]
    found, wanted = (torch.autograd.grad(x, given, grad) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert len(calls) == 3  # the output and two gradients


def test_computes_only_gradients_that_are_asked_for(calls: list[Tensor]) -> None:
    x, weight = torch.randn(M, K), torch.randn(N, K, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is not None and len(calls) == 2


def test_what_is_not_of_fp32_is_left_to_torch(calls: list[Tensor]) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        Linear(K, N).to(dtype)(torch.randn(M, K, dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Linear(K, N)(torch.randn(M, K)).dtype == torch.bfloat16
    assert not calls


def test_modes_see_every_product(calls: list[Tensor]) -> None:
    with FlopCounterMode(display=False) as counter:
        Linear(K, N)(torch.randn(M, K)).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * M * K * N
    assert not calls


def test_torch_makes_small_products_or_all_if_it_is_taken(calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_MULTIPLICATIONS", M * K * N + 1)
    Linear(K, N)(torch.randn(M, K))
    assert not calls
    Linear(K, N)(torch.randn(M + 1, K))
    assert len(calls) == 1
    monkeypatch.setattr(module, "taken", "torch")  # then all are
    Linear(K, N)(torch.randn(M + 1, K))
    assert len(calls) == 1


def test_onednn_is_timed(calls: list[Tensor]) -> None:
    for library, num_calls in zip(LIBRARIES, (0, 3), strict=True):
        module._calls()[library]()
        assert len(calls) == num_calls
