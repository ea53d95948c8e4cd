"""Metrics: nats and bits, and the log of a training, which is written to metrics.jsonl and shown by a tracker."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from waveform.engine.trackers import open_tracker
from waveform.system.atomic import explain_write_errors, write_file
from waveform.system.errors import UserError

METRICS_FILE = "metrics.jsonl"
# Kinds of records, and the numbers that each must have
_KINDS = {"train": ("step", "seconds"), "evaluate": ("step", "seconds", "nll_nats")}
_NUMBERS_IF_ANY = ("tokens_seen", "waited_s")  # which logs of earlier versions lack


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)


def unigram_nll(train_counts: np.ndarray, test_counts: np.ndarray) -> float:
    """NLL in nats per token of the add-one-smoothed histogram of the training tokens: what any model should beat.

    Both arguments are counts of each class, [V].
    """
    log_p = np.log((train_counts + 1) / (train_counts.sum() + len(train_counts)))
    return float(-(test_counts * log_p).sum() / test_counts.sum())


class MetricsLog:
    """Appends one JSON object per line to metrics.jsonl, and gives the same scalars to a tracker.

    It refuses to write if the run folder was meanwhile moved or replaced.
    """

    def __init__(self, run_dir: Path, *, resume_step: int, tracker: str) -> None:
        """resume_step: drop lines of later steps, which a resumed run writes again. tracker: one of `TRACKERS`."""
        self._folder, self._path = run_dir, run_dir / METRICS_FILE
        kept = [record for record in read_metrics(run_dir) if record["step"] <= resume_step]
        self.evaluated = {record["step"] for record in kept if record["kind"] == "evaluate"}  # steps
        if self._path.exists():
            write_file(self._path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self.tracker = open_tracker(tracker, run_dir, purge_step=resume_step + 1)
        self._known = run_dir.stat()

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        """Write one record: `kind` is train or evaluate; values are JSON scalars. Raises as `require_folder` does."""
        self.require_folder(step)
        with explain_write_errors(self._path), open(self._path, "a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        if kind == "evaluate":
            self.evaluated.add(step)
        shown = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self.tracker.add_scalars(shown, step)

    def require_folder(self, step: int) -> None:
        """Raises UserError, for a training at `step`, if the run folder was moved or replaced."""
        try:
            if os.path.samestat(self._folder.stat(), self._known):
                return
            changed = "is another folder now"
        except (FileNotFoundError, NotADirectoryError):
            changed = "is gone"
        raise UserError(
            f"{self._folder} {changed}: it was moved or removed during training, at step {step}; put it back, and "
            "the same command continues from its last checkpoint"
        )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole record of metrics.jsonl.

    A last line cut by a killed process is ignored; so are other damaged lines, with a warning. Raises UserError if the
    file cannot be read.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    if not path.is_file():
        raise UserError(f"{path} is not a regular file; move it away")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        needed = _KINDS.get(str(record.get("kind"))) if isinstance(record, dict) else None
        numbers = needed and [record.get(name) for name in needed] + [record.get(name, 0) for name in _NUMBERS_IF_ANY]
        if numbers and all(type(number) in (int, float) for number in numbers):
            records.append(record)
        elif number < len(lines):
            damaged.append(str(number))
    if damaged:
        print(
            f"warning: {path} is damaged in line {', '.join(damaged[:5])}{', ...' * (len(damaged) > 5)}; ignoring that",
            file=sys.stderr,
        )
    return records
