"""How long to search and where, as a user says it: apart from the search, which needs Optuna."""

import re
from dataclasses import dataclass
from pathlib import Path

from waveform.system.errors import UserError

_UNITS_S = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class SearchConfig:
    """How long to search, and where."""

    budget: str = "10min"  # of training for each trial: a number of s, min or h
    trials: int = 20
    seed: int = 0  # of what is drawn from the space; that of the runs is the setting `seed`
    space: Path | None = None  # a YAML file; None: the one that comes with the model
    storage: str | None = None  # URL of a database that other machines search in too; None: a file in the folder

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UserError(f"--trials is {self.trials}; it must be at least 1")
        if self.budget_s <= 0:
            raise UserError(f"--budget {self.budget} leaves no time to train; give more")

    @property
    def budget_s(self) -> float:
        """Seconds of training for each trial."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", self.budget)
        if found is None:
            raise UserError(f"--budget {self.budget!r} is not a time; examples are 90s, 10min and 1.5h")
        return float(found[1]) * _UNITS_S[found[2]]
