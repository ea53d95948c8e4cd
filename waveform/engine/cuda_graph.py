"""Sampling as a CUDA graph of several steps, so that neither Python nor a transfer comes between two tokens.

Shape letters: B streams, V classes, n steps.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from waveform.engine.drawing import DrawConfig, choose
from waveform.engine.interface import Decoder

GRAPH_STEPS = 16  # steps of a captured graph; divides the usual windows, so that single steps are rare
_WARM_STEPS = 3  # taken before a capture, because libraries may not initialise during one
STEPS_TO_CAPTURE = _WARM_STEPS + GRAPH_STEPS + 1  # a first call of this many steps captures all that later ones need
_MAX_STEPS = 1024  # steps of one call of the loop


def capture_cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture `work` as a CUDA graph, without running it; calling the result replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class DeviceDecoder(Decoder):
    """A decoder that takes several steps without the host, so that a GPU replays them, and the draws, as one graph."""

    _loop: "CudaGraphLoop | None" = None

    @abstractmethod
    def device_step(self, tokens: Tensor) -> Tensor:
        """Like `step`, with operations on the device only, on tensors that never move in memory."""

    def advance(self, num_steps: int) -> None:
        """Count steps, at most `steps_to_host`, and do the host's work that is due after them."""

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        logits = self.device_step(tokens)
        self.advance(1)
        return logits

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniform: Tensor, config: DrawConfig) -> Tensor:
        if tokens.device.type != "cuda":
            return super().draw(tokens, uniform, config)
        if self._loop is None or self._loop.config != config:
            self._loop = CudaGraphLoop(self, config, num_rows=len(tokens), device=tokens.device)
        return self._loop.draw(tokens, uniform)


class CudaGraphLoop:
    """The loop of `Decoder.draw` on buffers that never move: captured once, then replayed, several tokens per call."""

    @torch.inference_mode()
    def __init__(self, stepper: DeviceDecoder, config: DrawConfig, *, num_rows: int, device: torch.device) -> None:
        self.config, self._stepper = config, stepper
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._uniform = torch.empty(_MAX_STEPS, num_rows, device=device)
        self._drawn = torch.empty(_MAX_STEPS, num_rows, dtype=torch.int64, device=device)
        self._next_row = torch.zeros(1, dtype=torch.int64, device=device)  # of both buffers
        self._warm_steps_left = _WARM_STEPS
        self._replays: dict[int, Callable[[], None]] = {}  # by number of steps

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniform: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        return torch.cat([self._draw(part) for part in uniform.split(_MAX_STEPS)])

    def _draw(self, uniform: Tensor) -> Tensor:
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
            drawn = choose(logits, self._uniform.index_select(0, self._next_row)[0], config=self.config)
            self._tokens.copy_(drawn)
            self._drawn.index_copy_(0, self._next_row, drawn[None])
            self._next_row += 1

    def _replay(self, num_steps: int) -> None:
        if num_steps not in self._replays:
            try:
                self._replays[num_steps] = capture_cuda_graph(lambda: self.device_steps(num_steps))
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                print(
                    f"warning: no CUDA graph could be captured ({reason}); sampling continues step by step, slower",
                    file=sys.stderr,
                )
                self._replays[num_steps] = lambda: self.device_steps(num_steps)
        self._replays[num_steps]()
