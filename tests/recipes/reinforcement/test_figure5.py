"""Figure 5's study: which delay it chooses, and the whole of it at the smallest size."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from recipes.plots import _draw_places
from recipes.reinforcement import GYMNASIUM, OBJECT_MATCHING, evaluation, figure5
from recipes.reinforcement.settings import compose_config
from recipes.studies.children import Children, StudyConfig
from tests.recipes.calling import Capsys, mistake, run


def call(children: Children, *arguments: str) -> None:
    """A study's call in this process; agents play four episodes."""
    run(*arguments, *(["--episodes", 4] if arguments[0] == "evaluate" else []))


def test_the_longest_way_ends_beyond_transformer_xls_reach(tmp_path: Path) -> None:
    """At the default preset: Transformer-XL sees 16 slots and its window of 8, rate 4 at least 40 steps."""
    settings = figure5.study_of_agents((), StudyConfig()).variants["rate_4"]
    assert list(settings)[:3] == ["task.delay=24", "task.shortest_delay=0", "task.episode=192"]
    line = mistake(["study", "figure5", tmp_path / "a", "model.window=64", "train.chunk=64"])
    assert "figure5 needs a delay" in line and not (tmp_path / "a").exists()
    for arguments, words in (
        (["figure5", "a", "b"], "has no data: give OUT_DIR alone"),
        (["table5", "a"], "needs two paths"),
        (["table5", "a", "b", "--envs", "x"], "study table5 has no option --envs"),
        (["figure5", "a", "--agents", "x"], "there is no agent 'x' in figure5; choose from"),
        (["figure5", "a", "model.memory=[2,4]"], "model.memory is [2, 4]; a study needs one number"),
        (
            ["figure5", "a", "model.compression_rate=8", "--agents", "rate_1"],
            "study figure5 sets model.compression_rate itself",
        ),
        (["figure5", "a", "--envs", "x"], "--envs is for Gymnasium"),
    ):
        assert words in mistake(["study", *arguments])


def slots_and_window(settings: Sequence[str]) -> tuple[int, int | None]:
    model = compose_config(OBJECT_MATCHING, settings)["model"]
    return model.get("memory", 0) + model.get("compressed", 0), model.get("window")


def test_every_agent_has_the_slots_that_were_asked_for() -> None:
    sizes = ["model.window=4", "model.memory=2", "model.compressed=3", "train.lr=1e-3"]
    for given, size in (([], (16, 8)), (sizes, (5, 4)), (["model.memory=2"], (10, 8))):
        agents = figure5.study_of_agents(given, StudyConfig()).variants
        found = {label: slots_and_window(chosen) for label, chosen in agents.items()}
        assert found == {label: (0, None) if label == "lstm" else size for label in figure5.VARIANTS}
        assert all(("train.lr=1e-3" in chosen) == ("train.lr=1e-3" in given) for chosen in agents.values())


def test_chance_is_drawn_of_two_objects_alone() -> None:
    for place, num_lines in (("3", 2), ("CartPole-v1", 1)):
        axes = Figure().add_subplot()
        _draw_places(axes, {"ct": {place: [0.9]}})
        assert len(axes.lines) == num_lines


@pytest.mark.slow
def test_the_study_trains_draws_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Children, "call", call)
    monkeypatch.setattr(evaluation, "choose_device", {"cpu": "cpu"}.__getitem__)  # as trained
    few = ["--seeds", 1, "--jobs", 1, "--agents", "lstm", "transformer_xl", "rate_4"]
    study = ["study", "figure5", tmp_path / "out", "preset=smoke", "train.max_steps=6", "train.device=cpu", *few]
    run(*study)
    summary = json.loads((tmp_path / "out" / "figure5.json").read_bytes())
    assert set(summary["figures"]) == {"rate_4", "transformer_xl", "lstm"}
    for row in summary["figures"].values():
        assert len(row["return"]["seeds"]) == 1
        assert list(row["by_delay"]) == ["1", "3", "6", "9", "12"]
    assert (tmp_path / "out" / "figure5.png").stat().st_size > 1000
    (weights,) = (tmp_path / "out" / "lstm-0" / "checkpoints").glob("*/model.safetensors")
    written = weights.stat().st_mtime_ns
    run(*study)
    assert json.loads((tmp_path / "out" / "figure5.json").read_bytes()) == summary
    assert weights.stat().st_mtime_ns == written


@pytest.mark.slow
def test_the_study_of_gymnasium_evaluates_in_other_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    pytest.importorskip("minigrid")
    monkeypatch.setattr(Children, "call", call)
    others = ["MiniGrid-Empty-6x6-v0", "MiniGrid-Empty-Random-6x6-v0"]
    env = ["env=MiniGrid-Empty-5x5-v0", "env_options={disable_env_checker:true}"]
    study = ["study", "figure5", tmp_path / "out", "preset=smoke", "train.max_steps=2", *env]
    few = ["--seeds", 1, "--jobs", 1, "--agents", "rate_4", "lstm", "--envs"]
    assert "env=CartPole-v1 shows other observations" in mistake([*study, *few, "CartPole-v1"])
    assert not (tmp_path / "out").exists()
    run(*study, *few, others[0])
    run(*study, *few, *others)  # trained already, but not evaluated there
    summary = json.loads((tmp_path / "out" / "figure5.json").read_bytes())
    assert summary["recipe"] == GYMNASIUM and "MiniGrid-Empty-5x5-v0" in summary["title"]
    assert [list(row["by_env"]) for row in summary["figures"].values()] == [others, others]
    assert others[1] in capsys.readouterr().out
    assert (tmp_path / "out" / "figure5.png").stat().st_size > 1000
