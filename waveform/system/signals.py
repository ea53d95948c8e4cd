"""Signals that ask a command to end: SIGINT (Ctrl-C), SIGTERM (a scheduler, `kill`), SIGHUP (its terminal is closed).

A command stops with one line and the exit code 128 + the signal's number, as shells do; training first saves its
current step. A second signal ends the process at once.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from waveform.system.console import drop

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within this time a second signal may be the first one again: torchrun forwards signals to its processes, to which the
# scheduler or the terminal may have sent them already.
_ECHO_S = 1.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PATIENCE_S = 5  # seconds for the exception to reach the command


class Interrupted(BaseException):
    """A signal asked to stop; `note` is for the user. Like KeyboardInterrupt, it is not an Exception."""

    def __init__(self, number: int, note: str = "") -> None:
        super().__init__(number, note)
        self.number, self.note = number, note


class Stopped(Exception):
    """Some work was not finished because a signal asked to stop."""


class StopRequest:
    """Whether a signal has asked to stop: its number, or 0."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0

    def check(self) -> None:
        """Raises Stopped if a signal has asked to stop."""
        if self:
            raise Stopped


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals within; does nothing outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def silence_and_handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # writing to a closed terminal fails
            for stream in terminals:
                drop(stream)
        handle(number, frame)

    # `nohup` makes a process ignore SIGHUP; torchrun exits on it anyway, with its workers.
    is_left = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not _under_torchrun()
    handled = [number for number in SIGNALS if number != signal.SIGHUP or not is_left]
    usual = {number: signal.signal(number, silence_and_handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when the torchrun that started it ends.

    If torchrun is killed, or interrupted while it starts its processes, it leaves them behind, and they go on training.
    """
    if not _under_torchrun() or not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def signals_interrupt(tell: Callable[[Interrupted], int]) -> Iterator[None]:
    """Within, a first signal raises Interrupted, and a second one ends the process at once.

    If a library swallows the exception, it is raised again at the end. If Python swallows it in a finaliser, or the end
    is not reached in time, the process ends, after `tell` has printed the exception and returned the exit code.
    """
    usual_hook, raised = sys.unraisablehook, []

    def end(interrupted: Interrupted) -> NoReturn:
        code = tell(interrupted)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)

    def hook(swallowed: "sys.UnraisableHookArgs", /) -> None:
        if isinstance(swallowed.exc_value, Interrupted):
            end(swallowed.exc_value)
        usual_hook(swallowed)

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        for each in SIGNALS:
            if signal.getsignal(each) != signal.SIG_IGN:
                signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, lambda *_: end(Interrupted(number)))
        signal.alarm(_PATIENCE_S)
        raised.append(Interrupted(number))
        raise raised[0]

    with _handling(handle):
        sys.unraisablehook = hook
        try:
            yield
            if raised:
                raise raised[0]
        finally:
            signal.alarm(0)
            sys.unraisablehook = usual_hook


@contextmanager
def signals_ask() -> Iterator[StopRequest]:
    """Within, a first signal is noted for the caller to stop when it can; a second one ends the process at once."""
    request = StopRequest()
    asked_at_s = 0.0
    under_torchrun = _under_torchrun()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at_s
        if not request:
            request.number, asked_at_s = number, time.monotonic()
        elif not under_torchrun or time.monotonic() - asked_at_s > _ECHO_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with _handling(handle):
        yield request
