"""Draws tokens from a decoder: the distribution after temperature, top-k and top-p, and the loop that feeds it back.

On a GPU the loop is a CUDA graph of several steps with the draw inside, so that neither Python nor a transfer stands
between two tokens.

Shape letters: B streams, V classes, n steps.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from waveform.engine.interface import Decoder, DeviceDecoder
from waveform.system.errors import UserError

BLOCK_STEPS = 1024  # most steps of one call of `Drawing.draw`
GRAPH_STEPS = 16  # of a captured graph; divides the windows in use, so that single steps are few
_WARM_STEPS = 3  # taken before a capture, in which libraries set up what may not be set up within one
STEPS_TO_CAPTURE = _WARM_STEPS + GRAPH_STEPS + 1  # of a first call, after which all is captured
MAX_SEED = (1 << 43) - 1  # the sampler makes each stream's own 64-bit seed by multiplying it by a million


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int | None = None  # keep the k most probable classes
    top_p: float | None = None  # keep the fewest classes whose probabilities reach p (nucleus; Holtzman et al. 2019)
    seed: int = 0  # streams' generators are seeded by it and their number

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"seed is {self.seed}; it must be a whole number from 0 to {MAX_SEED}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; it must be above 0 and at most 1")


def probabilities(logits: Tensor, config: SamplingConfig) -> Tensor:
    """logits [B, V] -> the distribution [B, V] that is drawn from, after temperature, top-k and top-p."""
    if config.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    p = (logits if config.temperature == 1 else logits / config.temperature).softmax(dim=-1)
    if config.top_k is not None and config.top_k < p.shape[-1]:
        least = p.topk(config.top_k, dim=-1).values[:, -1:]
        p = torch.where(p >= least, p, 0)
        p = p / p.sum(dim=-1, keepdim=True)
    if config.top_p is not None and config.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True)
        # A class stays while the more probable ones have not reached p; so the first always stays.
        kept = torch.where(ordered.cumsum(dim=-1) - ordered < config.top_p, ordered, 0)
        p = torch.zeros_like(p).scatter(-1, order, kept)
    return p


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-transform sampling: p [B, V] (any positive sum), uniform [B] in [0, 1) -> classes [B]."""
    cumulative = p.cumsum(dim=-1)
    whole = cumulative[:, -1:].contiguous()
    threshold = (uniform[:, None] * whole).to(cumulative.dtype)
    chosen = torch.searchsorted(cumulative, threshold, right=True)
    last_possible = torch.searchsorted(cumulative, whole)  # rounding must not choose an impossible class
    return torch.minimum(chosen, last_possible)[:, 0]


class Drawing(Protocol):
    """Draws tokens from one decoder and feeds them back to it."""

    def draw(self, uniform: Tensor) -> Tensor:
        """uniform [n, B] in [0, 1), n up to BLOCK_STEPS, on the decoder's device -> tokens [n, B]."""
        ...


class StepwiseDrawing:
    """One call of the decoder a token."""

    def __init__(self, stepper: Decoder, tokens: Tensor, config: SamplingConfig) -> None:
        """tokens [B]: inputs of the first step."""
        self._stepper, self._tokens, self._config = stepper, tokens, config

    @torch.inference_mode()
    def draw(self, uniform: Tensor) -> Tensor:
        """As Drawing has it."""
        drawn = torch.empty(uniform.shape, dtype=torch.int64, device=uniform.device)
        for t in range(len(uniform)):
            logits = self._stepper.step(self._tokens).float()
            self._tokens = drawn[t] = draw(probabilities(logits, self._config), uniform[t])
        return drawn


Capture = Callable[[Callable[[], None]], Callable[[], None]]


def capture_cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """`work` as a CUDA graph, to be replayed by calling what is returned; nothing is carried out yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class CapturedDrawing:
    """Several tokens a call of the device: steps and draws on buffers that never move, captured once and replayed."""

    @torch.inference_mode()
    def __init__(
        self, stepper: DeviceDecoder, tokens: Tensor, config: SamplingConfig, *, capture: Capture = capture_cuda_graph
    ) -> None:
        """tokens [B]: inputs of the first step. capture: turns work on the device into something to be replayed."""
        self._stepper, self._config, self._capture = stepper, config, capture
        self._tokens = tokens.clone()
        self._uniform = torch.empty(BLOCK_STEPS, len(tokens), device=tokens.device)
        self._drawn = torch.empty(BLOCK_STEPS, len(tokens), dtype=torch.int64, device=tokens.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=tokens.device)  # row of both that is next
        self._warm_steps_left = _WARM_STEPS
        self._replays: dict[int, Callable[[], None]] = {}  # by number of steps

    @torch.inference_mode()
    def draw(self, uniform: Tensor) -> Tensor:
        """As Drawing has it."""
        self._uniform[: len(uniform)] = uniform
        self._place.zero_()
        left = len(uniform)
        while left:
            num_steps = GRAPH_STEPS if min(left, self._stepper.steps_to_host) >= GRAPH_STEPS else 1
            if self._warm_steps_left:
                self._warm_steps_left -= 1
                num_steps = 1
                self.device_steps(1)
            else:
                self._replay(num_steps)
            self._stepper.passed(num_steps)
            left -= num_steps
        return self._drawn[: len(uniform)].clone()

    def device_steps(self, num_steps: int) -> None:
        """What is captured: draw `num_steps` tokens and feed each back."""
        for _ in range(num_steps):
            logits = self._stepper.device_step(self._tokens).float()
            drawn = draw(probabilities(logits, self._config), self._uniform.index_select(0, self._place)[0])
            self._tokens.copy_(drawn)
            self._drawn.index_copy_(0, self._place, drawn[None])
            self._place += 1

    def _replay(self, num_steps: int) -> None:
        if num_steps not in self._replays:
            try:
                self._replays[num_steps] = self._capture(lambda: self.device_steps(num_steps))
            except RuntimeError as error:
                reason = f"no CUDA graph could be captured: {str(error).splitlines()[0]}"
                print(f"warning: sampling goes step by step, slower; {reason}", file=sys.stderr)
                self._replays[num_steps] = lambda: self.device_steps(num_steps)
        self._replays[num_steps]()


def drawing(stepper: Decoder, tokens: Tensor, config: SamplingConfig) -> Drawing:
    """The fastest way to draw from `stepper`, beginning with inputs `tokens` [B]."""
    if tokens.device.type == "cuda" and isinstance(stepper, DeviceDecoder):
        return CapturedDrawing(stepper, tokens, config)
    return StepwiseDrawing(stepper, tokens, config)
