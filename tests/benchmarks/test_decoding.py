"""Decoding by steps is worth its code."""

import pytest

from tests.benchmarks.decoding import measure


@pytest.mark.slow
def test_a_step_is_20_times_faster_than_recomputing_its_window() -> None:
    assert measure(repeats=3)["ratio"] >= 20
