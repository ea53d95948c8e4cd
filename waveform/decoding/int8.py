"""What int8 sampling costs: NLL of the same tokens with weights and cache in fp32 and in 8 bits."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from waveform.engine.inputs import begin_of_utterance
from waveform.engine.interface import decoder, map_state
from waveform.engine.sampler import SamplingConfig, choose
from waveform.engine.shards import is_dataset, read_dataset
from waveform.speech import Run
from waveform.system.errors import UserError

_STREAMS = 4
_READ_SECONDS, _SCORE_SECONDS = 1.5, 2.0
_READ_STEPS, _SCORE_STEPS = 2048, 1200  # of a stream, at most; large models stop at the seconds


@dataclass(frozen=True)
class QuantisationLoss:
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
def quantisation_loss(run: Run) -> QuantisationLoss:
    """Score validation samples step by step with both decoders, after reading what precedes them: a few seconds.

    Where the data set is gone or too short, the fp32 decoder samples the tokens as it goes. Raises UserError for a
    model without an int8 decoder.
    """
    vocab_size = int(run.config["dataset"]["vocab_size"])
    tokens = _validation_tokens(run)
    state = run.model.init_state(_STREAMS if tokens is None else len(tokens), device=run.device, dtype=torch.float32)
    position = 0
    inputs = torch.full((_STREAMS,), begin_of_utterance(vocab_size), device=run.device)
    if tokens is not None:
        inputs, began = tokens[:, 0], time.perf_counter()
        while position + run.window <= tokens.shape[1] // 2 and time.perf_counter() - began < _READ_SECONDS:
            state = run.model.forward(tokens[:, position : position + run.window], state).state
            position += run.window
            inputs = tokens[:, position]
    fp32 = decoder(run.model, map_state(torch.clone, state))
    int8 = decoder(run.model, state, int8=True)
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
            inputs = choose(both[0], torch.rand(_STREAMS, generator=generator), config=SamplingConfig())
        sums -= both.log_softmax(dim=-1).gather(2, inputs.expand(2, -1)[..., None]).sum(dim=(1, 2)).double().cpu()
        count += len(inputs)
        if time.perf_counter() - began > _SCORE_SECONDS:
            break
    fp32_nats, int8_nats = (sums / count).tolist()
    source = "that the fp32 model sampled" if tokens is None else "of the validation split"
    return QuantisationLoss(fp32_nats, int8_nats, count, source)


def _validation_tokens(run: Run) -> Tensor | None:
    """Stretches [B, n] of the longest validation utterances of the run's data set; None where there are none."""
    folder = Path(run.config["dataset"]["path"])
    try:
        valid = read_dataset(folder).open_split("valid") if is_dataset(folder) else None
    except UserError:  # damaged; sampling needs none of it
        return None
    if valid is None or not len(valid):
        return None
    longest = sorted(range(len(valid)), key=lambda i: -valid.lengths[i])[:_STREAMS]
    length = min(_READ_STEPS + _SCORE_STEPS + 1, valid.lengths[longest[-1]])
    if length < 2:
        return None
    # From their middles: recordings begin and end in silence.
    rows = []
    for i in longest:
        start = (valid.lengths[i] - length) // 2
        rows.append(torch.from_numpy(valid.read(i, start=start, stop=start + length).astype("int64")))
    return torch.stack(rows).to(run.device)
