"""Cuts a token set into B parallel streams of windows, with resets and an exact, resumable cursor.

Every rank advances the cursor of all rows (a few integers each) and reads tokens for its own rows only. So the order
of data depends on the seed alone, each rank knows the global number of scored tokens without asking the others,
and a run may resume on a different number of ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from waveform.engine.interface import begin_of_utterance
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import BaseTrainConfig, TrainConfig
from waveform.ranks.distributed import World
from waveform.system.errors import UserError
from waveform.system.ram import require_ram

# In RAM: an input, a target and whether it is scored; and the objects of a window (2.6 kB were measured).
_TOKEN_BYTES, _WINDOW_BYTES = 17, 2600


@dataclass(frozen=True)
class Window:
    """One window of this rank's rows."""

    inputs: Tensor  # [B, W] int64: the token before each target, or the begin-of-utterance id
    targets: Tensor  # [B, W] int64; 0 where not scored
    scored: Tensor  # [B, W] bool: false in padding, which comes last
    reset: Tensor  # [B] bool on the CPU: the row's state is reset before this window

    @property
    def whole(self) -> Tensor:
        """[B] bool: the rows without padding."""
        return self.scored[:, -1]


class Span(NamedTuple):
    """Tokens start..stop - 1 of one utterance, which a row reads at once."""

    utterance: int  # its index
    start: int
    stop: int
    begin: int | None  # the input before the first of them; None: the token before it


@dataclass(frozen=True)
class Chunk:
    """The windows of one optimiser step, or of a part of it if gradients accumulate."""

    windows: list[Window]
    spans: list[list[list[Span]]]  # what each of this rank's rows reads in each window, [windows][B]
    num_scored: int  # tokens, over all rows of all ranks
    num_whole: int  # rows without padding, over all windows and ranks


class _Cursor(msgspec.Struct):
    """The position of a stream."""

    mode: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    taken: Annotated[int, msgspec.Meta(ge=0)]  # items dealt in this epoch: utterances or chunks
    item: list[Annotated[int, msgspec.Meta(ge=-1)]]  # utterance that each row reads; -1: none
    start: list[Annotated[int, msgspec.Meta(ge=0)]]  # where in it, or in the row's part, the next window begins


def check_sizes(config: BaseTrainConfig, *, window: int, num_ranks: int) -> None:
    """Raises UserError if no stream can have these sizes, or if the RAM for the chunks of an update is lacking."""
    batch_size, chunk = config.batch_size, config.chunk
    if chunk % window:
        raise UserError(f"train.chunk={chunk} is not a multiple of the window, {window} tokens")
    if batch_size % num_ranks:
        raise UserError(f"train.batch_size={batch_size} is not a multiple of the number of processes, {num_ranks}")
    window_bytes = _WINDOW_BYTES + _TOKEN_BYTES * window * (batch_size // num_ranks)
    require_ram(
        config.update_period * (chunk // window) * window_bytes,
        what="the tokens of an update",
        remedy="lower train.batch_size, train.chunk or train.update_period",
    )


def span_of(tokens: TokenSet, index: int, start: int, *, window: int, bos: bool) -> Span:
    """At most `window` tokens of an utterance from `start` on; bos: they follow begin-of-utterance with its label."""
    begin = begin_of_utterance(tokens.vocab_size, tokens.label_numbers[index]) if bos else None
    return Span(index, start, min(start + window, tokens.lengths[index]), begin)


def read_window(
    tokens: TokenSet,
    rows: Sequence[Sequence[Span]],
    *,
    window: int,
    reset: Sequence[bool],
    first_scored: int | Sequence[int] = 0,
) -> Window:
    """The window in which each row reads its spans one after another, and the rest is padding.

    first_scored: the place in the window from which targets are scored, of each row or of all.
    """
    inputs, targets = np.zeros((2, len(rows), window), dtype=np.int64)
    lengths = np.zeros((len(rows), 1), dtype=np.int64)
    for row, spans in enumerate(rows):
        end = 0
        for index, start, stop, begin in spans:
            at, end = end, end + stop - start
            read = tokens.read(index, start=start - (begin is None), stop=stop)
            targets[row, at:end] = read[start - stop :]
            if begin is not None:
                inputs[row, at] = begin
                at += 1
            inputs[row, at:end] = read[:-1]
        lengths[row] = end
    places = np.arange(window)
    scored = (places >= np.asarray(first_scored)[..., None]) & (places < lengths)
    return Window(*map(torch.from_numpy, (inputs, targets, scored, np.array(reset, dtype=bool))))


class TokenStream:
    """Endless chunks from a token set.

    `utterance`: each row reads whole utterances, shuffled every epoch; state resets at the start of each, which falls
    on the start of a window (the last window of an utterance is padded, and the padding is not scored).
    `chunk`: each row reads single chunks, shuffled every epoch; state resets at each, and each begins with the
    begin-of-utterance input, as if it were an utterance of its own.
    `carry`: the utterances are joined in the order of their names and cut into one contiguous part per row, which is
    read again and again; state never resets, and nothing is padded. The usual choice for text.
    """

    def __init__(self, tokens: TokenSet, config: TrainConfig, *, window: int, seed: int, world: World) -> None:
        """config: its `state` is the mode. Raises UserError if the sizes do not fit each other."""
        check_sizes(config, window=window, num_ranks=world.size)
        batch_size, chunk, mode = config.batch_size, config.chunk, config.state
        if mode == "carry" and tokens.num_tokens < batch_size:
            raise UserError(f"{tokens.num_tokens} tokens are too few for {batch_size} rows; lower train.batch_size")
        self.tokens, self._batch_size, self._window, self._chunk = tokens, batch_size, window, chunk
        self._mode, self._seed = mode, seed
        rows_each = batch_size // world.size
        self._own_rows = slice(world.rank * rows_each, (world.rank + 1) * rows_each)
        # Place in each window from which targets are scored
        self._first_scored = min(window - 1, round((1 - config.loss_share) * window))
        self._label_dropout = config.label_dropout
        self._at = _Cursor(mode, 0, 0, [-1] * batch_size, [0] * batch_size)
        # How many items are dealt of each utterance: one (all of it), its chunks, or its tokens.
        dealt = {"utterance": [1] * len(tokens), "chunk": [-(-n // chunk) for n in tokens.lengths]}
        self._first = np.concatenate([[0], np.cumsum(dealt.get(mode, tokens.lengths))])
        self._part = [row * tokens.num_tokens // batch_size for row in range(batch_size + 1)]  # where it begins
        self._part_length = [stop - start for start, stop in pairwise(self._part)]
        self._order = self._shuffle()

    def _shuffle(self) -> np.ndarray:
        num_items = 0 if self._mode == "carry" else int(self._first[-1])
        return np.random.default_rng([self._seed, self._at.epoch]).permutation(num_items)

    def cursor(self) -> dict[str, Any]:
        """The stream's position as plain JSON values, the same on every rank."""
        return dict(msgspec.to_builtins(self._at))

    def seek(self, cursor: dict[str, Any]) -> None:
        """Continue exactly where `cursor()` was called. Raises UserError for a cursor that this stream cannot have."""
        try:
            at = msgspec.convert(cursor, _Cursor)
        except msgspec.ValidationError:
            at = None
        if at is None or not self._has(at):
            raise UserError(f"the checkpoint's position ({str(cursor)[:200]}) does not exist in this run's data")
        self._at = at
        self._order = self._shuffle()

    def _has(self, at: _Cursor) -> bool:
        """Whether every number of a cursor is within this stream's data."""
        lengths = self.tokens.lengths
        if at.mode != self._mode or not len(at.item) == len(at.start) == self._batch_size:
            return False
        if at.taken > len(self._order) or max(at.item) >= len(lengths):
            return False
        ends: Sequence[float] = self._part_length
        if self._mode != "carry":
            ends = [lengths[item] + self._chunk if item >= 0 else math.inf for item in at.item]
        return all(start < end for start, end in zip(at.start, ends, strict=True))

    @property
    def epoch(self) -> int:
        """Which pass over the data this is, from 0."""
        return self._at.epoch

    def next_chunk(self) -> Chunk:
        """The next `chunk` tokens of every row."""
        played, windows = self._play(), []
        own = [rows[self._own_rows] for rows in played]
        lengths = [sum(span.stop - span.start for span in spans) for rows in played for spans in rows]
        num_scored = sum(max(0, length - self._first_scored) for length in lengths)
        for rows in own:
            reset = [self._mode != "carry" and any(span.begin is not None for span in spans) for spans in rows]
            windows.append(
                read_window(self.tokens, rows, window=self._window, reset=reset, first_scored=self._first_scored)
            )
        return Chunk(windows, own, num_scored, lengths.count(self._window))

    def _play(self) -> list[list[list[Span]]]:
        """Advance by a chunk: the spans that every row of all ranks reads in each window."""
        num_windows = self._chunk // self._window
        if self._mode == "carry":
            return [self._play_parts() for _ in range(num_windows)]
        if self._mode == "chunk":
            self._at.item = [-1] * self._batch_size
        return [[self._play_item(row) for row in range(self._batch_size)] for _ in range(num_windows)]

    def _play_item(self, row: int) -> list[Span]:
        """One window of a row in the modes `utterance` and `chunk`."""
        at, lengths = self._at, self.tokens.lengths
        fresh = at.item[row] < 0
        if fresh:
            at.item[row], at.start[row] = self._take()
        index, start = at.item[row], at.start[row]
        if start >= lengths[index]:  # a chunk that ended with its utterance: the row is idle until the next one
            return []
        at.start[row] += self._window
        if self._mode == "utterance" and at.start[row] >= lengths[index]:
            at.item[row] = -1
        stop = min(start + self._window, lengths[index])
        return [Span(index, start, stop, self._begin(index, start) if fresh else None)]

    def _take(self) -> tuple[int, int]:
        """The next utterance or chunk: the index of its utterance, and where it starts in that."""
        at = self._at
        if at.taken == len(self._order):
            at.epoch, at.taken = at.epoch + 1, 0
            self._order = self._shuffle()
        at.taken += 1
        index, number = self._find(int(self._order[at.taken - 1]))
        return index, number * self._chunk

    def _find(self, number: int) -> tuple[int, int]:
        """The utterance that holds item (or token) `number`, and the item's place among those of the utterance."""
        index = int(np.searchsorted(self._first, number, side="right")) - 1
        return index, number - int(self._first[index])

    def _play_parts(self) -> list[list[Span]]:
        """One window of all rows in the mode `carry`; at the end of its part, a row begins the part again."""
        at, rows = self._at, []
        num_ended = (at.start[0] + self._window) // self._part_length[0]  # passes, by the first row
        for row, part_length in enumerate(self._part_length):
            spans, left = [], self._window
            while left:
                index, start = self._find(self._part[row] + at.start[row])
                length = min(left, self.tokens.lengths[index] - start, part_length - at.start[row])
                spans.append(Span(index, start, start + length, self._begin(index, start) if start == 0 else None))
                at.start[row] = (at.start[row] + length) % part_length
                left -= length
            rows.append(spans)
        at.epoch += num_ended
        return rows

    def _begin(self, index: int, start: int) -> int:
        """The input with which an utterance or chunk begins; the seed decides whose label is read as unknown."""
        label = self.tokens.label_numbers[index]
        if label and self._label_dropout:
            random = np.random.default_rng([self._seed, self._at.epoch, index, start])
            label *= random.random() >= self._label_dropout
        return begin_of_utterance(self.tokens.vocab_size, label)
