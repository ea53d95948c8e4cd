"""Cuts a token set into B parallel streams of windows, with resets and an exact, resumable cursor.

Every rank advances the cursor of all rows (a few integers each) and reads tokens for its own rows only. So the order
of data depends on the seed alone, each rank knows the global number of scored tokens without asking the others,
and a run may resume on a different number of ranks.
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from waveform.engine.inputs import begin_of_utterance
from waveform.engine.token_set import TokenSet
from waveform.system.errors import UserError
from waveform.system.ram import require_ram

MODES = ("utterance", "chunk", "carry")
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


@dataclass(frozen=True)
class Chunk:
    """The windows of one optimiser step, or of a part of it if gradients accumulate."""

    windows: list[Window]
    num_scored: int  # tokens, over all rows of all ranks
    num_whole: int  # rows without padding, over all windows and ranks


class Place(NamedTuple):
    """Tokens that one row read at once."""

    row: int  # of the rows of all ranks
    utterance: str  # its name
    start: int  # first token in the utterance
    stop: int  # one past the last


def check_sizes(*, batch_size: int, window: int, chunk: int, mode: str, num_ranks: int, update_period: int = 1) -> None:
    """Raises UserError if no stream can have these sizes, or this machine not the RAM for the chunks of an update."""
    if mode not in MODES:
        raise UserError(f"train.state is {mode!r}; choose one of {', '.join(MODES)}")
    if chunk % window:
        raise UserError(f"train.chunk={chunk} is not a multiple of the window, {window} tokens")
    if batch_size % num_ranks:
        raise UserError(f"train.batch_size={batch_size} is not a multiple of the number of processes, {num_ranks}")
    window_bytes = _WINDOW_BYTES + _TOKEN_BYTES * window * (batch_size // num_ranks)
    require_ram(
        update_period * (chunk // window) * window_bytes,
        what="the tokens of an update",
        remedy="lower train.batch_size, train.chunk or train.update_period",
    )


def fill_row(
    tokens: TokenSet, index: int, *, start: int, window: int, bos: bool, inputs: np.ndarray, targets: np.ndarray
) -> int:
    """Write one window of utterance `index` from `start` on into a row of zeros; returns how many tokens it has.

    The input before the first target is the utterance's previous token, or begin-of-utterance with its label if `bos`.
    """
    part = tokens.read(index, start=start, stop=start + window)
    n = len(part)
    targets[:n] = part
    inputs[1:n] = part[:-1]
    if bos:
        inputs[0] = begin_of_utterance(tokens.vocab_size, tokens.label_numbers[index])
    else:
        inputs[0] = tokens.read(index, start=start - 1, stop=start)[0]
    return n


class TokenStream:
    """Endless chunks from a token set.

    `utterance`: each row reads whole utterances, shuffled every epoch; state resets at the start of each, which falls
    on the start of a window (the last window of an utterance is padded, and the padding is not scored).
    `chunk`: each row reads single chunks, shuffled every epoch; state resets at each, and each begins with the
    begin-of-utterance input, as if it were an utterance of its own.
    `carry`: the utterances are joined in the order of their names and cut into one contiguous part per row, which is
    read again and again; state never resets, and nothing is padded. The usual choice for text.
    """

    def __init__(
        self,
        tokens: TokenSet,
        *,
        batch_size: int,
        window: int,
        chunk: int,
        mode: str,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """`batch_size` counts the rows of all ranks. Raises UserError if the sizes do not fit each other."""
        check_sizes(batch_size=batch_size, window=window, chunk=chunk, mode=mode, num_ranks=num_ranks)
        if mode == "carry" and tokens.num_tokens < batch_size:
            raise UserError(f"{tokens.num_tokens} tokens are too few for {batch_size} rows; lower train.batch_size")
        self._tokens, self._batch_size, self._window, self._chunk = tokens, batch_size, window, chunk
        self._mode, self._seed = mode, seed
        rows_each = batch_size // num_ranks
        self._own_rows = range(rank * rows_each, (rank + 1) * rows_each)
        self.first_scored = 0  # place in each window from which targets are scored
        self.label_dropout = 0.0  # share of the labels that are read as unknown
        self._epoch = 0
        self._taken = 0  # items dealt in this epoch
        self._item = [-1] * batch_size  # utterance that each row reads; -1: none
        self._start = [0] * batch_size  # where in it the next window begins
        self._read: list[Place] | None = None  # what was read, if `places` asks for it
        if mode == "utterance":
            self._num_items = len(tokens)
        elif mode == "chunk":
            self._first_chunk = np.concatenate([[0], np.cumsum([-(-n // chunk) for n in tokens.lengths])])
            self._num_items = int(self._first_chunk[-1])
        else:
            self._first_token = np.concatenate([[0], np.cumsum(tokens.lengths)])
            self._part = [row * tokens.num_tokens // batch_size for row in range(batch_size + 1)]
            self._part_length = [b - a for a, b in pairwise(self._part)]
        self._order = self._shuffle()

    def _shuffle(self) -> np.ndarray | None:
        if self._mode == "carry":
            return None
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._num_items)

    def cursor(self) -> dict[str, Any]:
        """The stream's position as plain JSON values, the same on every rank."""
        return {
            "mode": self._mode,
            "epoch": self._epoch,
            "taken": self._taken,
            "item": list(self._item),
            "start": list(self._start),
        }

    def seek(self, cursor: dict[str, Any]) -> None:
        """Continue exactly where `cursor()` was called. Raises UserError for a cursor that this stream cannot have."""
        if not self._fits(cursor):
            raise UserError(f"the checkpoint's position ({str(cursor)[:200]}) does not exist in this run's data")
        self._epoch, self._taken = cursor["epoch"], cursor["taken"]
        self._item, self._start = list(cursor["item"]), list(cursor["start"])
        self._order = self._shuffle()

    def places(self, cursor: dict[str, Any], *, num_chunks: int) -> list[Place]:
        """What this rank's rows read in the `num_chunks` chunks that follow `cursor`; the stream does not move."""
        again = copy.copy(self)
        again.seek(cursor)
        again._read = []
        for _ in range(num_chunks):
            again.next_chunk()
        return again._read

    def _fits(self, cursor: dict[str, Any]) -> bool:
        """Whether every number of a cursor is one that `cursor()` could return."""
        epoch, taken, item, start = (cursor.get(key) for key in ("epoch", "taken", "item", "start"))
        if cursor.get("mode") != self._mode or not isinstance(item, list) or not isinstance(start, list):
            return False
        if len(item) != self._batch_size or len(start) != self._batch_size:
            return False
        if any(type(number) is not int for number in (epoch, taken, *item, *start)):
            return False
        assert isinstance(epoch, int) and isinstance(taken, int)
        lengths = self._tokens.lengths
        if self._mode == "carry":
            in_range = taken == 0 and all(0 <= place < max(self._part_length) for place in start)
        else:
            in_range = 0 <= taken <= self._num_items and all(
                index == -1 or (0 <= index < len(lengths) and 0 <= place < lengths[index] + self._chunk)
                for index, place in zip(item, start, strict=True)
            )
        return in_range and 0 <= epoch < 1 << 31

    @property
    def epoch(self) -> int:
        """Which pass over the data this is, from 0."""
        return self._epoch

    def _take(self) -> int:
        assert self._order is not None
        if self._taken == self._num_items:
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._shuffle()
            assert self._order is not None
        self._taken += 1
        return int(self._order[self._taken - 1])

    def next_chunk(self) -> Chunk:
        """The next `chunk` tokens of every row."""
        if self._mode == "chunk":
            self._item = [-1] * self._batch_size
        windows, num_scored, num_whole = [], 0, 0
        for _ in range(self._chunk // self._window):
            window, lengths = self._next_window()
            windows.append(window)
            num_scored += sum(max(0, length - self.first_scored) for length in lengths)
            num_whole += lengths.count(self._window)
        return Chunk(windows, num_scored, num_whole)

    def _next_window(self) -> tuple[Window, list[int]]:
        """The next window of this rank's rows, and how many tokens each row of all ranks has in it."""
        rows = len(self._own_rows)
        inputs = np.zeros((rows, self._window), dtype=np.int64)
        targets = np.zeros((rows, self._window), dtype=np.int64)
        reset = np.zeros(rows, dtype=bool)
        lengths = []
        advance = self._play_part if self._mode == "carry" else self._play_item
        for row in range(self._batch_size):
            own = row - self._own_rows.start if row in self._own_rows else None
            into = None if own is None else (inputs[own], targets[own])
            length, fresh = advance(row, into)
            lengths.append(length)
            if own is not None:
                reset[own] = fresh
        if self._mode == "carry":
            self._advance_parts()
        places, own_lengths = np.arange(self._window), np.array([lengths[row] for row in self._own_rows])
        scored = (places >= self.first_scored) & (places < own_lengths[:, None])
        return Window(*(torch.from_numpy(a) for a in (inputs, targets, scored, reset))), lengths

    def _play_item(self, row: int, into: tuple[np.ndarray, np.ndarray] | None) -> tuple[int, bool]:
        """One window of a row in the modes `utterance` and `chunk`: its length, and whether state resets."""
        tokens = self._tokens
        # A chunk that ends with its utterance leaves the row idle until the next chunk.
        fresh = self._item[row] < 0
        if fresh:
            item = self._take()
            if self._mode == "chunk":
                index = int(np.searchsorted(self._first_chunk, item, side="right")) - 1
                self._item[row], self._start[row] = index, (item - int(self._first_chunk[index])) * self._chunk
            else:
                self._item[row], self._start[row] = item, 0
        index, start = self._item[row], self._start[row]
        length = min(self._window, tokens.lengths[index] - start)
        if length <= 0:
            return 0, False
        if into is not None:
            fill_row(tokens, index, start=start, window=self._window, bos=fresh, inputs=into[0], targets=into[1])
            if fresh:
                self._drop_label(into[0], index, start)
            self._note(row, index, start, start + length)
        self._start[row] += self._window
        if self._mode == "utterance" and self._start[row] >= tokens.lengths[index]:
            self._item[row] = -1
        return length, fresh

    def _play_part(self, row: int, into: tuple[np.ndarray, np.ndarray] | None) -> tuple[int, bool]:
        """One window of a row in the mode `carry`, whose part begins anew wherever it ends."""
        done = 0
        while into is not None and done < self._window:
            place = (self._start[row] + done) % self._part_length[row]
            index = int(np.searchsorted(self._first_token, self._part[row] + place, side="right")) - 1
            start = self._part[row] + place - int(self._first_token[index])
            num_read = fill_row(
                self._tokens,
                index,
                start=start,
                window=min(self._window - done, self._part_length[row] - place),
                bos=start == 0,
                inputs=into[0][done:],
                targets=into[1][done:],
            )
            if start == 0:
                self._drop_label(into[0][done:], index, start)
            self._note(row, index, start, start + num_read)
            done += num_read
        return self._window, False

    def _drop_label(self, inputs: np.ndarray, index: int, start: int) -> None:
        """Make the label with which these inputs begin unknown, in a share of the cases that the seed decides."""
        if not self.label_dropout or not self._tokens.label_numbers[index]:
            return
        if np.random.default_rng([self._seed, self._epoch, index, start]).random() < self.label_dropout:
            inputs[0] = begin_of_utterance(self._tokens.vocab_size)

    def _note(self, row: int, index: int, start: int, stop: int) -> None:
        if self._read is not None:
            self._read.append(Place(row, self._tokens.names[index], start, stop))

    def _advance_parts(self) -> None:
        self._epoch += (self._start[0] + self._window) // self._part_length[0]
        self._start = [
            (start + self._window) % length for start, length in zip(self._start, self._part_length, strict=True)
        ]
