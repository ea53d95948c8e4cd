"""Ancestral sampling from a model: prompt, seeds, and the loop over blocks of tokens, each drawn as in drawing.py.

Shape letters: B streams, n steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from waveform.engine.drawing import DrawConfig
from waveform.engine.interface import (
    SequenceModel,
    State,
    begin_of_utterance,
    decoder,
    for_drawing,
    map_state,
    take_rows,
)
from waveform.engine.labels import UNKNOWN
from waveform.engine.state_ram import require_ram_for_state
from waveform.system.errors import UserError
from waveform.system.ram import require_ram

MAX_SEED = (1 << 43) - 1  # a stream's seed is a million times as large, and must fit 64 bits
_BLOCK_STEPS = 1024  # steps that are drawn before their tokens are handed on
_PROMPT_STEPS = 4096  # tokens of a prompt read in one call


@dataclass(frozen=True)
class SamplingConfig(DrawConfig):
    """How streams are sampled."""

    seed: int = 0  # stream i's generator is seeded by (seed, i)
    first_stream: int = 0  # number of the first stream, so that several calls can share the work of one
    int8: bool = False  # compute with weights, and what is remembered, in 8 bits: faster on a CPU

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"seed is {self.seed}; it must be a whole number from 0 to {MAX_SEED}")


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
    receives [B, n] tokens as they are drawn, so that an interruption does not lose them; they are not kept here then,
    so use of RAM does not grow with the length, and the result is [B, 0]. Stream i draws from a generator seeded by
    (config.seed, i) alone; with a decoder that computes rows alike (that of every registered model, in fp32 on a CPU),
    it does not depend on the number of streams. Raises UserError for more than this machine's RAM can hold, and for
    int8 with a model that has no int8 decoder.
    """
    require_ram_for_state(model, num_streams)
    model = for_drawing(model)
    made_shape = (num_streams, num_steps if on_block is None else 0)
    require_ram(8 * math.prod(made_shape), what=f"{num_streams} x {num_steps} tokens", remedy="ask for fewer")
    state, tokens = read_prompt(
        model,
        torch.empty(0) if prompt is None else prompt,
        labels=[UNKNOWN] * num_streams if labels is None else labels,
        vocab_size=vocab_size,
    )
    stepper = decoder(model, state, int8=config.int8)
    numbers = range(config.first_stream, config.first_stream + num_streams)
    generators = [torch.Generator().manual_seed(config.seed * 1_000_003 + i) for i in numbers]
    made = torch.empty(made_shape, dtype=torch.int64)
    for begin in range(0, num_steps, _BLOCK_STEPS):
        length = min(_BLOCK_STEPS, num_steps - begin)
        uniform = torch.stack([torch.rand(length, generator=g) for g in generators], dim=1).to(tokens.device)
        drawn = stepper.draw(tokens, uniform, config)
        tokens, block = drawn[-1], drawn.t().cpu()
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
