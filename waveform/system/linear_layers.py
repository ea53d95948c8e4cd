"""Linear layers, by the library that multiplies matrices faster on this processor; the choice is timed once and kept.

On a CPU torch multiplies fp32 matrices with MKL, which on a Zen 5 reaches less than half of what oneDNN does, which
torch brings too; on an Intel Xeon MKL is the faster one (results/notes.md), and a processor's name does not tell. They
differ in rounding: a training records what it took, and takes the same again (engine/resume_notes.py).

Shape letters: M rows, K features in, N features out.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.system.atomic import write_file
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.machine import cpu_name
from waveform.system.threads import torch_in_one_thread

LIBRARIES = ("torch", "onednn")  # the first is taken if nothing is timed
SETTING = "WAVEFORM_TIMED_WAYS"  # 0 in the environment: nothing is timed, or read from disk
PRODUCTS = "products"  # what the choice is called, on disk and in checkpoints
_MIN_MULTIPLICATIONS = 1 << 22  # those of a product below which oneDNN takes longer to begin than it saves
_MIN_GAIN = 1.05  # how many times faster oneDNN must be; less may be noise
_TURNS = 9

taken: str | None = None  # the library that this process takes; None: not decided yet


class Linear(nn.Linear):
    """torch's linear layer, with the faster library's matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x [..., K] -> x @ weight^T + bias, [..., N]."""
    if _takes_onednn(x, num_multiplications=x.numel() * len(weight_NK)):
        return _OneDnnLinear.apply(x, weight_NK, bias_N)
    return F.linear(x, weight_NK, bias_N)


def _takes_onednn(x: Tensor, *, num_multiplications: int) -> bool:
    return (
        num_multiplications >= _MIN_MULTIPLICATIONS
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()  # a FLOP counter would not know the operation
        and fastest_library() == "onednn"
    )


def _onednn(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    # What torch's compiler makes of a linear layer.
    return torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight_NK), bias_N, "none", [], "")


def _dense(x: Tensor) -> Tensor:
    """`x`, or a copy if there are gaps between its rows, which oneDNN multiplies by a reference 1,000 times as slow."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _onednn(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_MN = grad.flatten(0, -2)
        return (
            _onednn(grad, weight_NK.t()) if needs_x else None,
            _onednn(grad_MN.t(), x.flatten(0, -2).t()) if needs_weight else None,
            grad_MN.sum(dim=0) if needs_bias else None,
        )


def fastest_library() -> str:
    """The library to use. At the first use on a machine both are timed, which a line on stderr reports."""
    global taken
    if taken is None:
        if os.environ.get(SETTING) == "0":
            return LIBRARIES[0]
        taken = _find()
    return taken


def _find() -> str:
    file = _file()
    table: dict[str, dict[str, str]] = {}  # processor and versions -> what was chosen
    with suppress(OSError, msgspec.MsgspecError):  # nothing if it cannot be read, or was not written here
        table = msgspec.json.decode(b"" if file is None else file.read_bytes(), type=dict[str, dict[str, str]])
    instructions, numba = torch.backends.cpu.get_cpu_capability(), version("numba")
    kept = table.setdefault(f"{cpu_name()}, {instructions}, torch {torch.__version__}, numba {numba}", {})
    if kept.get(PRODUCTS) in LIBRARIES:
        return kept[PRODUCTS]
    seconds = _time()
    best = min(seconds, key=seconds.__getitem__)
    if seconds[LIBRARIES[0]] < _MIN_GAIN * seconds[best]:
        best = LIBRARIES[0]
    if os.environ.get("RANK", "0") == "0":
        figures = ", ".join(f"{library} {1000 * each:.1f} ms" for library, each in seconds.items())
        say(f"matrix products by {best} here, timed once: {figures} ({SETTING}=0 turns this off)", sys.stderr)
    kept[PRODUCTS] = best
    if file is not None:
        with suppress(UserError):  # the next process times again
            write_file(file, msgspec.json.format(msgspec.json.encode(table)) + b"\n")
    return best


def _file() -> Path | None:
    """A file in the folder in which numba keeps what it compiles; None if no such folder can be written to."""
    import numba  # here: it takes a while

    try:
        return Path(numba.njit(cache=True)(_file).stats.cache_path) / "fastest_ways.json"
    except RuntimeError:
        return None


def _time() -> dict[str, float]:
    """Seconds that each library takes: medians of calls in turn, by the clock of this thread, whatever else runs."""
    with torch_in_one_thread(), torch.inference_mode(False), torch.enable_grad():  # the clock counts no other thread
        calls = _calls()
        seconds: dict[str, list[float]] = {library: [] for library in calls}
        for turn in range(1 + _TURNS):
            for library, call in calls.items():
                began = time.thread_time()
                call()
                if turn:  # the first one loads libraries
                    seconds[library].append(time.thread_time() - began)
    return {library: statistics.median(each) for library, each in seconds.items()}


def _calls() -> dict[str, Callable[[], object]]:
    """A layer of a 40M model and its gradient, by each library that is available."""
    x, weight = torch.ones(768, 384, requires_grad=True), torch.ones(1536, 384, requires_grad=True)

    def by(layer: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x, weight, None).sum(), (x, weight))

    calls = {"torch": by(F.linear)}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        calls["onednn"] = by(_OneDnnLinear.apply)
    return calls
