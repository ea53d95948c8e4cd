"""The most that this machine can do: the rates of a large matrix product and of reading memory.

They are measured again at each call, so that a busy moment affects limits and speeds alike.
"""

from collections.abc import Callable
from typing import Any

import torch

from waveform.benchmarks.timing import seconds
from waveform.models.linear import linear


def matrix_rate(device: torch.device, *, dtype: torch.dtype) -> Callable[[], float]:
    """Return a function that measures the FLOP/s of a product of square matrices."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(lambda: linear(a, b), 2 * size**3, device)  # by the library that models use


def memory_rate(device: torch.device) -> Callable[[], float]:
    """Return a function that measures the bytes/s that are read."""
    long = torch.ones(1 << 28 if device.type == "cuda" else 1 << 26, device=device)  # 1 GiB, 256 MiB
    return _rate(long.sum, long.nbytes, device)


def _rate(function: Callable[[], Any], amount: int, device: torch.device) -> Callable[[], float]:
    """Return a function that measures how much a second `function` does, each call of which does `amount`."""
    num_calls = 20 if device.type == "cuda" else 1

    def repeat() -> None:
        for _ in range(num_calls):
            function()

    repeat()  # loads libraries
    return lambda: num_calls * amount / seconds(repeat, device=device)
