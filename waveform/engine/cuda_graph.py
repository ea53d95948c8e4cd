"""The sampling loop as a CUDA graph of several steps, so that neither Python nor a transfer comes between two tokens.

Shape letters: B streams, V classes, n steps.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from waveform.engine.interface import DeviceDecoder

GRAPH_STEPS = 16  # steps of a captured graph; divides the usual windows, so that single steps are rare
_WARM_STEPS = 3  # taken before a capture, because libraries may not initialise during one
STEPS_TO_CAPTURE = _WARM_STEPS + GRAPH_STEPS + 1  # a first call of this many steps captures all that later ones need

Capture = Callable[[Callable[[], None]], Callable[[], None]]


def capture_cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture `work` as a CUDA graph, without running it; calling the result replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class CudaGraphLoop:
    """A sampling loop on buffers that never move: captured once, then replayed, several tokens per call."""

    @torch.inference_mode()
    def __init__(
        self,
        stepper: DeviceDecoder,
        tokens: Tensor,
        choose: Callable[[Tensor, Tensor], Tensor],
        *,
        max_steps: int,
        capture: Capture = capture_cuda_graph,
    ) -> None:
        """tokens [B]: inputs of the first step. choose: logits [B, V], uniform [B] -> tokens [B]; max_steps: of a call.

        capture: turns work on the device into something to replay.
        """
        self._stepper, self._choose, self._capture = stepper, choose, capture
        self._tokens = tokens.clone()
        self._uniform = torch.empty(max_steps, len(tokens), device=tokens.device)
        self._drawn = torch.empty(max_steps, len(tokens), dtype=torch.int64, device=tokens.device)
        self._next_row = torch.zeros(1, dtype=torch.int64, device=tokens.device)  # of both
        self._warm_steps_left = _WARM_STEPS
        self._replays: dict[int, Callable[[], None]] = {}  # by number of steps

    @torch.inference_mode()
    def draw(self, uniform: Tensor) -> Tensor:
        """uniform [n, B] in [0, 1), n up to `max_steps` -> tokens [n, B]."""
        self._uniform[: len(uniform)] = uniform
        self._next_row.zero_()
        left = len(uniform)
        while left:
            num_steps = GRAPH_STEPS if min(left, self._stepper.steps_to_host) >= GRAPH_STEPS else 1
            if self._warm_steps_left:
                self._warm_steps_left -= 1
                num_steps = 1
                self.device_steps(1)
            else:
                self._replay(num_steps)
            self._stepper.advance(num_steps)
            left -= num_steps
        return self._drawn[: len(uniform)].clone()

    def device_steps(self, num_steps: int) -> None:
        """What is captured: draw `num_steps` tokens and feed each back."""
        for _ in range(num_steps):
            logits = self._stepper.device_step(self._tokens)
            drawn = self._choose(logits, self._uniform.index_select(0, self._next_row)[0])
            self._tokens.copy_(drawn)
            self._drawn.index_copy_(0, self._next_row, drawn[None])
            self._next_row += 1

    def _replay(self, num_steps: int) -> None:
        if num_steps not in self._replays:
            try:
                self._replays[num_steps] = self._capture(lambda: self.device_steps(num_steps))
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                print(
                    f"warning: no CUDA graph could be captured ({reason}); sampling continues step by step, slower",
                    file=sys.stderr,
                )
                self._replays[num_steps] = lambda: self.device_steps(num_steps)
        self._replays[num_steps]()
