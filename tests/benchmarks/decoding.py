"""How fast streams are sampled on this CPU by each kind of decoder (`waveform bench` has the bound beside it).

python -m tests.benchmarks.decoding [--json FILE]
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baselines.wavenet_cached import WaveNetDecoder
from waveform.benchmarks.timing import seconds
from waveform.decoding.cached import CachedDecoder
from waveform.engine.interface import Decoder, State, decoder, map_state
from waveform.models.memory import CompressiveState
from waveform.models.registry import build
from waveform.runs.configured_model import num_parameters
from waveform.system.cpu import set_defaults

_FULL = 4096  # windows read, so that every memory is full
_ATTENTION = {"num_layers": 4, "d_model": 64, "num_heads": 4, "num_position_features": 24, "window": 64}
_CONVOLUTIONS = {"num_stacks": 2, "layers_per_stack": 9, "kernel_size": 3}
_DEMO = {
    "compressive_transformer": {**_ATTENTION, "d_feedforward": 256, "memory": 64, "compressed": 32},
    "transformer_xl": {**_ATTENTION, "d_feedforward": 384, "memory": 96},
    "wavenet": {**_CONVOLUTIONS, "residual_channels": 32, "gate_channels": 32, "skip_channels": 64},
}


def _step_seconds(stepper: Decoder, tokens: torch.Tensor, num_steps: int) -> float:
    """Duration of one of several steps."""
    return seconds(lambda: [stepper.step(tokens) for _ in range(num_steps)], device=torch.device("cpu")) / num_steps


def _midway(model: Any, batch_size: int) -> State:
    """A state in the middle of a window, with full memories, of noise: their content does not affect the speed."""
    state = model.init_state(batch_size, device="cpu", dtype=torch.float32)
    state = map_state(lambda t: torch.randn_like(t) if t.is_floating_point() else t, state)
    if isinstance(state.trunk, CompressiveState):
        steps = state.trunk.steps + _FULL * model.config.window + model.config.window // 2
        state = state._replace(trunk=state.trunk._replace(steps=steps))
    return state


def _eager(model: Any, state: State) -> Decoder:
    """The decoder made of torch's operations, for fp64 and GPUs."""
    return (CachedDecoder if isinstance(state.trunk, CompressiveState) else WaveNetDecoder)(model, state)


_KINDS: dict[str, Callable[..., Decoder]] = {"eager": _eager, "fp32": decoder, "int8": partial(decoder, int8=True)}


@torch.inference_mode()
def measure(*, repeats: int = 5, **fields: int) -> dict[str, Any]:
    """Time a step in the middle of a window against recomputing the window so far, at the default (40M) shape."""
    torch.manual_seed(0)
    model = build("compressive_transformer", vocab_size=256, **fields)
    window = model.config.window
    empty = model.init_state(1, device="cpu", dtype=torch.float32)
    at_start = empty._replace(trunk=empty.trunk._replace(steps=empty.trunk.steps + _FULL * window))
    tokens = torch.randint(256, (1, window // 2))
    stepper = decoder(model, model.forward(tokens[:, :-1], at_start).state)
    stepper.step(tokens[:, -1])  # compiles
    step_s, window_s = [], []
    for _ in range(repeats):  # in turn
        window_s.append(seconds(lambda: model.forward(tokens, at_start), device=tokens.device))
        step_s.append(_step_seconds(stepper, tokens[:, -1], 10))
    step, whole = statistics.median(step_s), statistics.median(window_s)
    figures = {"step_seconds": step, "recompute_seconds": whole, "ratio": whole / step}
    return {"num_parameters": num_parameters(model), **figures}


@torch.inference_mode()
def measure_steps(name: str, *, batch_size: int, num_steps: int, rounds: int = 5, **fields: int) -> dict[str, Any]:
    """Samples per second (of all streams together) of each decoder, measured in turn, with the ends of windows."""
    torch.manual_seed(0)
    model = build(name, vocab_size=256, **fields)
    tokens = torch.randint(256, (batch_size,))
    steppers = {kind: make(model, _midway(model, batch_size)) for kind, make in _KINDS.items()}
    durations: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for stepper in steppers.values():
        stepper.step(tokens)
    for _ in range(rounds):
        for kind, stepper in steppers.items():
            durations[kind].append(_step_seconds(stepper, tokens, num_steps))
    result: dict[str, Any] = {"model": name, "batch_size": batch_size}
    for kind, stepper in steppers.items():
        step = statistics.median(durations[kind])
        result[kind] = {"samples_per_second": round(batch_size / step, 1), "step_seconds": step}
        if (num_bytes := stepper.bytes_per_step) is not None:
            result[kind] |= {"megabytes_per_step": num_bytes / 1e6, "gigabytes_per_second": num_bytes / step / 1e9}
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_defaults()
    large = [measure_steps("compressive_transformer", batch_size=b, num_steps=n) for b, n in ((1, 24), (4, 8))]
    large.append(measure_steps("wavenet", batch_size=1, num_steps=24))
    demo = [measure_steps(name, batch_size=b, num_steps=640 // b, **_DEMO[name]) for name in _DEMO for b in (1, 4, 16)]
    result = {
        **measure(),
        "paper_sizes": large,
        "demo_sizes": demo,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
