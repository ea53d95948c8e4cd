"""What a study reports of its runs: which evaluations it needs, and the figures, table and picture made of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from waveform.system.console import table
from waveform.system.errors import UserError

TEST, SIZES = "test", "sizes"  # what `evaluate` and `sweep` found
Config = Mapping[str, Any]  # resolved, as in a run's config.yaml
Figures = Mapping[str, Any]
# What was read of the runs of each setting, by its label and then by seed.
Runs = Mapping[str, Sequence[Figures]]


def as_table(rows: Sequence[Mapping[str, str]], *below: str) -> str:
    """Rows as text, which all have the columns of the first, and lines below them."""
    return "\n".join([*table(list(rows[0]), [list(row.values()) for row in rows]), *below])


def slots(config: Config, field: str) -> int:
    """A size of memory that a study scales. Raises UserError for a list, of which it would have no shares."""
    size = config["model"][field]
    if isinstance(size, list):
        raise UserError(f"model.{field} is {size}; a study needs one number for all layers")
    return int(size)


class Report(ABC):
    """One kind of report; a study has its own, with the paper's figures in it."""

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        """What to score of a run: a name for the figures -> a verb and its options."""
        return {TEST: ["evaluate"]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        """The figures of one run, from what `commands` found."""
        return dict(scores[TEST])

    @abstractmethod
    def summarise(self, runs: Runs) -> dict[str, Any]:
        """The figures of the whole study over its seeds, for JSON, `table` and `draw`."""

    def beside(self, runs: Runs) -> dict[str, Any]:
        """What else the JSON says of the study."""
        return {}

    @abstractmethod
    def table(self, summary: Figures) -> str:
        """The summary as text, with the paper's figures beside ours."""

    @abstractmethod
    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        """Draw it as a PNG, with the paper's figures beside ours. Raises UserError if it cannot be written."""
