"""How fast a run was trained, slice by slice, by the records of its log; and warnings for when runs are compared."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from waveform.engine.turns import SLICE_S

_FEWEST_SLICES = 8  # below that, quartiles say nothing
_STEADY = 0.8  # least ratio of the slower quartile of slices to the faster one that passes for even speed
_IDLE = 0.1  # largest share of the training time that may be spent waiting for a core
_ALIKE = 0.9  # least ratio of two runs' shares of their undisturbed speed that passes for equal
_UNDISTURBED = 0.9  # quantile of a run's slices that passes for an idle machine


def speeds_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Tokens per second in each stretch of training of about `SLICE_S` seconds, or from one record to the next."""
    points = [(0.0, 0)]
    for record in records:
        if record["kind"] == "train" and "tokens_seen" in record and record["seconds"] - points[-1][0] >= SLICE_S:
            points.append((record["seconds"], record["tokens_seen"]))
    return [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points)]


def training_speed(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Median training speed in tokens per second, as logged; None before the first record."""
    rates = [record.get("tokens_per_second") for record in records if record["kind"] == "train"]
    numbers = [rate for rate in rates if isinstance(rate, int | float) and 0 < rate < math.inf]
    return statistics.median(numbers) if numbers else None


def waited_share(records: Sequence[Mapping[str, Any]], train: Mapping[str, Any]) -> float | None:
    """Share of the training time in which the first thread waited for a core.

    None if the log does not say, and if waiting cost no updates, because the settings `train` have no limit of time or
    do not count waiting.
    """
    if train.get("max_seconds") is None or not train.get("count_waiting", True):
        return None
    known = [record for record in records if record["kind"] == "train" and "waited_s" in record]
    return sum(record["waited_s"] for record in known) / max(known[-1]["seconds"], 1e-9) if known else None


def warnings_of(figures: Mapping[str, Mapping[str, Any]], *, unit: str = "sample") -> list[str]:
    """Warn of runs that did not have the machine to themselves, and of other programs that slowed some runs more.

    figures: of each run by its name, as `compare` returns them. A run is warned of if the slower quartile of its slices
    is below 0.8 of the faster one, or if it waited for more than a tenth of the time. Its share of its undisturbed
    speed is its mean speed divided by the 0.9 quantile of its slices. unit: what a token is called.
    """
    lines, shares = [], {}
    waits = {name: entry["train_waited_share"] or 0 for name, entry in figures.items()}
    if waited := [f"{name} {share:.0%}" for name, share in waits.items() if share > _IDLE]:
        lines.append(
            f"warning: training waited for a core while other programs ran ({', '.join(waited)} of the time). On an "
            f"idle machine it would see more {unit}s."
        )
    for name, entry in figures.items():
        slices = entry["train_tokens_per_second_by_slice"]
        if len(slices) < _FEWEST_SLICES:
            continue
        slow, fast, undisturbed = np.quantile(slices, [0.25, 0.75, _UNDISTURBED])
        shares[name] = float(np.mean(slices) / undisturbed)
        if slow < _STEADY * fast:
            lines.append(
                f"warning: {name} was trained at uneven speed: a quarter of its slices below {slow:,.0f} {unit}s/s, a "
                f"quarter above {fast:,.0f}. The machine did other work; on an idle one it would see more {unit}s."
            )
    if shares:
        least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        if shares[least] < _ALIKE * shares[most]:
            lines.append(
                f"warning: other programs slowed the runs unequally: {least} had {shares[least]:.0%} of its "
                f"undisturbed speed, {most} {shares[most]:.0%}."
            )
    return lines
