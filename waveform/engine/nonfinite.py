"""Notices a loss or gradient that is not finite, says where in the data it occurred, and leaves such updates out.

Looking waits for the device. So every update is looked at on a CPU and with `train.on_nonfinite=skip`, but otherwise
only when figures are logged and before anything is evaluated or saved.

Shape letters: B rows of this rank.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from waveform.engine.interface import State, reset_rows, state_tensors
from waveform.engine.streams import Span
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.system.errors import UserError


class Diverged(UserError):
    """The loss is no longer a finite number."""


class Update(NamedTuple):
    """What shows whether an update was finite, and where in the data it was not."""

    step: int  # before this update
    spans: list[list[list[Span]]]  # what each row read in each window, [windows][B]
    num_chunks: int
    sums: Tensor  # not finite if a loss of this rank, or a gradient of any rank, is not
    row_nats: Tensor  # [windows, B] nats of this rank's rows


class FiniteWatch:
    """Looks at the updates of one training; every rank makes the same calls at the same time."""

    def __init__(self, config: TrainConfig, *, world: World, tokens: TokenSet) -> None:
        self._world, self._tokens = world, tokens
        self._skips, self._max_skipped = config.on_nonfinite == "skip", config.max_skipped
        self._unchecked: list[Update] = []
        self.skipped = self.consecutive_skips = 0  # steps

    def looks_at_once(self) -> bool:
        """Whether an update must be looked at before the optimiser applies it."""
        return self._skips or self._world.device.type == "cpu"

    def look(self, update: Update) -> Update | None:
        """Look at an update, or remember it for later; returns it if a look finds it not finite on some rank."""
        self._unchecked.append(update)
        return self.first_bad() if self.looks_at_once() else None

    def first_bad(self) -> Update | None:
        """The first update since the last look that was not finite on some rank; waits for the device."""
        if not self._unchecked:
            return None
        bad = torch.stack([(~torch.isfinite(update.sums)).any() for update in self._unchecked])
        on_any_rank = self._world.sum_(bad.to(torch.int64)).tolist()
        updates, self._unchecked = self._unchecked, []
        return next((update for update, found in zip(updates, on_any_rank, strict=True) if found), None)

    def check(self) -> None:
        """Raises Diverged if an update since the last look was not finite."""
        bad = self.first_bad()
        if bad is not None:
            raise self._diverged(bad, "training stopped")

    def skip(self, bad: Update, *, parameters: Iterable[Tensor], state: State, fresh: State) -> State:
        """Leave out an update: returns `state` with the rows that went bad taken from `fresh`.

        Raises Diverged if skipping is not wanted, has gone on for too long, or is useless: `parameters` are not finite.
        """
        if not self._skips:
            raise self._diverged(bad, "training stopped")
        if self._world.any(not all(bool(torch.isfinite(parameter).all()) for parameter in parameters)):
            raise self._diverged(bad, "the weights are not finite either, so skipping would not help: training stopped")
        if self.consecutive_skips >= self._max_skipped:
            raise self._diverged(
                bad,
                f"the {self.consecutive_skips} steps before it were skipped for the same reason, and train.max_skipped "
                f"is {self._max_skipped}: training stopped",
            )
        rows = ~torch.isfinite(bad.row_nats).all(dim=0).cpu()
        for tensor in state_tensors(state):
            if tensor.is_floating_point():
                rows |= ~torch.isfinite(tensor[:, None]).flatten(1).all(dim=1).cpu()
        self.skipped, self.consecutive_skips = self.skipped + bad.num_chunks, self.consecutive_skips + bad.num_chunks
        if self._world.is_first or rows.any():
            where = self._where_in_data(bad)
            warning = f"warning: step {bad.step} is skipped: its loss or a gradient is not finite, {where}"
            print(warning, file=sys.stderr, flush=True)
        return reset_rows(state, fresh, rows)

    def _diverged(self, bad: Update, what: str) -> Diverged:
        self._unchecked = [bad]  # nothing may be saved from now on
        skip = "" if self._skips else "; or skip such steps with train.on_nonfinite=skip"
        return Diverged(
            f"the loss or a gradient is not finite at step {bad.step}, {self._where_in_data(bad)}; {what}. Lower "
            f"train.lr or train.clip_norm, or raise train.warmup_steps, in a new run{skip}"
        )

    def _where_in_data(self, bad: Update) -> str:
        """Which of this rank's rows went bad, and what they read in that step."""
        rows = (~torch.isfinite(bad.row_nats).all(dim=0)).nonzero()[:, 0].tolist()
        if not rows:
            if self._world.size > 1:
                return "in a gradient or in another process's rows (the loss of every row in this one is finite)"
            return "in a gradient (every row's loss is finite)"
        described = []
        for row in rows[:3]:
            read: dict[str, list[int]] = {}  # utterance -> both ends of each span of it
            for span in (span for window in bad.spans for span in window[row]):
                read.setdefault(self._tokens.names[span.utterance], []).extend((span.start, span.stop))
            texts = [f"tokens {min(ends)} to {max(ends)} of {name!r}" for name, ends in read.items()]
            number = self._world.rank * bad.row_nats.shape[1] + row  # counted over the rows of all ranks
            described.append(f"row {number} ({', '.join(texts[:3])}{', ...' if len(texts) > 3 else ''})")
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        return f"in {', '.join(described)}{more}"
