"""Measures training with full memories: speed, FLOPs as a share of the matrix rate, operations, peak memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from waveform.benchmarks.flops import counted_flops, model_flops
from waveform.benchmarks.timing import MAX_REPEATS, enough, matrix_rate, seconds, spread
from waveform.engine.interface import SequenceModel, State, state_tensors
from waveform.engine.token_learner import TokenLearner
from waveform.system.machine import peak_resident_bytes

UPDATES_NEEDED = MAX_REPEATS + 3  # the most chunks of each row that `measure_training` reads
_MAX_WINDOWS = 64  # read until memories are full
# Torch's and oneDNN's operations, calls of our kernels (waveform/kernels/), and of torch.compile's graphs.
_OPERATIONS = ("aten::", "mkldnn::", "waveform::", "## Call CompiledFxGraph")


@torch.no_grad()
def fill_memories(model: SequenceModel, state: State, *, window: int, vocab_size: int) -> tuple[State, int]:
    """Read windows of random tokens until memories are full: until two consecutive windows cost the same FLOPs.

    Returns the state and the number of windows read. A window that attends to more slots costs more, so equal costs
    mean that no memory grew (a model that always reads all slots, full or not, stops after two windows).
    """
    parameter = next(iter(model.parameters()))
    batch_size = state_tensors(state)[0].shape[0]
    generator = torch.Generator().manual_seed(0)
    costs: list[int] = []
    while len(costs) < _MAX_WINDOWS and (len(costs) < 2 or costs[-1] != costs[-2]):
        tokens = torch.randint(vocab_size, (batch_size, window), generator=generator).to(parameter.device)
        with FlopCounterMode(display=False) as counter:
            state = model.forward(tokens, state).state
        costs.append(counter.get_total_flops())
    return state, len(costs)


def measure_training(learner: TokenLearner) -> dict[str, Any]:
    """Time `learner.update` with full memories; leave `learner.state` at the start of a window, with full memories.

    Every row of the learner's stream must stay in its first utterance for `UPDATES_NEEDED` chunks. Peak memory is
    that of two updates (during the second, the optimiser's moments exist as well as the activations).
    """
    device, config, window = learner.world.device, learner.config, learner.window
    autocast = config.autocast(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    learner.stream.next_chunk()  # the first one, which resets all rows
    learner.module.train()
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        learner.state, num_windows = fill_memories(
            learner.model, learner.state, window=window, vocab_size=learner.stream.tokens.vocab_size
        )
        tokens = torch.zeros(config.batch_size // learner.world.size, window, dtype=torch.int64, device=device)
        useful = model_flops(learner.model, tokens, learner.state)
    executed = counted_flops(learner.update)
    update_s = [seconds(learner.update, device=device)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
    measure_rate = matrix_rate(device, dtype=autocast or torch.float32)
    matrix_rates = [measure_rate()]
    while not enough(update_s):
        update_s.append(seconds(learner.update, device=device))
        matrix_rates.append(measure_rate())
    tokens_per_update = tokens.shape[0] * config.chunk
    flops_per_token = useful / tokens.numel()
    speed, rate = spread([tokens_per_update / s for s in update_s]), spread(matrix_rates)
    return {
        "tokens_per_second": speed,
        "seconds_per_update": spread(update_s),
        "profile": profile_update(learner.update),
        "tokens_per_update": tokens_per_update,
        "model_flops_per_token": flops_per_token,
        "executed_flops_per_token": executed / tokens_per_update,
        "matrix_flops_per_second": rate,
        "model_flop_utilisation": speed["median"] * flops_per_token / rate["median"],
        "windows_read_before": num_windows,
        "peak_bytes": peak,
    }


def profile_update(update: Callable[[], Any]) -> dict[str, float]:
    """Call `update` once under torch's profiler; return its operations, the time in them and the time between them.

    Operations that another operation calls do not count. On a GPU the time in them is what the host needs to launch
    them. The time between is Python's, autograd's and the profiler's own, about a microsecond per operation.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        whole_s = seconds(update, device=torch.device("cpu"))  # without waiting for a GPU
    operations = [event for event in recorded.events() if _is_operation(event) and not _within_operation(event)]
    inside_s = 1e-6 * sum(event.time_range.elapsed_us() for event in operations)
    return {
        "num_operations": len(operations),
        "seconds_in_operations": inside_s,
        "seconds_between_operations": max(0.0, whole_s - inside_s),
    }


def _is_operation(event: FunctionEvent) -> bool:
    return event.name.startswith(_OPERATIONS)


def _within_operation(event: FunctionEvent) -> bool:
    caller = event.cpu_parent
    return caller is not None and (_is_operation(caller) or _within_operation(caller))
