"""Times repeated work, and the most that this machine can do: the rates of a large matrix product and of memory.

torch.utils.benchmark would make two more calls to warm up, and time all repeats of one thing before the next; but calls
here change state, and things that are compared take turns. Limits are measured again at each call, so that a busy
moment affects limits and speeds alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from waveform.system.linear_layers import linear

MAX_REPEATS = 7
_MIN_REPEATS = 3
_REPEATS_S = 5.0  # of timing, once there are _MIN_REPEATS


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, min, max and number of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def seconds(function: Callable[[], Any], *, device: torch.device) -> float:
    """Return the wall-clock time of a call, including what it leaves queued on a GPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def enough(durations_s: Sequence[float]) -> bool:
    """Whether these repeats suffice."""
    return len(durations_s) >= MAX_REPEATS or (len(durations_s) >= _MIN_REPEATS and sum(durations_s) >= _REPEATS_S)


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
    """Return a function that measures how much `function`, which does `amount` in a call, does per second."""
    num_calls = 20 if device.type == "cuda" else 1

    def repeat() -> None:
        for _ in range(num_calls):
            function()

    repeat()  # loads libraries
    return lambda: num_calls * amount / seconds(repeat, device=device)
