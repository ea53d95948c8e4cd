"""`waveform race`: its table, JSON and picture, what it resumes, and its warnings of a machine that was not idle."""

from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

import waveform
from tests.calling import Capsys, cli, figures_of, interrupt_training, mistake, prepared_tones
from waveform.cli import main
from waveform.runs.speeds import speeds_of, waited_share, warnings_of
from waveform.verbs.race import Entrants

STEPS = [
    *("preset=demo", "train.device=cpu", "train.batch_size=2", "train.chunk=64", "train.log_every=1"),
    *("train.checkpoint_every=100", "train.evaluate_tokens=200", "train.max_seconds=null", "train.max_steps=3"),
]


@pytest.fixture(scope="module", name="data")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_tones(tmp_path_factory.mktemp("race"), train=2, valid=1, test=5, seconds=0.02)


def weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / "step_00000003" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_race_of_two_seeds(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    command = ["race", data, tmp_path / "runs", "--seeds", 2, "--models", "wavenet", "transformer_xl"]
    figures = figures_of(tmp_path / "race.json", *command, "--plot", tmp_path / "race.png", *STEPS, "seed=3")
    out = capsys.readouterr().out
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    names = ["wavenet-3", "transformer_xl-3", "wavenet-4", "transformer_xl-4"]
    assert [Path(run["run"]).name for run in figures["runs"]] == names
    assert all(run["learning_curve"]["steps"] == [1, 2, 3] for run in figures["runs"])
    wavenet, attention = figures["models"]
    assert wavenet["difference_nats"] is None and wavenet["seeds"] == [3, 4]
    nll, difference = attention["nats_per_token"], attention["difference_nats"]
    assert nll["seeds"] == [figures["runs"][i]["nats_per_token"] for i in (1, 3)]
    assert difference["seeds"] == pytest.approx(
        [a - b for a, b in zip(nll["seeds"], wavenet["nats_per_token"]["seeds"], strict=True)]
    )
    for figure in (nll, difference):
        low, high = figure["interval_95_over_utterances"]
        assert low < figure["mean"] < high
        low, high = figure["interval_95_over_seeds"]
        assert low < figure["mean"] < high
    assert attention["train_tokens_seen"]["seeds"] == [run["train_tokens_seen"] for run in figures["runs"][1::2]]
    (row,) = (line for line in out.splitlines() if line.startswith("transformer_xl "))
    assert f"{nll['mean']:.4f} [" in row and f"{difference['mean']:+.4f} [" in row and row.count("[") == 4
    assert "over 2 seeds" in out and "uneven" not in out
    assert figures["warnings"] == [line for line in out.splitlines() if line.startswith("warning")]

    before = {name: (tmp_path / "runs" / name / "config.yaml").read_text() for name in names}
    trained = {name: weights(tmp_path / "runs" / name) for name in names}
    again = waveform.race(data, tmp_path / "runs", [*STEPS, "seed=3"], entrants=Entrants(["wavenet"], 2))
    assert again["runs"] == [figures["runs"][0], figures["runs"][2]]
    assert before == {name: (tmp_path / "runs" / name / "config.yaml").read_text() for name in names}
    for name in names[:2]:
        model = name.partition("-")[0]
        cli("train", data, tmp_path / "alone" / model, f"model={model}", *STEPS, "seed=3")
        assert weights(tmp_path / "alone" / model) == trained[name]


def test_without_the_baseline_others_are_compared_with_the_first(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    race = ["race", data, tmp_path / "runs", "--models", "transformer_xl", "lstm", *STEPS]
    first, second = figures_of(tmp_path / "race.json", *race)["models"]
    assert first["difference_nats"] is None and second["difference_nats"] is not None
    assert "vs transformer_xl, nats" in capsys.readouterr().out


def test_a_stopped_race_continues(data: Path, tmp_path: Path, capsys: Capsys, monkeypatch: MonkeyPatch) -> None:
    command = ["race", str(data), str(tmp_path / "runs"), "--models", "wavenet", "transformer_xl", *STEPS]
    updates = interrupt_training(monkeypatch, at=2)
    monkeypatch.setattr("waveform.runs.opened.choose_device", {"cpu": "cpu"}.__getitem__)  # as trained
    assert main(command) == 130
    assert "race: stopped by SIGINT; the same command continues\n" in capsys.readouterr().err
    assert main(command) == 0 and len(updates) == 6
    assert "one seed" in capsys.readouterr().out


def trained(speeds: list[float], *, waited: float | None = None) -> dict[str, Any]:
    return {"train_tokens_per_second_by_slice": speeds, "train_waited_share": waited}


def test_speeds_are_of_the_log_and_a_steady_run_is_not_warned_of() -> None:
    records = [{"kind": "train", "step": i, "seconds": 1.5 * i, "tokens_seen": 100 * i} for i in range(1, 24)]
    speeds = speeds_of(records)
    assert speeds == pytest.approx([200 / 3] * 11)
    assert warnings_of({"a": trained(speeds), "b": trained([speed / 2 for speed in speeds])}) == []
    assert warnings_of({"a": trained([1.0] * 3 + [9.0] * 4)}) == []  # too few to say
    (line,) = warnings_of({"a": trained([1.0] * 3 + [9.0] * 6)}, unit="token")
    assert "tokens/s" in line and "more tokens" in line and "sample" not in line


def test_a_machine_that_was_not_idle_is_warned_of() -> None:
    """One run was slowed for half of its time, the other one not."""
    uneven, alike = warnings_of({"a": trained([100.0] * 10 + [30.0] * 10), "b": trained([200.0] * 20)})
    assert "a was trained at uneven speed: a quarter of its slices below 30 samples/s" in uneven
    assert "other programs slowed the runs unequally: a had 65% of its undisturbed speed, b 100%" in alike


def test_a_run_that_waited_for_a_core_is_warned_of() -> None:
    """Work that goes on evenly slows all slices alike, and shows here only."""
    limited = {"max_seconds": 20.0}
    assert waited_share([], limited) is None
    records = [{"kind": "train", "step": i, "seconds": 2.0 * i, "waited_s": 0.5} for i in range(1, 9)]
    assert waited_share(records, limited) == 0.25
    for costs_nothing in ({"max_seconds": None}, {**limited, "count_waiting": False}):
        assert waited_share(records, costs_nothing) is None
    shares = {"a": 0.25, "b": 0.05, "c": None, "d": 0.5}
    (line,) = warnings_of({name: trained([1.0] * 9, waited=share) for name, share in shares.items()})
    assert "waited for a core" in line and "(a 25%, d 50% of the time)" in line


def test_mistakes_get_one_line(data: Path, tmp_path: Path) -> None:
    command = ["race", data, tmp_path / "runs", *STEPS]
    assert "--seeds is 0" in mistake([*command, "--seeds", "0"])
    assert mistake([*command, "--rows", "0"]).endswith("--rows is 0; it must be a whole number of at least 1")
    for model in ("model=wavenet", "+model=wavenet"):
        assert "name them with --models" in mistake([*command, model])
    assert "wavnet" in mistake([*command, "--models", "wavnet"])
    assert "unknown setting 'trian.lr'" in mistake([*command, "trian.lr=1"])
    chunks = "the state of these runs would be reset at different places, by chunk of 256 and by chunk of 64"
    assert chunks in mistake([*command[:3], "preset=demo", "train.state=chunk"])
    assert "seed is 2147483648" in mistake([*command, "--seeds", "2", "seed=2147483647"])
    assert "are both null; set one" in mistake([*command, "train.max_steps=null"])
    (tmp_path / "config.yaml").touch()
    assert "is a run; give a folder for the race" in mistake(["race", data, tmp_path, *STEPS])
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
