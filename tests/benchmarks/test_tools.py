"""The tools of this folder, and that decoding by steps is worth its code."""

from pathlib import Path

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
    def run(model: str, seconds: float, nats: float) -> dict[str, object]:
        return {"model": model, "train_seconds": seconds, "nats_per_token": nats}

    race = {"runs": [run("wavenet", 60.3, 2.1), run("wavenet", 59.8, 2.2), run("transformer_xl", 60.0, 2.0)]}
    files = [[run("wavenet", 601.0, 1.9)], race]
    assert frontier.points(files) == {"wavenet": {1: [2.1, 2.2], 10: [1.9]}, "transformer_xl": {1: [2.0]}}
    frontier.draw(tmp_path / "frontier.png", files)
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
