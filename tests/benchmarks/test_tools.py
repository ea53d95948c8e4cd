"""The tools of this folder, and that decoding by steps is worth its code."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import decoding, frontier, scaling


@pytest.mark.slow
def test_a_step_is_20_times_faster_than_recomputing_its_window() -> None:
    assert decoding.measure(repeats=3)["ratio"] >= 20


def test_the_page_has_what_the_command_prints() -> None:
    """The scaling tables in docs/performance.md."""
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text().splitlines()
    assert [line for share in scaling.SHARES for line in scaling.table(share) if line not in page] == []


def test_the_frontier_has_every_run_of_both_kinds_of_files(tmp_path: Path) -> None:
    """What `race` wrote, and for the hour `compare`: the files of results/races."""
    results = Path(__file__).parents[2] / "results/races"
    files = [json.loads((results / f"race-{budget}.json").read_bytes()) for budget in ("1min", "10min", "hour")]
    found = frontier.points(files)
    assert {model: {minutes: len(runs) for minutes, runs in budgets.items()} for model, budgets in found.items()} == {
        model: {1: 3, 10: 3, 60: 1} for model in ("compressive_transformer", "transformer_xl", "wavenet")
    }
    assert [round(np.mean(found["wavenet"][minutes]), 3) for minutes in (1, 10, 60)] == [2.085, 1.887, 1.789]
    frontier.draw(tmp_path / "frontier.png", files)
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
