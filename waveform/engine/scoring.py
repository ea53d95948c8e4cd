"""Reads a token set window by window with carried state, and scores it: what evaluation of every kind is made of.

A token set is dealt to rows once, in a given order; a row that ends its utterance takes the next one. What is done
with the scores (summing them, training on them, looking inside the model) is the caller's, and so is the gradient
mode, which the reader takes as it finds it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from waveform.engine.interface import SequenceModel, State, Step, reset_rows, state_tensors, take_rows, to_device
from waveform.engine.shards import TokenSet
from waveform.engine.streams import Window, fill_row
from waveform.system.errors import UserError
from waveform.system.ram import machine_bytes


@dataclass(frozen=True)
class DealtWindow:
    """One window of every row, and what it is a window of."""

    window: Window
    utterances: list[int]  # index that each row plays; -1: none
    starts: list[int]  # place of the window's first token in its utterance
    rows: list[int] | None  # rows of the window before that go on as these; None: all of them


class ScoredWindow(NamedTuple):
    """What the model says of one window."""

    nll: Tensor  # [B, W] nats, meaningless where not scored
    scored: Tensor  # [B, W] bool, on the model's device
    state: State
    aux: Tensor  # auxiliary losses, summed over rows

    @property
    def nats(self) -> Tensor:
        """Sum of the NLL over scored tokens."""
        return torch.where(self.scored, self.nll, 0).sum()

    @property
    def row_nats(self) -> Tensor:
        """[B] sums of the NLL over each row's scored tokens, without gradient."""
        return torch.where(self.scored, self.nll.detach(), 0).sum(dim=1)


class _Inputs:
    """Arguments of a forward. An object of its own, because FSDP moves tensors that it sees among the arguments of its
    root to the GPU, and a state's counters belong on the CPU."""

    def __init__(self, tokens: Tensor, targets: Tensor, state: State) -> None:
        self.tokens, self.targets, self.state = tokens, targets, state


class ScoredForward(nn.Module):
    """A model and its head in one forward, because sharded weights are whole only within one."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: _Inputs) -> tuple[Tensor, Step]:
        """NLL in nats [B, T] of the targets, and what the model returned."""
        step = self.model.forward(inputs.tokens, inputs.state)
        return self.model.head.nll(step.hidden, inputs.targets), step


def score_window(
    scored_forward: ScoredForward,
    window: Window,
    state: State,
    *,
    fresh: State,
    device: torch.device,
    autocast: torch.dtype | None,
) -> ScoredWindow:
    """One forward pass: of training, with gradients enabled, and of evaluation, without.

    fresh: the state that rows to be reset get; autocast: dtype of matrix products, None for the parameters' own.
    """
    state = reset_rows(state, fresh, window.reset)
    inputs, targets, scored = (to_device(t, device) for t in (window.inputs, window.targets, window.scored))
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        nll, step = scored_forward(_Inputs(inputs, targets, state))
    aux = sum((loss.sum() for loss in step.aux_losses.values()), torch.zeros((), device=device))
    return ScoredWindow(nll, scored, step.state, aux)


def deal(
    tokens: TokenSet, order: Sequence[int], *, window: int, batch_size: int, chunk: int | None = None
) -> Iterator[DealtWindow]:
    """Windows of the utterances `order`, each token once, `batch_size` utterances side by side.

    chunk: tokens between resets, a multiple of `window`; None resets at the start of utterances only. Rows that find
    no further utterance stay idle, and are dropped once they are half of all.
    """
    rows = min(batch_size, max(len(order), 1))
    playing, start = [-1] * rows, [0] * rows
    pending = list(reversed(order))
    while pending or any(item >= 0 for item in playing):
        active = [row for row in range(rows) if playing[row] >= 0]
        kept = None
        if not pending and 0 < len(active) <= rows // 2:  # long utterances outlast the others
            playing, start, rows = [playing[row] for row in active], [start[row] for row in active], len(active)
            kept = active
        inputs = np.zeros((rows, window), dtype=np.int64)
        targets = np.zeros((rows, window), dtype=np.int64)
        lengths = np.zeros(rows, dtype=np.int64)
        reset = np.zeros(rows, dtype=bool)
        utterances, starts = list(playing), list(start)
        for row in range(rows):
            if playing[row] < 0:
                if not pending:
                    continue
                playing[row], start[row] = pending.pop(), 0
            index = utterances[row] = playing[row]
            starts[row] = start[row]
            reset[row] = start[row] == 0 or (chunk is not None and start[row] % chunk == 0)
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
        scored = np.arange(window) < lengths[:, None]
        yield DealtWindow(
            Window(*(torch.from_numpy(a) for a in (inputs, targets, scored, reset))), utterances, starts, kept
        )


def require_state_memory(model: SequenceModel, rows: int) -> None:
    """Raises UserError where the state of so many rows is more than the memory of this machine: sizes set too high."""
    try:
        state = model.init_state(rows, device=torch.device("meta"), dtype=torch.float32)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
    except RuntimeError as error:  # sizes beyond what torch can count
        raise UserError(f"the model's memories of {rows} rows are too large: {str(error).splitlines()[0]}") from error
    present = machine_bytes()
    if num_bytes > present:
        raise UserError(
            f"the model's memories of {rows} rows would take {num_bytes / 1e9:,.1f} GB, more than the "
            f"{present / 1e9:,.1f} GB of this machine; lower the batch size, model.window, model.memory or "
            "model.compressed"
        )


def read(
    model: SequenceModel,
    tokens: TokenSet,
    order: Sequence[int],
    *,
    window: int,
    batch_size: int,
    chunk: int | None = None,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Iterator[tuple[DealtWindow, ScoredWindow]]:
    """Score the windows that `deal` gives, one after the other, with state carried from each to the next."""
    dtype = torch.float32 if autocast is not None else next(iter(model.parameters())).dtype
    rows = min(batch_size, max(len(order), 1))
    require_state_memory(model, rows)
    state = fresh = model.init_state(rows, device=device, dtype=dtype)
    scored_forward = ScoredForward(model)
    for dealt in deal(tokens, order, window=window, batch_size=batch_size, chunk=chunk):
        if dealt.rows is not None:
            state, fresh = take_rows(state, dealt.rows), take_rows(fresh, dealt.rows)
        scores = score_window(scored_forward, dealt.window, state, fresh=fresh, device=device, autocast=autocast)
        state = scores.state
        yield dealt, scores
