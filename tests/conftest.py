"""Settings for every test: one thread (the models are tiny, threads cost more than they save); the same examples."""

from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# A failure must be the fault of what changed, not of the day; deadlines would fail on a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of tests/faults."""
    group = parser.getgroup("faults")
    group.addoption(
        "--faults", choices=("short", "long"), default="short", help="how many cases of every fault to make"
    )
    group.addoption("--faults-seed", type=int, default=0, metavar="N", help="seed of the cases' random numbers")
    group.addoption("--faults-json", type=Path, metavar="FILE", help="add the figures of the faults to that file")
