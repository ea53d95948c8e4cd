"""What a fault is: something that goes wrong around the toolkit, caused many times, and what must hold each time.

Each module of this package causes one group of faults, by functions with the decorator `fault`; `test_faults.py` runs
them.
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
    """One kind of fault; see `fault` for the fields."""

    name: str
    must_hold: str
    make: Make
    short: int
    long: int


FAULTS: list[Fault] = []


def fault(name: str, must_hold: str, *, short: int, long: int, in_server: bool = False) -> Callable[[Make], Make]:
    """Register the function that causes a fault.

    The function takes an empty folder, the number of cases and a source of random numbers. It raises AssertionError,
    naming the case, if something does not hold, and returns figures for results/faults/faults.json.

    name, must_hold: as in results/faults/faults.json.
    short: number of cases in the test suite; 0 for a fault that has only a long form.
    long: number of cases with `pytest tests/faults --faults=long`.
    in_server: call the function in a process from which it can fork its cases (see `forks`).
    """

    def register(make: Make) -> Make:
        FAULTS.append(Fault(name, must_hold, partial(forks.in_server, make) if in_server else make, short, long))
        return make

    return register
