"""The picture of NLL against training time has every run of both kinds of files that it reads."""

from pathlib import Path

from tests.benchmarks.frontier import draw, points


def _run(model: str, seconds: float, nats: float) -> dict[str, object]:
    return {"model": model, "train_seconds": seconds, "nats_per_token": nats}


_RACE = {"runs": [_run("wavenet", 60.3, 2.1), _run("wavenet", 59.8, 2.2), _run("transformer_xl", 60.0, 2.0)]}
_COMPARISON = [_run("wavenet", 601.0, 1.9)]


def test_runs_are_grouped_by_model_and_minutes() -> None:
    assert points([_COMPARISON, _RACE]) == {"wavenet": {1: [2.1, 2.2], 10: [1.9]}, "transformer_xl": {1: [2.0]}}


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw(tmp_path / "frontier.png", [_RACE, _COMPARISON])
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
