"""Ancestral sampling, one token a step from a model's decoder: temperature, top-k, top-p, seeds, priming, batches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from waveform.engine.errors import UserError
from waveform.engine.interface import SequenceModel, State, decoder, take_rows

_BLOCK_STEPS = 1024  # steps between two calls of `on_block`
_PRIME_STEPS = 4096  # tokens of a prompt read at once


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int | None = None  # keep the k most probable classes
    top_p: float | None = None  # keep the fewest classes whose probabilities reach p (nucleus; Holtzman et al. 2019)
    seed: int = 0

    def __post_init__(self) -> None:
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


@torch.inference_mode()
def read_prompt(model: SequenceModel, prompt: Tensor, *, num_streams: int, vocab_size: int) -> tuple[State, Tensor]:
    """State after begin-of-utterance and all of `prompt` [n] but its last token, and the next input [B].

    The prompt is read once, for one row, and the rows are copied: which is faster, and gives every stream the same
    state whatever their number (matrix products of other sizes round otherwise).
    """
    parameter = next(iter(model.parameters()))
    device = parameter.device
    state = model.init_state(1, device=device, dtype=parameter.dtype)
    begin = torch.full((1,), vocab_size, dtype=torch.int64, device=device)
    inputs = torch.cat([begin, prompt.to(device=device, dtype=torch.int64)])
    for part in inputs[:-1].split(_PRIME_STEPS):
        if len(part):
            state = model.forward(part[None], state).state
    return take_rows(state, [0] * num_streams), inputs[-1:].repeat(num_streams)


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
    int8: bool = False,
) -> Tensor:
    """Draw `num_steps` tokens of each of `num_streams` streams -> [B, num_steps] int64 on the CPU.

    prompt [n]: tokens that every stream continues. on_block gets [B, n] tokens as they come, so that what was made
    survives an interruption. int8: compute with weights in 8 bits. Stream i draws from a generator seeded by
    (config.seed, i) alone; with a decoder that computes rows alike (every registered model's, in fp32 on a CPU), stream
    i does not depend on how many run beside it. Raises UserError for int8 with a model that has no such decoder.
    """
    state, tokens = read_prompt(
        model, torch.empty(0) if prompt is None else prompt, num_streams=num_streams, vocab_size=vocab_size
    )
    stepper = decoder(model, state, int8=int8)
    generators = [torch.Generator().manual_seed(config.seed * 1_000_003 + i) for i in range(num_streams)]
    made = torch.empty(num_streams, num_steps, dtype=torch.int64)
    for begin in range(0, num_steps, _BLOCK_STEPS):
        length = min(_BLOCK_STEPS, num_steps - begin)
        uniform = torch.stack([torch.rand(length, generator=g) for g in generators], dim=1).to(tokens.device)
        block = torch.empty(length, num_streams, dtype=torch.int64, device=tokens.device)
        for t in range(length):
            logits = stepper.step(tokens).float()
            tokens = block[t] = draw(probabilities(logits, config), uniform[t])
        made[:, begin : begin + length] = block.t().cpu()
        if on_block is not None:
            on_block(made[:, begin : begin + length])
    return made
