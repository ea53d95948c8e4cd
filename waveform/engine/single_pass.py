"""One pass through a token set, window by window with carried state: what evaluation of every kind is made of.

A token set is dealt to rows once, in a given order; a row that ends its utterance takes the next one. What is done
with the scores (summing them, training on them, looking inside the model) is up to the caller, and so is whether
gradients are enabled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from waveform.engine.interface import SequenceModel, take_rows
from waveform.engine.scored_window import ScoredForward, ScoredWindow, score_window
from waveform.engine.state_ram import require_ram_for_state
from waveform.engine.streams import Window, fill_row
from waveform.engine.token_set import TokenSet


@dataclass(frozen=True)
class DealtWindow:
    """One window of every row, and where it comes from."""

    window: Window
    utterances: list[int]  # index of the utterance that each row reads; -1: none
    starts: list[int]  # place of the window's first token in its utterance
    rows: list[int] | None  # rows of the previous window that continue as these; None: all of them


def deal(
    tokens: TokenSet, order: Sequence[int], *, window: int, batch_size: int, chunk: int | None = None
) -> Iterator[DealtWindow]:
    """Windows of the utterances `order`, each token once, `batch_size` utterances side by side.

    chunk: tokens between resets, a multiple of `window`; None: only at the start of utterances. Rows for which no
    utterance is left stay idle, and are dropped once they are half of all rows.
    """
    rows = min(batch_size, max(len(order), 1))
    playing, start = [-1] * rows, [0] * rows
    pending = list(reversed(order))
    while pending or any(item >= 0 for item in playing):
        active = [row for row in range(rows) if playing[row] >= 0]
        kept = None
        if not pending and 0 < len(active) <= rows // 2:  # long utterances outlast the rest
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


def score_once(
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
    """Score the windows of `deal` in their order, with state carried from each to the next."""
    dtype = torch.float32 if autocast is not None else next(iter(model.parameters())).dtype
    rows = min(batch_size, max(len(order), 1))
    require_ram_for_state(model, rows)
    state = fresh = model.init_state(rows, device=device, dtype=dtype)
    scored_forward = ScoredForward(model)
    for dealt in deal(tokens, order, window=window, batch_size=batch_size, chunk=chunk):
        if dealt.rows is not None:
            state, fresh = take_rows(state, dealt.rows), take_rows(fresh, dealt.rows)
        scores = score_window(scored_forward, dealt.window, state, fresh=fresh, device=device, autocast=autocast)
        state = scores.state
        yield dealt, scores
