"""How much a cached step saves: one decoder step against recomputing the window so far, at the paper's speech shape.

python -m tests.benchmarks.decoding [--json FILE]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from waveform.cpu import set_defaults
from waveform.engine.interface import decoder
from waveform.models.registry import build

_FULL = 4096  # windows read: every memory is full


def seconds(function: Callable[[], Any], *, repeats: int) -> float:
    """Median duration of a call."""
    durations = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


@torch.inference_mode()
def measure(*, repeats: int = 5, **fields: int) -> dict[str, Any]:
    """Time both in the middle of a window (a recomputation there costs about the mean over the window)."""
    torch.manual_seed(0)
    model = build("compressive_transformer", vocab_size=256, **fields)
    window = model.config.window
    empty = model.init_state(1, device="cpu", dtype=torch.float32)
    at_start = empty._replace(steps=empty.steps + _FULL * window)
    tokens = torch.randint(256, (1, window // 2))
    midway = model.forward(tokens[:, :-1], at_start).state
    stepper = decoder(model, midway)
    step_s, window_s = [], []
    for _ in range(repeats):  # in turn
        window_s.append(seconds(lambda: model.forward(tokens, at_start), repeats=1))
        step_s.append(seconds(lambda: stepper.step(tokens[:, -1]), repeats=10))
    step, whole = statistics.median(step_s), statistics.median(window_s)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "step_seconds": step,
        "recompute_seconds": whole,
        "ratio": whole / step,
        "steps_per_second": 1 / step,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }


def main() -> None:
    """Print, and write where asked, the measurement at the default (40M-parameter) shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_defaults()
    text = json.dumps(measure(), indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
