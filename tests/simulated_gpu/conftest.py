from collections.abc import Iterator

import pytest

from tests.simulated_gpu.device import SimulatedGpu, simulated_gpu


@pytest.fixture(name="gpu")
def open_gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu:
        yield gpu
