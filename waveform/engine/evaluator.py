"""NLL of a token set with carried state: sums and counts for each utterance, divided only at the end."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from waveform.engine.distributed import World
from waveform.engine.errors import UserError
from waveform.engine.interface import SequenceModel, reset_rows, take_rows
from waveform.engine.metrics import bits
from waveform.engine.progress import Progress
from waveform.engine.shards import TokenSet
from waveform.engine.streams import fill_row

PROTOCOLS = ("utterance", "chunk")


@dataclass(frozen=True)
class Evaluation:
    """NLL of every utterance of a set, in the set's order."""

    names: list[str]
    nats: np.ndarray  # [N] fp64: sum over the utterance's tokens
    counts: np.ndarray  # [N] int64: tokens
    protocol: str  # utterance: state carried from the utterance's start; chunk: reset at each chunk
    class_nats: np.ndarray | None = None  # [K] fp64: sum over the tokens of each class, where classes were given
    class_counts: np.ndarray | None = None  # [K] int64: tokens of each class

    @property
    def nats_per_token(self) -> float:
        return float(self.nats.sum() / self.counts.sum())

    @property
    def bits_per_token(self) -> float:
        return bits(self.nats_per_token)


@torch.inference_mode()
def evaluate(
    model: SequenceModel,
    tokens: TokenSet,
    *,
    window: int,
    batch_size: int,
    protocol: str = "utterance",
    chunk: int | None = None,
    world: World | None = None,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
    max_tokens: int | None = None,
    classes: Tensor | None = None,
) -> Evaluation:
    """Score every token of `tokens` once.

    window: tokens of one call; batch_size: rows on this rank; chunk: tokens between resets under `protocol=chunk`, a
    multiple of `window`; autocast: dtype of matrix products, None for the parameters' own; max_tokens: stop dealing
    utterances (longest first) after about that many, for a quick look; classes [V]: the class, from 0, of each token
    id, to sum NLL by class as well. Each rank scores every world.size-th
    utterance, and all get the whole result. Raises UserError for a protocol or chunk that does not exist.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol {protocol!r} does not exist; choose one of {', '.join(PROTOCOLS)}")
    if protocol == "chunk" and (chunk is None or chunk % window):
        raise UserError(f"protocol=chunk needs a chunk that is a multiple of the window, {window}; it is {chunk}")
    world = world or World()
    nats = torch.zeros(len(tokens), dtype=torch.float64)
    counts = torch.zeros(len(tokens), dtype=torch.int64)
    # Longest first, so that rows finish together.
    queue = sorted(range(len(tokens)), key=lambda i: (-tokens.lengths[i], i))
    if max_tokens is not None:
        total = np.cumsum([tokens.lengths[i] for i in queue])
        queue = queue[: int(np.searchsorted(total, max_tokens)) + 1]
    queue = queue[world.rank :: world.size]
    num_classes = 0 if classes is None else int(classes.max()) + 1
    class_nats = torch.zeros(num_classes, dtype=torch.float64, device=world.device)
    class_counts = torch.zeros(num_classes, dtype=torch.int64, device=world.device)
    rows = min(batch_size, max(len(queue), 1))
    device = world.device
    dtype = torch.float32 if autocast is not None else next(iter(model.parameters())).dtype
    fresh = model.init_state(rows, device=device, dtype=dtype)
    state = fresh
    playing = [-1] * rows
    start = [0] * rows
    pending = list(reversed(queue))
    while pending or any(item >= 0 for item in playing):
        active = [row for row in range(rows) if playing[row] >= 0]
        if not pending and 0 < len(active) <= rows // 2:  # long utterances outlast the others: drop the idle rows
            state, fresh = take_rows(state, active), take_rows(fresh, active)
            playing, start, rows = [playing[row] for row in active], [start[row] for row in active], len(active)
        inputs = np.zeros((rows, window), dtype=np.int64)
        targets = np.zeros((rows, window), dtype=np.int64)
        lengths = np.zeros(rows, dtype=np.int64)
        reset = np.zeros(rows, dtype=bool)
        owner = list(playing)
        for row in range(rows):
            if playing[row] < 0:
                if not pending:
                    continue
                playing[row], start[row] = pending.pop(), 0
            index = owner[row] = playing[row]
            reset[row] = start[row] == 0 or (protocol == "chunk" and start[row] % (chunk or 1) == 0)
            lengths[row] = fill_row(
                tokens,
                index,
                start=start[row],
                window=window,
                bos=bool(reset[row]),
                inputs=inputs[row],
                targets=targets[row],
            )
            start[row] += window
            if start[row] >= tokens.lengths[index]:
                playing[row] = -1
        state = reset_rows(state, fresh, torch.from_numpy(reset))
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            step = model.forward(torch.from_numpy(inputs).to(device), state)
            nll = model.head.nll(step.hidden, torch.from_numpy(targets).to(device))
        state = step.state
        scored = torch.arange(window) < torch.from_numpy(lengths)[:, None]
        sums = torch.where(scored.to(device), nll, 0).double().sum(dim=1).cpu()
        if classes is not None:
            of_token = classes[torch.from_numpy(targets)[scored]].to(device)
            class_nats.index_add_(0, of_token, nll[scored.to(device)].double())
            class_counts += torch.bincount(of_token, minlength=num_classes)
        for row in range(rows):
            if lengths[row]:
                nats[owner[row]] += sums[row]
                counts[owner[row]] += int(lengths[row])
        if progress is not None:
            progress.update(int(lengths.sum()))
    nats = world.sum_(nats.to(device)).cpu()
    counts = world.sum_(counts.to(device)).cpu()
    assert max_tokens is not None or counts.tolist() == tokens.lengths, "a token was scored twice or not at all"
    result = Evaluation(list(tokens.names), nats.numpy(), counts.numpy(), protocol)
    if classes is None:
        return result
    by_class = (world.sum_(class_nats).cpu().numpy(), world.sum_(class_counts).cpu().numpy())
    return replace(result, class_nats=by_class[0], class_counts=by_class[1])
