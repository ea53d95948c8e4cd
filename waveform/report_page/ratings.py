"""Ratings that listeners gave in the blind mode of reports, as the page exports them: means with intervals by run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import counted, printable, table
from waveform.system.errors import UserError
from waveform.system.output import write_json

_MAX_BYTES = 10 << 20
_Name = Annotated[str, Meta(max_length=10_000)]


class _Rating(Struct):
    row: int  # of the page's rows of players
    title: _Name
    run: _Name
    rating: Annotated[int, Meta(ge=1, le=5)]


class _Ratings(Struct):
    """What the page exports."""

    kind: Literal["waveform ratings"]
    sounds: _Name  # digest of all sounds of the page: with `row` and `run` it identifies the rated sound
    ratings: list[_Rating]


def rate(ratings: Sequence[Path | str], *, json_file: Path | str | None = None) -> list[dict[str, Any]]:
    """Print and return (and write) the mean rating of each run in files that the page exported, one for each listener.

    Ratings of the same sound by several listeners are averaged first; the 95% interval is over sounds, by Student's t.
    Raises UserError for a file that is not one of ratings, and if there are none.
    """
    files = list(dict.fromkeys(map(Path, ratings)))
    by_sound: dict[tuple[str, str, int], list[int]] = {}  # (run, page, row) -> ratings
    for path in files:
        read = _read(path)
        for one in read.ratings:
            by_sound.setdefault((one.run, read.sounds, one.row), []).append(one.rating)
    if not by_sound:
        raise UserError(f"--ratings {files[0]} contains no ratings; rate in the page's blind mode, then export")
    entries = []
    for run in dict.fromkeys(run for run, _, _ in by_sound):
        of_run = [given for (name, _, _), given in by_sound.items() if name == run]
        figure = mean_and_interval([float(np.mean(given)) for given in of_run])
        entries.append(
            {
                "run": run,
                "mean": figure["mean"],
                "interval_95": figure["interval_95"],
                "num_sounds": len(of_run),
                "num_ratings": sum(len(given) for given in of_run),
            }
        )
    entries.sort(key=lambda entry: -entry["mean"])
    rows = [
        [printable(entry["run"]), shown(entry, 2), str(entry["num_sounds"]), str(entry["num_ratings"])]
        for entry in entries
    ]
    print("\n".join(table(["run", "mean rating [95% interval]", "sounds", "ratings"], rows)))
    print(f"{counted(len(files), 'listener')}; 1 to 5, higher is better")
    write_json(json_file, entries)
    return entries


def _read(path: Path) -> _Ratings:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too long")
        return msgspec.json.decode(path.read_bytes(), type=_Ratings)
    except OSError as error:
        raise UserError(f"cannot read --ratings {path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--ratings {path} is not what a report's blind mode exports ({reason}); export it again"
        ) from error
