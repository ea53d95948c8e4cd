"""Ancestral sampling from a model: priming, seeds, batches. How a token is drawn is in drawing.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from waveform.engine.drawing import BLOCK_STEPS, SamplingConfig, drawing
from waveform.engine.inputs import begin_of_utterance
from waveform.engine.interface import SequenceModel, State, decoder, take_rows

_PRIME_STEPS = 4096  # tokens of a prompt read at once


@torch.inference_mode()
def read_prompt(model: SequenceModel, prompt: Tensor, *, num_streams: int, vocab_size: int) -> tuple[State, Tensor]:
    """State after begin-of-utterance and all of `prompt` [n] but its last token, and the next input [B].

    The prompt is read once, for one row, and the rows are copied: which is faster, and gives every stream the same
    state whatever their number (matrix products of other sizes round otherwise).
    """
    parameter = next(iter(model.parameters()))
    device = parameter.device
    state = model.init_state(1, device=device, dtype=parameter.dtype)
    begin = torch.tensor([begin_of_utterance(vocab_size)], device=device)
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
    survives an interruption; then nothing is kept, so that memory does not grow with the length, and the result is
    [B, 0]. int8: compute with weights in 8 bits. Stream i draws from a generator seeded by
    (config.seed, i) alone; with a decoder that computes rows alike (every registered model's, in fp32 on a CPU), stream
    i does not depend on how many run beside it. Raises UserError for int8 with a model that has no such decoder.
    """
    state, tokens = read_prompt(
        model, torch.empty(0) if prompt is None else prompt, num_streams=num_streams, vocab_size=vocab_size
    )
    source = drawing(decoder(model, state, int8=int8), tokens, config)
    generators = [torch.Generator().manual_seed(config.seed * 1_000_003 + i) for i in range(num_streams)]
    made = torch.empty(num_streams, num_steps if on_block is None else 0, dtype=torch.int64)
    for begin in range(0, num_steps, BLOCK_STEPS):
        length = min(BLOCK_STEPS, num_steps - begin)
        uniform = torch.stack([torch.rand(length, generator=g) for g in generators], dim=1).to(tokens.device)
        block = source.draw(uniform).t().cpu()
        if on_block is None:
            made[:, begin : begin + length] = block
        else:
            on_block(block)
    return made
