"""One pass through a token set, window by window with carried state: the basis of every kind of evaluation.

The utterances are dealt in a given order, some of them side by side. Those begin together, so their rows are always
equally far: none waits for another to fill its memories, and what a row computes does not depend on what others hold.
A row whose utterance ends is dropped; with utterances in order of length the others soon follow. Or the utterances are
one stream, of one row, whose state never resets. What is done with the scores (summing them, training on them, looking
inside the model) is up to the caller, and so is whether gradients are enabled.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from waveform.engine.interface import SequenceModel, State, take_rows
from waveform.engine.scored_window import ScoredForward, ScoredWindow, score_window, uses_kernel_threads
from waveform.engine.state_ram import require_ram_for_state
from waveform.engine.streams import Window, read_window, span_of
from waveform.engine.token_set import TokenSet
from waveform.system.threads import torch_in_one_thread


@dataclass(frozen=True)
class DealtWindow:
    """One window of every row, and where it comes from."""

    window: Window
    utterances: list[int]  # index of the utterance that each row reads
    start: int  # place of the window's first token in every row's utterance
    rows: list[int] | None  # rows of the previous window that go on as these; None: all, or none at a first window


def deal(
    tokens: TokenSet, order: Sequence[int], *, window: int, rows: int | None, chunk: int | None = None
) -> Iterator[DealtWindow]:
    """Windows of the utterances `order`, each token once, at most `rows` utterances side by side.

    rows: None reads the utterances one after another, as one stream that resets at its start only. Its windows are cut
    where an utterance ends, because padding would enter the state, and at multiples of `window` in the stream, where a
    model's own windows end too. chunk: tokens between resets, a multiple of `window`; None: only at the start of
    utterances.
    """
    num_read = 0  # tokens of the one stream
    for first in range(0, len(order), rows or 1):
        utterances, kept, start = list(order[first : first + (rows or 1)]), None, 0
        while utterances:
            if rows is None:
                length = min(window - num_read % window, tokens.lengths[utterances[0]] - start)
                begins, reset = start == 0, num_read == 0
            else:
                length = window
                begins = reset = start == 0 or (chunk is not None and start % chunk == 0)
            spans = [[span_of(tokens, index, start, window=length, bos=begins)] for index in utterances]
            read = read_window(tokens, spans, window=length, reset=[reset] * len(utterances))
            yield DealtWindow(read, utterances, start, kept)
            start, num_read = start + length, num_read + length
            going_on = [row for row, utterance in enumerate(utterances) if tokens.lengths[utterance] > start]
            kept = going_on if len(going_on) < len(utterances) else None
            utterances = [utterances[row] for row in going_on]


def score_once(
    model: SequenceModel, windows: Iterable[DealtWindow], *, device: torch.device, autocast: torch.dtype | None = None
) -> Iterator[tuple[DealtWindow, ScoredWindow]]:
    """Score windows in their order, with state carried from each to the next.

    Raises UserError if the state of the rows does not fit this machine's RAM.
    """
    dtype = torch.float32 if autocast is not None else next(iter(model.parameters())).dtype
    scored_forward, in_kernels = ScoredForward(model), uses_kernel_threads(model, device=device, autocast=autocast)
    state: State = None
    for dealt in windows:
        if bool(dealt.window.reset.all()):
            if state is None:
                require_ram_for_state(model, len(dealt.utterances))
            state = model.init_state(len(dealt.utterances), device=device, dtype=dtype)
        elif dealt.rows is not None:
            state = take_rows(state, dealt.rows)
        with torch_in_one_thread() if in_kernels else nullcontext():
            scores = score_window(scored_forward, dealt.window, state, fresh=state, device=device, autocast=autocast)
        state = scores.state
        yield dealt, scores
