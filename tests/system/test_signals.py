"""Signals end a command, whatever a library does with the exception."""

import os
import signal
from contextlib import suppress

import pytest

from waveform.command.outcome import run_with_outcome


def test_a_signal_that_a_library_swallows_is_said_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """As compilers do, in whose middle it comes."""

    def swallow() -> int:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert run_with_outcome("waveform sample", swallow) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "waveform sample: stopped by SIGTERM\n"
