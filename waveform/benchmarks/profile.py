"""Takes one training update apart: how many operations it is, and how much of its time is spent between them."""

import time
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# Torch's and oneDNN's operations, calls of our kernels (waveform/models/compiled_*.py), and of torch.compile's graphs.
_OPERATIONS = ("aten::", "mkldnn::", "waveform::", "## Call CompiledFxGraph")


def profile_update(update: Callable[[], Any]) -> dict[str, float]:
    """Call `update` once under torch's profiler; return its operations, the time in them and the time between them.

    Operations that another operation calls do not count. On a GPU the time in them is what the host needs to launch
    them. The time between is Python's, autograd's and the profiler's own, about a microsecond an operation.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = time.perf_counter()
        update()
        whole_s = time.perf_counter() - began
    operations = [event for event in recorded.events() if _is_outermost_operation(event)]
    inside_s = 1e-6 * sum(event.time_range.elapsed_us() for event in operations)
    return {
        "num_operations": len(operations),
        "seconds_in_operations": inside_s,
        "seconds_between_operations": max(0.0, whole_s - inside_s),
    }


def _is_outermost_operation(event: FunctionEvent) -> bool:
    if not event.name.startswith(_OPERATIONS):
        return False
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_OPERATIONS):
            return False
        parent = parent.cpu_parent
    return True
