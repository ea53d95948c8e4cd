"""What a fault is here: something made to happen to the toolkit, many times, and what must hold each time."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    run: takes an empty folder, the number of cases and a source of random numbers; raises AssertionError, naming the
    case, where something does not hold; returns figures for the table (JSON).
    """

    name: str
    must_hold: str
    run: Callable[[Path, int, random.Random], dict[str, Any]]
    short: int  # cases in the test suite, where all faults together stay under 3 minutes; 0: none there
    long: int  # cases by hand
