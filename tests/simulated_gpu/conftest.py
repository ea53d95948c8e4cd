from collections.abc import Iterator

import pytest

from tests.simulated_gpu.device import OnGpu, SimulatedGpu, simulated_gpu
from waveform.engine import interface


@pytest.fixture(name="gpu")
def open_gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu:
        yield gpu


@pytest.fixture
def no_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU refuses fp64, and is known to, as Apple's."""
    monkeypatch.setattr(OnGpu, "has_fp64", False)
    monkeypatch.setattr(interface, "WITHOUT_FP64", {"cuda"})
