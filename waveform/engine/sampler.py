"""Ancestral sampling from a model: prompt, seeds, the distribution after temperature and truncation, and the loop.

Shape letters: B streams, V classes, n steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from waveform.engine.cuda_graph import CudaGraphLoop
from waveform.engine.inputs import begin_of_utterance
from waveform.engine.interface import (
    Decoder,
    DeviceDecoder,
    DrawingDecoder,
    SequenceModel,
    State,
    decoder,
    map_state,
    take_rows,
)
from waveform.engine.labels import UNKNOWN
from waveform.engine.state_ram import require_ram_for_state
from waveform.system.errors import UserError
from waveform.system.ram import require_ram

BLOCK_STEPS = 1024  # most steps of one call of `SamplingLoop.draw`
MAX_SEED = (1 << 43) - 1  # a stream's 64-bit seed is this times a million
LARGEST_WEIGHT = 2**40  # of a class, in `weights`: sums of 8 million fit into 64 bits
_CALL_STEPS = 64  # of a decoder that draws by itself: Ctrl-C waits for the end of a call
_PROMPT_STEPS = 4096  # tokens of a prompt read in one call


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = 1.0  # 0 takes the most probable token
    # Keep the k most probable classes, or the fewest whose probabilities reach p (nucleus; Holtzman et al. 2019); and
    # any others exactly as probable as the last of them.
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0  # stream i's generator is seeded by (seed, i)
    int8: bool = False  # compute with weights, and what is remembered, in 8 bits: faster on a CPU

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"seed is {self.seed}; it must be a whole number from 0 to {MAX_SEED}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; it must be above 0 and at most 1")


@torch.inference_mode()
def sample(
    model: SequenceModel,
    *,
    vocab_size: int,
    num_streams: int,
    num_steps: int,
    config: SamplingConfig,
    prompt: Tensor | None = None,
    on_block: Callable[[Tensor], None] | None = None,
    labels: Sequence[int] | None = None,
) -> Tensor:
    """Draw `num_steps` tokens of each of `num_streams` streams -> [B, num_steps] int64 on the CPU.

    prompt [n]: tokens that every stream continues. labels [B]: numbers of the streams' labels; None: unknown. on_block
    receives [B, n] tokens as they are drawn, so that an interruption does not lose them; they are not kept as well, so
    that use of RAM does not grow with the length, and the result is [B, 0]. Stream i draws from a generator seeded by
    (config.seed, i) alone; with a decoder that computes rows alike (that of every registered model, in fp32 on a CPU),
    it does not depend on the number of streams. Raises UserError for more than this machine's RAM can hold, and for
    int8 with a model that has no int8 decoder.
    """
    require_ram_for_state(model, num_streams)
    made_shape = (num_streams, num_steps if on_block is None else 0)
    require_ram(8 * math.prod(made_shape), what=f"{num_streams} x {num_steps} tokens", remedy="ask for fewer")
    state, tokens = read_prompt(
        model,
        torch.empty(0) if prompt is None else prompt,
        labels=[UNKNOWN] * num_streams if labels is None else labels,
        vocab_size=vocab_size,
    )
    loop = sampling_loop(decoder(model, state, int8=config.int8), tokens, config)
    generators = [torch.Generator().manual_seed(config.seed * 1_000_003 + i) for i in range(num_streams)]
    made = torch.empty(made_shape, dtype=torch.int64)
    for begin in range(0, num_steps, BLOCK_STEPS):
        length = min(BLOCK_STEPS, num_steps - begin)
        uniform = torch.stack([torch.rand(length, generator=g) for g in generators], dim=1).to(tokens.device)
        block = loop.draw(uniform).t().cpu()
        if on_block is None:
            made[:, begin : begin + length] = block
        else:
            on_block(block)
    return made


@torch.inference_mode()
def read_prompt(
    model: SequenceModel, prompt: Tensor, *, labels: Sequence[int], vocab_size: int
) -> tuple[State, Tensor]:
    """State after begin-of-utterance and all of `prompt` [n] but its last token, and the next input [B].

    One row of each of the `labels` [B] reads the prompt and is copied: faster, and every stream gets the same state
    whatever their number (matrix products of different sizes round differently).
    """
    parameter = next(iter(model.parameters()))
    device = parameter.device
    prompt = prompt.to(device=device, dtype=torch.int64)
    distinct = sorted(set(labels))
    read = []
    for label in distinct:
        state = model.init_state(1, device=device, dtype=parameter.dtype)
        begin = torch.tensor([begin_of_utterance(vocab_size, label)], device=device)
        inputs = torch.cat([begin, prompt])
        for part in inputs[:-1].split(_PROMPT_STEPS):
            if len(part):
                state = model.forward(part[None], state).state
        read.append((state, inputs[-1:]))
    rows = [distinct.index(label) for label in labels]
    state = map_state(lambda *parts: torch.cat(parts), *(state for state, _ in read))
    return take_rows(state, rows), torch.cat([last for _, last in read])[rows]


class SamplingLoop(Protocol):
    """Draws tokens from one decoder and feeds them back to it."""

    def draw(self, uniform: Tensor) -> Tensor:
        """uniform [n, B] in [0, 1), n up to BLOCK_STEPS, on the decoder's device -> tokens [n, B]."""
        ...


def sampling_loop(stepper: Decoder, tokens: Tensor, config: SamplingConfig) -> SamplingLoop:
    """The fastest loop for `stepper`, beginning with inputs `tokens` [B]."""
    if tokens.device.type == "cuda" and isinstance(stepper, DeviceDecoder):
        return CudaGraphLoop(stepper, tokens, partial(choose, config=config), max_steps=BLOCK_STEPS)
    if isinstance(stepper, DrawingDecoder):
        return DrawingLoop(stepper, tokens, config)
    return StepwiseLoop(stepper, tokens, config)


class DrawingLoop:
    """Many tokens per call of a decoder that draws by itself."""

    def __init__(self, stepper: DrawingDecoder, tokens: Tensor, config: SamplingConfig) -> None:
        """tokens [B]: inputs of the first step."""
        self._stepper, self._tokens, self._config = stepper, tokens, config

    @torch.inference_mode()
    def draw(self, uniform: Tensor) -> Tensor:
        """As `SamplingLoop.draw`."""
        config, drawn = self._config, []
        while len(uniform):
            now, uniform = uniform.tensor_split([min(self._stepper.steps_to_host, _CALL_STEPS)])
            tokens = self._stepper.draw(
                self._tokens, now, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
            )
            self._tokens = tokens[-1]
            drawn.append(tokens)
        return torch.cat(drawn)


class StepwiseLoop:
    """One call of the decoder per token."""

    def __init__(self, stepper: Decoder, tokens: Tensor, config: SamplingConfig) -> None:
        """tokens [B]: inputs of the first step."""
        self._stepper, self._tokens, self._config = stepper, tokens, config

    @torch.inference_mode()
    def draw(self, uniform: Tensor) -> Tensor:
        """As `SamplingLoop.draw`."""
        drawn = torch.empty(uniform.shape, dtype=torch.int64, device=uniform.device)
        for t in range(len(uniform)):
            self._tokens = drawn[t] = choose(self._stepper.step(self._tokens), uniform[t], config=self._config)
        return drawn


def choose(logits: Tensor, uniform: Tensor, *, config: SamplingConfig) -> Tensor:
    """logits [B, V], uniform [B] fp32 in [0, 1) -> the next tokens [B].

    This defines the draw for every decoder. One that draws by itself computes the same, in its own way.
    """
    if config.temperature == 0:
        return logits.argmax(dim=-1)
    return draw(weights(logits, config), uniform)


def weights(logits: Tensor, config: SamplingConfig) -> Tensor:
    """logits [B, V] -> what classes are drawn in proportion to [B, V], int64, after temperature, top-k and top-p.

    The most probable class weighs 2^40, and one that is 2^40 times less probable nothing. Whole numbers have the same
    sum in every order, so two programs that draw differ only if rounding of an exponential in fp64 makes a weight
    differ by 1: in about one draw of 10^13. (With probabilities in fp32 it is one of 10^6.)
    """
    logits = logits.float()
    peak = logits.amax(dim=-1, keepdim=True)

    def weigh(x: Tensor) -> Tensor:
        return (x - peak).double().div_(config.temperature).exp_().mul_(LARGEST_WEIGHT).long()

    w = weigh(logits)
    num_kept = min(config.top_k or logits.shape[-1], logits.shape[-1])
    if num_kept < logits.shape[-1] or config.top_p is not None:
        ordered = logits.topk(num_kept, dim=-1).values
        w = torch.where(logits >= ordered[:, -1:], w, 0)
        if config.top_p is not None:
            wanted = (w.sum(dim=-1, keepdim=True).double() * config.top_p).ceil().long()
            last = torch.searchsorted(weigh(ordered).cumsum(dim=-1), wanted).clamp(max=num_kept - 1)
            w = torch.where(logits >= ordered.gather(-1, last), w, 0)
    return w


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverse transform: weights [B, V], uniform [B] fp32 in [0, 1) -> classes [B]; none that weighs 0."""
    cumulative = weights.cumsum(dim=-1)
    threshold = (uniform[:, None].double() * cumulative[:, -1:]).long()
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
