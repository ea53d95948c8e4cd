"""Progress of long work: a bar on a terminal, a plain line every few seconds elsewhere (logs, CI, notebooks)."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_PLAIN_INTERVAL_S = 10.0


class Progress:
    """Shows done/total, rate and ETA of one task; use as a context manager.

    `total` and `update(amount)` are in `unit`; `note` is free text after the rate. If a unit is a stretch of audio,
    `unit_s` is its duration in seconds, and the speed is also shown in x real time.
    Nothing is shown if `enabled` is false (on ranks other than the first, or for a quiet Python caller). If showing
    fails, because a log's disk is full or its reader is gone (Ctrl-C ends `tee` too), the work continues unseen.
    If several tasks share a display, `about` is set to the name of the one that notes and lines are about.
    """

    def __init__(
        self,
        label: str,
        *,
        total: float | None,
        unit: str,
        unit_s: float | None = None,
        initial: float = 0,
        enabled: bool = True,
    ) -> None:
        """initial: what an earlier process did, part of the total but not of the rate."""
        self._label, self._total, self._unit, self._unit_s = label, total, unit, unit_s
        self._start_s = self._last_line_s = time.monotonic()
        self._initial = self._done = float(initial)
        self._note = self.about = ""
        self._printed: float | None = None  # what was done when the last plain line was printed; None: there is none
        self._enabled = enabled
        self._bar: tqdm | None = None  # on a terminal
        with self._if_possible():
            if enabled and sys.stderr.isatty():
                options = {"unit_scale": True, "dynamic_ncols": True}
                self._bar = tqdm(total=total, initial=initial, desc=label, unit=unit, **options)

    @contextmanager
    def _if_possible(self) -> Iterator[None]:
        """Show something within, and nothing from then on if that fails."""
        try:
            yield
        except OSError:
            if self._bar is not None:
                self._bar.disable = True  # or it would try once more when it is deleted
            self._bar, self._enabled = None, False

    def update(self, amount: float = 1, *, note: str = "") -> None:
        """Count `amount` more units as done."""
        self._done += amount
        self._note = self._named(note) if note else self._note
        if self._unit_s is not None:
            self._note = f"{self._done * self._unit_s / self._elapsed_s:.2f} x real time"
        with self._if_possible():
            if self._bar is not None:
                self._bar.set_postfix_str(self._note, refresh=False)
                self._bar.update(amount)
            elif self._enabled and time.monotonic() - self._last_line_s >= _PLAIN_INTERVAL_S:
                self._last_line_s = time.monotonic()
                self._print_line()

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-9)

    def _named(self, text: str) -> str:
        return f"{self.about}: {text}" if self.about else text

    def write(self, line: str) -> None:
        """Print a line without breaking the bar."""
        with self._if_possible():
            if self._bar is not None:
                self._bar.write(self._named(line), file=sys.stderr)
            elif self._enabled:
                print(self._named(line), file=sys.stderr, flush=True)

    def _print_line(self) -> None:
        self._printed = self._done
        rate = (self._done - self._initial) / self._elapsed_s
        of_total = f"/{_amount(self._total)}" if self._total else ""
        share = f" ({100 * self._done / self._total:.0f}%)" if self._total else ""
        parts = [f"{self._label}: {_amount(self._done)}{of_total} {self._unit}{share}"]
        if self._unit != "s":
            parts.append(f"{_amount(rate)} {self._unit}/s")
        if self._total and rate > 0:
            parts.append(f"ETA {max(self._total - self._done, 0) / rate:.0f} s")
        print(", ".join(filter(None, [*parts, self._note])), file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        with self._if_possible():
            if self._bar is not None:
                self._bar.close()
            elif self._enabled and self._printed not in (None, self._done):
                self._print_line()


def _amount(number: float) -> str:
    """Whole if it is or if it is large, so that parts of a second show but parts of a token do not."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.2f}"
