"""Dropout's masks: their share and scale, what is saved with the random numbers, and gradients."""

import pytest
import torch
from torch import nn

from waveform.models.dropout import Dropout


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_share_and_scale(share: float) -> None:
    torch.manual_seed(0)
    dropped = Dropout(share)(torch.ones(1001, 997))
    kept = dropped != 0
    assert kept.float().mean().item() == pytest.approx(1 - share, abs=2e-3)
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - share)), rtol=2e-4, atol=0)


def test_values_are_dropped_independently() -> None:
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(100_000, 8)) != 0).double()
    torch.testing.assert_close(torch.corrcoef(kept.T), torch.eye(8, dtype=torch.float64), atol=0.015, rtol=0)


def test_the_seed_says_what_is_dropped() -> None:
    x, found = torch.randn(3, 5), []
    for _ in range(2):
        torch.manual_seed(7)
        found.append([Dropout(0.5)(x) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


def test_gradients_have_the_mask() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 7, requires_grad=True)
    dropped = Dropout(0.4)(x)
    dropped.sum().backward()
    assert torch.equal(x.grad != 0, dropped != 0) and x.grad.unique().numel() == 2


def test_evaluation_and_no_share_change_nothing() -> None:
    x = torch.randn(4, 4)
    assert Dropout(0.0)(x) is x and Dropout(0.5).eval()(x) is x


@pytest.mark.parametrize("share", [1e-7, 1 - 1e-7])
def test_extreme_shares_are_finite(share: float) -> None:
    assert Dropout(share)(torch.ones(1000)).isfinite().all()


def test_it_is_torchs_own_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", lambda module, x: "torch's")
    assert Dropout(0.5)(torch.empty(3, device="meta")) == "torch's"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert Dropout(0.5)(torch.ones(3)) == "torch's"
