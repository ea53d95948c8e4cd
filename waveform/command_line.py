"""What the commands `waveform` and `python -m recipes` share: how verbs are described, and how mistakes are told."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from waveform.engine.errors import UserError


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


def add_dynamic(parser: argparse.ArgumentParser) -> None:
    """--dynamic and its settings."""
    parser.add_argument("--dynamic", action="store_true", help="score again while learning from what was scored")
    parser.add_argument("--dynamic-optimiser", choices=("sgd", "adam"), default="sgd", help="default: sgd")
    parser.add_argument("--dynamic-lr", type=float, metavar="LR", help="default: 3e-2 with sgd, 3e-5 with adam")


def run_command(
    name: str,
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> int:
    """Parse and run; returns the exit code: 0, or with one line on stderr 2 for a user's mistake, 1 for other trouble.

    A full disk is the user's to mend, and so 2; a disk that fails is not.
    """
    args, rest = parser.parse_known_args(arguments)
    # argparse lets `key=value` stand before the options or behind them, but not both; what it leaves is taken here.
    if rest and (not hasattr(args, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    try:
        run(args)
        return 0
    except UserError as error:
        print(f"{name} {args.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # reading and writing have better messages; this is what slipped through
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        print(f"{name} {args.verb}: the system refuses: {named}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name} {args.verb}: interrupted", file=sys.stderr)
        return 130
