"""What a fault is: something that goes wrong around the toolkit, caused many times, and what must hold each time."""

import json
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tests.faults import forkserver

Make: TypeAlias = Callable[[Path, int, random.Random], dict[str, Any]]


class Fault(NamedTuple):
    """One kind of fault; see `fault` for the fields."""

    name: str
    must_hold: str
    make: Make
    short: int
    long: int


FAULTS: list[Fault] = []


def fault(name: str, *, short: int, long: int, in_server: bool = False) -> Callable[[Make], Make]:
    """Have `test_faults.py` run the function that causes a fault, whose docstring begins with what must hold.

    The function takes an empty folder, the number of cases and a source of random numbers. It raises AssertionError,
    naming the case, if something does not hold, and returns figures for results/faults/faults.json.

    short, long: numbers of cases in the test suite (0: none) and with `pytest tests/faults --faults=long`.
    in_server: call the function in a process from which it can fork its cases (see `forks`).
    """

    def register(make: Make) -> Make:
        says = " ".join((make.__doc__ or "").partition("\n\n")[0].split())
        must_hold = says.removeprefix("Must hold: ").removesuffix(".")
        FAULTS.append(Fault(name, must_hold, partial(_in_server, make) if in_server else make, short, long))
        return make

    return register


def _in_server(make: Make, folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Call `make` in a new process that has imported torch but computed nothing yet."""
    place, log = folder / "server", folder / "server.log"
    place.mkdir()
    seed = rng.randrange(10**6)
    printed = forkserver.run(_serve, make, place, cases, seed, output=log, timeout_s=None, daemon=False)
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return figures


def _serve(make: Make, folder: Path, cases: int, seed: int) -> None:
    # A shell's background job ignores SIGINT, under nohup SIGHUP too; programs started here would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    print(json.dumps(make(folder, cases, random.Random(seed))), flush=True)
