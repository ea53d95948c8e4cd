"""What the commands `waveform` and `python -m recipes` share: how verbs are described, and how mistakes are told."""

import argparse
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waveform.system.console import drop, printable, replace_closed, say
from waveform.system.errors import UserError
from waveform.system.ram import is_shortage, no_more_than_there_is
from waveform.system.signals import Interrupted, signals_interrupt

if TYPE_CHECKING:
    from waveform.engine.trainer import TrainResult  # seconds to import

_SMALLER = (
    "lower train.batch_size or train.evaluate_batch_size, train.chunk, train.window, model.window, model.memory or "
    "model.compressed, a run's in its config.yaml; train with lower model.num_layers or model.d_model; or use a larger "
    "machine"
)


def add_verb(verbs: Any, name: str, help_text: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """A verb's parser among `verbs`, what `add_subparsers` returns."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")


def run_dir(text: str) -> Path:
    """A run folder on the command line. Raises ArgumentTypeError for a setting, before which it was left out."""
    if re.match(r"[+~]?[a-z_.]+=", text):
        raise argparse.ArgumentTypeError(f"name the run folder before the settings; for one called {text!r}, ./{text}")
    return Path(text)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR, of training."""
    parser.add_argument("run_dir", type=run_dir, metavar="RUN_DIR", help="where the run is kept; resumed if it exists")


def add_dynamic(parser: argparse.ArgumentParser) -> None:
    """--dynamic and its settings."""
    parser.add_argument("--dynamic", action="store_true", help="score again while learning from what was scored")
    parser.add_argument("--dynamic-optimiser", choices=("sgd", "adam"), default="sgd", help="default: sgd")
    parser.add_argument("--dynamic-lr", type=float, metavar="LR", help="default: 3e-2 with sgd, 3e-5 with adam")


def report_training(result: "TrainResult", unit: str) -> int:
    """Say how a training ended, on the first rank; returns the exit code: 0, or 128 + the signal that stopped it."""
    if os.environ.get("RANK", "0") == "0":
        how = "finished"
        if result.interrupted:
            how = f"stopped by {signal.Signals(result.stopped_by).name}; the same command resumes"
        seen = f"{result.seconds:.0f} s of training, {result.tokens_seen:,} {unit} seen"
        say(f"{how}: step {result.step}, {seen}")
    return 128 + result.stopped_by if result.interrupted else 0


def run_command(
    name: str,
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None,
) -> int:
    """Parse and run; returns the exit code, with one line on stderr where it is not 0.

    0, or what `run` returns; 2 for a user's mistake, a full disk or too little memory among them, and 1 for other
    trouble, such as a disk that fails; 128 + the signal's number where one stopped it (129: its terminal was closed,
    130: Ctrl-C, 143: SIGTERM).
    """
    replace_closed()
    args, rest = parser.parse_known_args(arguments)
    # argparse lets `key=value` stand before the options or behind them, but not both; what it leaves is taken here.
    options = [argument for argument in rest if argument.startswith("-") or not hasattr(args, "overrides")]
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if rest:
        args.overrides += rest
    try:
        with signals_interrupt(partial(_tell, name, args.verb)), no_more_than_there_is():
            code = run(args) or 0
            sys.stdout.flush()
            return code
    except UserError as error:
        say(f"{name} {args.verb}: {printable(str(error))}", sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        say(f"{name} {args.verb}: it takes more memory than there is; {_SMALLER}", sys.stderr)
        return 2
    except OSError as error:  # reading and writing have better messages; this is what slipped through
        if error.filename is None and _nobody_reads_on():
            return 128 + signal.SIGPIPE
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        say(f"{name} {args.verb}: the system refuses: {printable(named)}", sys.stderr)
        return 1
    except Interrupted as interrupted:
        return _tell(name, args.verb, interrupted)


def _nobody_reads_on() -> bool:
    """Whether whoever reads what is printed, `head` perhaps, has seen enough; then the rest is dropped."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(io.UnsupportedOperation):  # one that a Python caller has put there
            poll.register(stream, 0)
    gone = [stream for stream, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for stream in gone:
        drop(stream)
    return bool(gone)


def _tell(name: str, verb: str, interrupted: Interrupted) -> int:
    """Say in a line what a signal did; returns the exit code."""
    by = signal.Signals(interrupted.number).name
    say(f"{name} {verb}: " + "; ".join(filter(None, [f"stopped by {by}", interrupted.note])), sys.stderr)
    return 128 + interrupted.number
