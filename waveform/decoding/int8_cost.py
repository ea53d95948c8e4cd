"""What int8 sampling (kernels/dense.py) costs: NLL of the same tokens with weights and cache in fp32 and in 8 bits.

Shape letters: B streams, n tokens of each.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from waveform.engine.drawing import DrawConfig, choose
from waveform.engine.interface import SequenceModel, begin_of_utterance, decoder, map_state
from waveform.engine.token_set import TokenSet

_STREAMS = 4
_READ_SECONDS, _SCORE_SECONDS = 1.5, 2.0
_READ_STEPS, _SCORE_STEPS = 2048, 1200  # per stream, at most; large models reach the seconds first


@dataclass(frozen=True)
class Int8Cost:
    """Mean NLL in nats of the same samples under both decoders."""

    fp32_nats: float
    int8_nats: float
    num_samples: int
    source: str  # where the samples come from

    def __str__(self) -> str:
        return (
            f"int8: NLL {self.fp32_nats:.4f} -> {self.int8_nats:.4f} nats ({self.int8_nats - self.fp32_nats:+.4f}) "
            f"on {self.num_samples:,} samples {self.source}"
        )


@torch.inference_mode()
def int8_cost(model: SequenceModel, split: TokenSet | None, *, vocab_size: int, window: int) -> Int8Cost:
    """Score samples of the validation split step by step with both decoders, for a few seconds.

    The tokens before them are read first, `window` at a time. Without a split, or if it is too short, the fp32 decoder
    samples the tokens as it goes. Raises UserError for a model without an int8 decoder.
    """
    device = next(iter(model.parameters())).device
    tokens = None if split is None else middles(split)
    state = model.init_state(_STREAMS if tokens is None else len(tokens), device=device, dtype=torch.float32)
    position = 0
    inputs = torch.full((_STREAMS,), begin_of_utterance(vocab_size), device=device)
    if tokens is not None:
        tokens = tokens.to(device)
        inputs, began = tokens[:, 0], time.perf_counter()
        while position + window <= tokens.shape[1] // 2 and time.perf_counter() - began < _READ_SECONDS:
            state = model.forward(tokens[:, position : position + window], state).state
            position += window
            inputs = tokens[:, position]
    fp32 = decoder(model, map_state(torch.clone, state))
    int8 = decoder(model, state, int8=True)
    generator = torch.Generator().manual_seed(0)
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    steps = _SCORE_STEPS if tokens is None else min(_SCORE_STEPS, tokens.shape[1] - position - 1)
    began = float("inf")
    for step in range(steps):
        both = torch.stack([fp32.step(inputs), int8.step(inputs)]).float()
        if step == 0:
            began = time.perf_counter()  # the first step may have waited for the compiler
        position += 1
        if tokens is not None:
            inputs = tokens[:, position]
        else:
            inputs = choose(both[0], torch.rand(_STREAMS, generator=generator), config=DrawConfig())
        sums -= both.log_softmax(dim=-1).gather(2, inputs.expand(2, -1)[..., None]).sum(dim=(1, 2)).double().cpu()
        count += len(inputs)
        if time.perf_counter() - began > _SCORE_SECONDS:
            break
    fp32_nats, int8_nats = (sums / count).tolist()
    source = "that the fp32 model sampled" if tokens is None else "of the validation split"
    return Int8Cost(fp32_nats, int8_nats, count, source)


def middles(split: TokenSet) -> Tensor | None:
    """The middles [B, n] of the longest utterances, because recordings begin and end in silence; None if too short."""
    longest = sorted(range(len(split)), key=lambda i: -split.lengths[i])[:_STREAMS]
    length = min([_READ_STEPS + _SCORE_STEPS + 1, *(split.lengths[i] for i in longest)])
    if not longest or length < 3:  # two are needed to score one, and one may be read before
        return None
    starts = {i: (split.lengths[i] - length) // 2 for i in longest}
    rows = [split.read(i, start=start, stop=start + length).astype("int64") for i, start in starts.items()]
    return torch.stack([torch.from_numpy(row) for row in rows])
