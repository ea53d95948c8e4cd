"""Measures sampling with full memories: speed, compared with the least time in which a step's bytes can be read."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from waveform.benchmarks.timing import MAX_REPEATS, memory_rate, seconds, spread
from waveform.engine.cuda_graph import GRAPH_STEPS, STEPS_TO_CAPTURE, DeviceDecoder
from waveform.engine.drawing import DrawConfig
from waveform.engine.interface import Decoder, SequenceModel, State, decoder, optional_parts, take_rows

_STEPS_S = 0.3  # of sampling in one repeat
_MAX_STEPS = 1024  # in one repeat
_WARM_STEPS = {"cpu": 3, "cuda": STEPS_TO_CAPTURE}  # of a decoder, before it is timed


@torch.inference_mode()
def measure_sampling(
    model: SequenceModel, state: State, *, window: int, vocab_size: int, stream_counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Time drawing tokens from every decoder of `model`, for each number of streams side by side.

    state: with full memories, at the start of a window; every stream gets its first row. Whole windows are timed if
    that is quick. Otherwise steps are timed from the middle of the window, where an average number of window slots is
    in use, and the extra work of its end (compression, shifting memories), timed once, is spread over the window.
    """
    model_device = next(iter(model.parameters())).device
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(vocab_size, (1, window), generator=generator).to(model_device)
    state = take_rows(state, [0])
    midway = model.forward(inputs[:, : window // 2], state).state if window > 1 else state
    near_end = model.forward(inputs[:, : window - 2], state).state if window > 2 else state
    precisions = (False, True) if optional_parts(model).why_no_int8 is None else (False,)  # whether in int8
    measure_rate = memory_rate(model_device)
    cases = [
        _Sampler(model, midway, num_streams=n, int8=int8, window=window) for n in stream_counts for int8 in precisions
    ]
    memory_rates: list[float] = []
    for _ in range(MAX_REPEATS):  # interleaved, so that a busy moment affects all
        memory_rates.append(measure_rate())
        for case in cases:
            case.repeat()
    rate = spread(memory_rates)
    return [case.result(near_end, memory_rate=rate) for case in cases]


class _Sampler:
    """Times one decoder with one number of streams, `num_steps` at a time: whole windows if they are quick."""

    def __init__(self, model: SequenceModel, state: State, *, num_streams: int, int8: bool, window: int) -> None:
        self._model, self._num_streams, self._int8, self._window = model, num_streams, int8, window
        self._device = next(iter(model.parameters())).device
        self._tokens = torch.zeros(num_streams, dtype=torch.int64, device=self._device)
        self._stepper = self._decoder(state)
        self._step_s: list[float] = []
        warm_steps = _WARM_STEPS[self._device.type]
        self._draw(warm_steps)
        quick = int(min(_STEPS_S / self._draw(1), _MAX_STEPS))  # how many steps one repeat may take
        room = (window // 2 - warm_steps - 3) // MAX_REPEATS  # so that no repeat reaches the end of the window
        self._whole_windows = quick >= window
        self._num_steps = quick // window * window if self._whole_windows else max(1, min(room, quick))
        if not self._whole_windows and self._num_steps > GRAPH_STEPS:  # complete graphs, if steps are captured
            self._num_steps -= self._num_steps % GRAPH_STEPS

    def _decoder(self, state: State) -> Decoder:
        return decoder(self._model, take_rows(state, [0] * self._num_streams), int8=self._int8)

    def _draw(self, num_steps: int) -> float:
        """Draw, and return how many seconds that took."""
        uniform = torch.full((num_steps, self._num_streams), 0.5, device=self._device)
        return seconds(lambda: self._stepper.draw(self._tokens, uniform, DrawConfig()), device=self._device)

    def repeat(self) -> None:
        """Time `num_steps` steps."""
        self._step_s.append(self._draw(self._num_steps) / self._num_steps)

    def result(self, near_end: State, *, memory_rate: dict[str, float]) -> dict[str, Any]:
        """Return the figures; near_end: the state two steps before the end of a window."""
        stepper = self._decoder(near_end)
        stepper.step(self._tokens)
        if isinstance(stepper, DeviceDecoder):
            stepper.device_step(self._tokens)
            end_s, usual_s = seconds(lambda: stepper.advance(1), device=self._device), 0.0
        else:
            end_s = seconds(lambda: stepper.step(self._tokens), device=self._device)
            usual_s = statistics.median(self._step_s)
        extra_s = 0.0 if self._whole_windows else max(0.0, end_s - usual_s) / self._window
        per_second = spread([self._num_streams / (step_s + extra_s) for step_s in self._step_s])
        num_bytes = stepper.bytes_per_step
        bound_s = None if num_bytes is None else num_bytes / memory_rate["median"]
        return {
            "decoder": "int8" if self._int8 else "exact",
            "num_streams": self._num_streams,
            "samples_per_second": per_second,
            "steps_per_repeat": self._num_steps,
            "window_end_seconds": end_s,
            "bytes_per_step": num_bytes,
            "memory_bytes_per_second": memory_rate,
            "share_of_bound": None if bound_s is None else bound_s * per_second["median"] / self._num_streams,
        }
