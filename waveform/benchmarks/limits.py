"""The most that this machine can do: the rates of a large matrix product and of reading memory."""

from collections.abc import Callable
from typing import Any

import torch

from waveform.benchmarks.timing import seconds
from waveform.models.linear import linear


class Limits:
    """Rates, measured again at each call, so that a busy moment affects limits and speeds alike."""

    def __init__(self, device: torch.device, *, dtype: torch.dtype) -> None:
        """dtype: of the matrix product."""
        cuda = device.type == "cuda"
        self._device, self._calls = device, 20 if cuda else 1
        size = 8192 if cuda else 2048
        self._a, self._b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._long = torch.ones(1 << 28 if cuda else 1 << 26, device=device)  # 1 GiB, 256 MiB
        self.matrix_rate(), self.memory_rate()  # the first calls load libraries

    def matrix_rate(self) -> float:
        """Return the FLOP/s of a product of square matrices."""
        flops = 2 * self._a.shape[0] ** 3 * self._calls
        return flops / seconds(lambda: self._repeat(self._multiply), device=self._device)

    def memory_rate(self) -> float:
        """Return the bytes/s that are read."""
        read = self._long.numel() * self._long.element_size() * self._calls
        return read / seconds(lambda: self._repeat(self._long.sum), device=self._device)

    def _multiply(self) -> None:
        linear(self._a, self._b)  # by the library that models use

    def _repeat(self, function: Callable[[], Any]) -> None:
        for _ in range(self._calls):
            function()
