"""A command line as a table: each verb names its function and its arguments, from which an argparse parser is built.

A verb's function, the one that Python users call, is imported when the verb runs, so `--help` loads nothing heavy. It
is called with the arguments that were given, by name. If a parameter of the function is a dataclass, arguments that
are fields of it are passed in an instance. The defaults are the function's own.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from waveform.command.outcome import run_with_outcome
from waveform.system.console import escape_what_stdout_lacks, printable, replace_closed
from waveform.system.cpu import set_defaults
from waveform.system.errors import UserError
from waveform.system.rules import COUNTABLE

OF_DOMAIN = ""  # in place of a verb's function: the one that the domain of the run has (`Domain.verbs`)
OVERRIDES = "overrides"  # the parameter that gets the `key=value` settings
_LONGEST = 300  # most characters of a mistake that are shown
_SETTING = re.compile(r"[+~]*[A-Za-z_][\w.@-]*=")  # how one begins; a path with a slash before its first = is not one


class Argument:
    """One argument of a verb: a flag or a name, and the options of argparse's `add_argument`.

    instead: `module:function` to call, if the argument is given, instead of the verb's, with the arguments it takes.
    """

    def __init__(self, flag: str, help: str | None = None, *, instead: str | None = None, **options: Any) -> None:
        self.flag, self.options = flag, {"help": help, **options}
        self.instead = instead
        self.name: str = options.get("dest", flag.lstrip("-").replace("-", "_"))  # under which argparse returns it


number = partial(Argument, type=int, metavar="N")
decimal = partial(Argument, type=float)
path = partial(Argument, type=Path)
switch = partial(Argument, action="store_true")


@dataclass(frozen=True)
class Verb:
    """One verb of a command."""

    name: str
    help: str
    function: str  # `module:function`, or `OF_DOMAIN`
    arguments: Sequence[Argument]
    epilog: str | None = None
    computes: bool = True  # trains or runs a model, for which the CPU is set up first
    continues: bool = False  # the same command goes on where a signal stopped it

    def run(self, values: Mapping[str, Any]) -> int:
        """Call the function with the arguments that were given, print its result if it is text, return an exit code."""
        if self.computes:
            set_defaults()
        named = [arg for arg in self.arguments if arg.name in values]
        for arg in named:
            _require_countable(arg, values[arg.name])
        if instead := [arg.instead for arg in named if arg.instead is not None]:
            other = _load(instead[0])
            arguments, _ = arguments_of(other, values)
            other(**arguments)
            return 0
        function, of_runs, asked = self._function(values)
        arguments, unknown = arguments_of(function, values, asked)
        for arg in self.arguments:
            if arg.name in unknown:
                raise UserError(f"{arg.flag} is not for {of_runs}; leave it out")
        result = function(**arguments)
        if isinstance(result, str):
            print(result)
        stopped_by = getattr(result, "stopped_by", 0)  # the number of the signal that ended training early
        return 128 + stopped_by if stopped_by else 0

    def _function(self, values: Mapping[str, Any]) -> tuple[Callable[..., Any], str, dict[str, type]]:
        """The function to call, what messages call the runs that it is for, and the dataclasses that it asks for."""
        if self.function != OF_DOMAIN:
            return _load(self.function), "runs of this kind", {}
        runs = values.get("run_dirs") or [run for run in (values.get("run_dir"),) if run]
        domain = _load("waveform.domain:any_domain_of_runs")(runs)
        if self.name not in domain.verbs:
            raise UserError(f"{runs[0]} is one of the {domain.runs}, which {self.name} does not take")
        return _load(domain.verbs[self.name]), domain.runs, domain.asked


def arguments_of(
    function: Callable[..., Any], values: Mapping[str, Any], asked: Mapping[str, type] | None = None
) -> tuple[dict[str, Any], set[str]]:
    """Return the arguments for `function`, and the names in `values` that it does not know.

    asked: the dataclasses of parameters whose annotation does not say which one.
    """
    parameters, hints = signature(function).parameters, get_type_hints(function)
    dataclasses = {name: kind for name, kind in (asked or {}).items() if name in parameters}
    for name in parameters:
        for kind in (hints.get(name), *get_args(hints.get(name))):
            if isinstance(kind, type) and is_dataclass(kind):
                dataclasses.setdefault(name, kind)
    arguments = {name: value for name, value in values.items() if name in parameters}
    unknown = set(values) - set(arguments)
    for parameter, kind in dataclasses.items():
        if parameter not in arguments:
            own = {field.name: values[field.name] for field in fields(kind) if field.name in unknown}
            arguments[parameter] = kind(**own)
            unknown -= set(own)
    return arguments, unknown


def _require_countable(arg: Argument, value: Any) -> None:
    """Raises UserError for a number that no verb could mean; infinity is left to the verb."""
    for number in value if isinstance(value, list) else [value]:
        if not COUNTABLE.holds(number) and number != math.inf:
            raise UserError(f"{arg.flag} is {number}; {COUNTABLE.remedy}")


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, as the command does for all other mistakes."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message[:_LONGEST])}; `{self.prog} --help` says what it takes\n")


def parser(program: str, description: str, verbs: Sequence[Verb]) -> argparse.ArgumentParser:
    """The argparse parser of a table."""
    top = _Parser(prog=program, description=description)
    choices = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verbs:
        sub = choices.add_parser(
            verb.name,
            help=verb.help,
            description=verb.help[0].upper() + verb.help[1:] + ".",
            epilog=verb.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        for arg in verb.arguments:
            sub.add_argument(arg.flag, **arg.options)
    return top


def run_command(
    name: str, program: str, description: str, verbs: Sequence[Verb], arguments: Sequence[str] | None
) -> int:
    """Parse `arguments` (None: those of the process), run a verb, and return the exit code of `run_with_outcome`.

    name: of the command in its messages; program: in its help.
    """
    replace_closed()
    escape_what_stdout_lacks()
    arguments = sys.argv[1:] if arguments is None else arguments
    with_settings = {verb.name for verb in verbs if any(arg.name == OVERRIDES for arg in verb.arguments)}
    # argparse accepts settings before options or after them, but not both, and would take settings that follow an
    # option with several values for more values. So it gets to see none.
    settings = [each for each in arguments if arguments[0] in with_settings and _SETTING.match(each)]
    rest = [each for each in arguments if each not in settings]
    known, others = parser(program, description, verbs).parse_known_args(rest)
    given = vars(known)
    verb = {verb.name: verb for verb in verbs}[given.pop("verb")]
    if unknown := [each for each in others if each.startswith("-") or verb.name not in with_settings]:
        _Parser(prog=f"{program} {verb.name}").error(f"unrecognized arguments: {' '.join(unknown)}")
    if settings := [*settings, *others]:  # what is not a setting is refused with them
        given[OVERRIDES] = [*settings, *given.get(OVERRIDES, ())]
    return run_with_outcome(f"{name} {verb.name}", lambda: verb.run(given), continues=verb.continues)
