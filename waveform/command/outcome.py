"""How a command ends: with an exit code, and one line for a mistake, a lack of RAM, a failing system or a signal."""

import io
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from waveform.system.console import drop, printable, say
from waveform.system.errors import UserError
from waveform.system.ram import is_shortage, limited_to_ram
from waveform.system.signals import Interrupted, signals_interrupt

_SMALLER = (
    "lower train.batch_size, train.chunk, train.window, model.window, model.memory or model.compressed (for a run that "
    "exists, in its config.yaml), train with lower model.num_layers or model.d_model, or use a larger machine"
)


def run_with_outcome(name: str, run: Callable[[], int], *, continues: bool = False) -> int:
    """Run a verb and return its exit code; if that is not 0, one line on stderr says why.

    0, or what `run` returns; 2 for a user's mistake, which includes a full disk and too little RAM; 1 for other
    trouble, like a failing disk; 128 + the signal's number if one stopped it (129: its terminal was closed, 130:
    Ctrl-C, 143: SIGTERM). name: of the command and its verb, with which the line begins. continues: whether the same
    command goes on where a signal stopped it.
    """
    stopped = partial(_stopped, name, "the same command continues" if continues else "")
    try:
        with signals_interrupt(stopped), limited_to_ram():
            code = run()
            sys.stdout.flush()
            return code
    except UserError as error:
        say(f"{name}: {printable(str(error))}", sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        say(f"{name}: there is not enough memory; {_SMALLER}", sys.stderr)
        return 2
    except OSError as error:  # one that nothing else explained; reading and writing have better messages
        if error.filename is None and _reader_is_gone():
            return 128 + signal.SIGPIPE
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        say(f"{name}: the system reports: {printable(named)}", sys.stderr)
        return 1
    except SystemError as error:  # from numba, if a signal arrives as it calls a compiled function
        if not isinstance(error.__cause__, Interrupted):
            raise
        return stopped(error.__cause__)
    except Interrupted as interrupted:
        return stopped(interrupted)


def _reader_is_gone() -> bool:
    """Whether the reader of the output, perhaps `head`, has closed the pipe; if so, drop the rest of the output."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(io.UnsupportedOperation):  # a stream that a Python caller put there
            poll.register(stream, 0)
    gone = [stream for stream, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for stream in gone:
        drop(stream)
    return bool(gone)


def _stopped(name: str, note: str, interrupted: Interrupted) -> int:
    """Say in one line which signal stopped the command, and return the exit code."""
    by = signal.Signals(interrupted.number).name
    say(f"{name}: " + "; ".join(filter(None, [f"stopped by {by}", interrupted.note or note])), sys.stderr)
    return 128 + interrupted.number
