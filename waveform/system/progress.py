"""Progress of long work: a line kept up to date on a terminal, and printed every few seconds elsewhere."""

import shutil
import sys
import time

from waveform.system.console import say

_IN_PLACE_INTERVAL_S = 0.1
_PLAIN_INTERVAL_S = 10.0  # in logs, CI and notebooks
_SETTLED_S = 300  # no ETA before that, or half a percent of the work: a slow start would spoil it
_CLEAR = "\r\x1b[K"  # clears the cursor's line


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
        self._label, self._total, self._unit_s = label, total, unit_s
        self._unit = unit if unit in ("s", "MB") else f"{unit}s"
        self._start_s = self._shown_s = time.monotonic()
        self._initial = self._done = self._shown = float(initial)
        self._note = self.about = ""
        self._enabled, self._in_place = enabled, enabled and sys.stderr.isatty()

    def update(self, amount: float = 1, *, note: str = "") -> None:
        """Count `amount` more units as done."""
        self._done += amount
        self._note = self._named(note) if note else self._note
        if self._unit_s is not None:
            self._note = f"{self._done * self._unit_s / self._elapsed_s:.2f} x real time"
        interval_s = _IN_PLACE_INTERVAL_S if self._in_place else _PLAIN_INTERVAL_S
        if self._enabled and time.monotonic() - self._shown_s >= interval_s:
            self._show()

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-9)

    def _named(self, text: str) -> str:
        return f"{self.about}: {text}" if self.about else text

    def write(self, line: str) -> None:
        """Print a line above the progress line."""
        if self._enabled:
            say(f"{_CLEAR if self._in_place else ''}{self._named(line)}", sys.stderr)

    def _show(self) -> None:
        self._shown_s, self._shown = time.monotonic(), self._done
        rate = (self._done - self._initial) / self._elapsed_s
        of_total = f"/{_amount(self._total)}" if self._total else ""
        share = f" ({100 * self._done / self._total:.0f}%)" if self._total else ""
        parts = [f"{self._label}: {_amount(self._done)}{of_total} {self._unit}{share}"]
        if self._unit != "s":
            parts.append(f"{_amount(rate)} {self._unit}/s")
        done = self._done - self._initial
        if self._total and (200 * done > self._total or (done and self._elapsed_s > _SETTLED_S)):
            left_s = max(self._total - self._done, 0) / rate
            parts.append(f"ETA {left_s:.0f} s" if left_s < 3 * 3600 else f"ETA {left_s / 3600:,.1f} hours")
        line = ", ".join(filter(None, [*parts, self._note]))
        if self._in_place:
            say(f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}", sys.stderr, end="")
        else:
            say(line, sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._initial < self._shown < self._done:  # what was shown last is out of date
            self._show()
        if self._in_place and self._shown > self._initial:
            say("", sys.stderr)


def _amount(number: float) -> str:
    """Without decimals if it is whole or at least 10, so that parts of a second show but parts of a token do not."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.2f}"
