"""How many rows are scored side by side: by the sizes of window, state and memory alone."""

import pytest
import torch

from tests import laws
from tests.engine.training import small_model
from waveform.engine import state_ram
from waveform.engine.interface import state_tensors
from waveform.engine.state_ram import fast_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_rows_fill_a_call_and_fit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, _ = small_model(name)
    row_bytes = sum(t.nbytes for t in state_tensors(model.init_state(1, device=CPU, dtype=torch.float32)))
    monkeypatch.setattr(state_ram, "machine_bytes", lambda: 64 << 30)
    assert [fast_rows(model, window=window, device=CPU) for window in (64, 100, 4096, 10_000)] == [64, 40, 1, 1]
    monkeypatch.setattr(state_ram, "machine_bytes", lambda: 8 * 5 * row_bytes)
    assert [fast_rows(model, window=window, device=CPU) for window in (64, 4096)] == [5, 1]
    monkeypatch.setattr(state_ram, "machine_bytes", lambda: 1)
    assert fast_rows(model, window=64, device=CPU) == 1
