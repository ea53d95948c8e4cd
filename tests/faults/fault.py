"""What a fault is: something that goes wrong around the toolkit, made to happen many times, and what must hold then.

A module of this package holds a group of faults: functions with the decorator `fault`. `test_faults.py` runs them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tests.faults import forks

Make: TypeAlias = Callable[[Path, int, random.Random], dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault; the fields are described at `fault`."""

    name: str
    must_hold: str
    make: Make
    short: int
    long: int


FAULTS: list[Fault] = []


def fault(name: str, must_hold: str, *, short: int, long: int, in_server: bool = False) -> Callable[[Make], Make]:
    """Register the function that makes a fault.

    The function takes an empty folder, the number of cases and a source of random numbers. It raises AssertionError,
    naming the case, if something does not hold, and returns figures for the table (JSON).

    name, must_hold: as the README and results/faults.json have them.
    short: cases in the test suite; 0 if there are none.
    long: cases of `pytest tests/faults --faults=long`.
    in_server: call the function in a process from which it can fork its cases (see `forks`).
    """

    def register(make: Make) -> Make:
        FAULTS.append(Fault(name, must_hold, partial(forks.in_server, make) if in_server else make, short, long))
        return make

    return register
