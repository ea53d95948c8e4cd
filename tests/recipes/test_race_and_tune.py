"""`python -m recipes race` and `tune`: the verbs of `waveform` of these names, on text."""

from pathlib import Path

import pytest

from recipes.text import Text
from tests.recipes.calling import Capsys, figures_of, mistake
from waveform.runs.space import space_of

SHORT = ["preset=smoke", "train.max_steps=3", "train.log_every=1", "train.device=cpu"]


@pytest.mark.slow
def test_a_race_is_in_bits_per_byte_and_by_rows(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    race = ["race", data, tmp_path / "runs", "--seeds", 2, "--rows", 6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("waveform.runs.opened.choose_device", {"cpu": "cpu"}.__getitem__)  # as trained
        figures = figures_of(tmp_path / "race.json", *race, *SHORT, "seed=3")
    compressive, other = figures["models"]
    assert other["difference_nats"] is None and compressive["difference_nats"] is not None
    for metric in ("nats_per_token", "bits_per_byte"):
        assert compressive[metric]["seeds"] == [figures["runs"][i][metric] for i in (0, 2)]
    out = capsys.readouterr().out
    assert all(words in out for words in ("bits per byte", "nats/token [pieces] [seeds]", "95% intervals over pieces"))
    one = figures_of(tmp_path / "one.json", "evaluate", figures["runs"][0]["run"], "--rows", 6)
    assert one["nats_per_token"] == compressive["nats_per_token"]["seeds"][0]


@pytest.mark.slow
def test_trials_are_scored_as_evaluate_scores_them(data: Path, tmp_path: Path) -> None:
    """By one stream, where state is carried from one document to the next."""
    settings = ["model=transformer_xl", "preset=smoke", "train.device=cpu", "train.state=carry"]
    search = ["tune", data, tmp_path / "search", "--trials", 1, "--budget", "0.3s", *settings]
    (trial,) = figures_of(tmp_path / "trials.json", *search)
    evaluated = figures_of(tmp_path / "e.json", "evaluate", trial["run"], "--split", "valid")
    assert evaluated["protocol"] == "carry" and evaluated["nats_per_token"] == trial["nats_per_token"]


@pytest.mark.parametrize("model", ["compressive_transformer", "transformer_xl"])
def test_every_choice_of_a_space_can_be_trained(model: str) -> None:
    """And the two models' contexts have as many slots."""
    space = space_of(model, packages=Text.family.packages)
    slots = []
    for context in space.dimensions["context"].values():
        assert context["train.chunk"] == context["model.window"]
        slots.append((context["model.window"], context["model.memory"] + context.get("model.compressed", 0)))
    assert slots == [(32, 64), (32, 128), (64, 128)]


def test_mistakes_get_one_line(data: Path, tmp_path: Path) -> None:
    assert "runs' is not a key=value setting" in mistake(["race", "ptb", data, tmp_path / "runs"])
    assert "search' is not a key=value setting" in mistake(["tune", "ptb", data, tmp_path / "search"])
    assert "without a search space" in mistake(["tune", data, tmp_path / "search", "model=wavenet"])
    assert not (tmp_path / "runs").exists()
