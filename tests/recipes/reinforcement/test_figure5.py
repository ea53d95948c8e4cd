"""Figure 5's study: which delay it chooses, and the whole of it at the smallest size."""

import json
from pathlib import Path

import pytest

from recipes.reinforcement import figure5
from recipes.reinforcement.settings import compose_config
from recipes.studies.children import Children
from tests.recipes.calling import mistake, run


def call(children: Children, *arguments: str) -> None:
    run(*arguments)


def test_the_longest_way_ends_beyond_transformer_xls_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the default preset: Transformer-XL sees 16 slots and its window of 8, rate 4 at least 40 steps."""
    assert figure5._task(()) == ("task.delay=24", "task.shortest_delay=0", "task.episode=192")
    for label, chosen in figure5.VARIANTS.items():
        model = compose_config("object_matching", chosen)["model"]
        slots = model.get("memory", 0) + model.get("compressed", 0)
        assert slots == (0 if label == "lstm" else 16)
    line = mistake(["study", "figure5", tmp_path / "a", "model.window=64", "train.chunk=64"], capsys)
    assert "figure5 needs a delay" in line and not (tmp_path / "a").exists()
    assert "has no data: give OUT_DIR alone" in mistake(["study", "figure5", "a", "b"], capsys)
    assert "needs two paths" in mistake(["study", "table5", "a"], capsys)


@pytest.mark.slow
def test_the_study_trains_draws_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Children, "call", call)
    few = {name: figure5.VARIANTS[name] for name in ("rate_4", "transformer_xl", "lstm")}
    monkeypatch.setattr(figure5, "VARIANTS", few)
    settings = ["preset=smoke", "train.max_steps=6"]
    run("study", "figure5", tmp_path / "out", *settings, "--seeds", 1, "--jobs", 1)
    summary = json.loads((tmp_path / "out" / "figure5.json").read_bytes())
    assert set(summary["figures"]) == {"rate_4", "transformer_xl", "lstm"}
    for row in summary["figures"].values():
        assert len(row["return"]["seeds"]) == 1
        assert list(row["by_delay"]) == ["1", "2", "4", "6", "8"]
    assert (tmp_path / "out" / "figure5.png").stat().st_size > 1000
    (weights,) = (tmp_path / "out" / "lstm-0" / "checkpoints").glob("*/model.safetensors")
    written = weights.stat().st_mtime_ns
    run("study", "figure5", tmp_path / "out", *settings, "--seeds", 1, "--jobs", 1)
    assert json.loads((tmp_path / "out" / "figure5.json").read_bytes()) == summary
    assert weights.stat().st_mtime_ns == written
