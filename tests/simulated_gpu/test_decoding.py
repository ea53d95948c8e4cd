"""Sampling on a simulated GPU: whatever is due at a window's end, steps never wait for the device."""

from collections.abc import Iterator

import pytest
import torch

from tests import laws
from tests.simulated_gpu.device import SimulatedGpu, simulated_gpu, without_gpu
from waveform.engine import interface

pytestmark = without_gpu


@pytest.fixture(name="gpu")
def open_gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu:
        yield gpu


@pytest.mark.parametrize("case", laws.params(laws.WITH_DECODER))
def test_steps_never_wait(case: laws.Case, gpu: SimulatedGpu) -> None:
    model = case.build().eval().to("cuda")
    tokens = torch.zeros(2, dtype=torch.int64, device="cuda")
    with torch.inference_mode():
        decoder = interface.decoder(model, model.init_state(2, device="cuda", dtype=torch.float64))
        gpu.waits.clear()
        for _ in range(6 * case.window + 2):
            decoder.step(tokens)
    assert gpu.operations and not gpu.waits, gpu.waits
