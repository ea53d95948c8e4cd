"""What a report shows of one kind of runs, besides what all have: NLL by place, attention, training and settings."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waveform.analyses.layers import DEFAULT_TOKENS
from waveform.analyses.nll_by_place import NllByPlace
from waveform.engine.evaluator import Evaluation
from waveform.engine.token_set import TokenSet
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions, Opened

Figures = list[dict[str, Any]]  # of each run, as `compare` returns them


class ReportContents(ABC):
    """A dataclass of what users choose, for each kind of runs, and what follows from it."""

    split: str
    rows: int | None = None  # pieces that the split is cut into to be scored; None: whole utterances
    listen: Sequence[Path | str] = ()  # further runs, of which only samples are shown

    @property
    def options(self) -> EvaluateOptions:
        """How runs are scored."""
        return EvaluateOptions(rows=self.rows, split=self.split)

    @property
    def max_tokens(self) -> int | None:
        """About how many tokens are scored by place; None: all."""
        return DEFAULT_TOKENS

    def result(self, tokens: TokenSet, places: NllByPlace, *, protocol: str) -> Evaluation | None:
        """The NLL in the tables, if it can be computed from that by place; None: it is measured as `evaluate` does."""
        return None

    def others(self, runs: Sequence[TrainedRun], *, device: str) -> dict[str, TrainedRun]:
        """Runs, by name, of which only samples are shown. Raises UserError for those that do not fit."""
        return {}

    def settings(self, run: TrainedRun) -> dict[str, Any]:
        """The settings of a run that are shown."""
        return run.config

    @abstractmethod
    def shown(self, runs: dict[str, TrainedRun], entries: Figures, of: Opened) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of the `Page`, and figures for its JSON.

        runs: by name, first those of `of`, which have `entries`, then `others`. Every rank of `of.world` calls this;
        the first one's result is shown.
        """
