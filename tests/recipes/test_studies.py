"""Studies: the settings of the papers' tables at any preset, what is made of their runs, and that they continue."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from recipes.studies.catalogue import STUDIES, find_study
from recipes.studies.report import InTraining, Row, Rows, Sizes
from recipes.text import compose_config
from tests.recipes.calling import Capsys, mistake, run
from tests.recipes.conftest import Calls
from waveform.system.errors import UserError


def composed(name: str, overrides: list[str]) -> dict[str, dict[str, Any]]:
    chosen = find_study(name)
    config = compose_config("enwik8", overrides)
    return {label: compose_config("enwik8", [*overrides, *chosen.settings(label, config)]) for label in chosen.variants}


@pytest.mark.slow
def test_table_5_is_each_function_at_three_rates() -> None:
    configs = composed("table5", ["preset=smoke"])
    shared = compose_config("enwik8", ["preset=smoke"])["train"]
    kinds = {"conv_bptt": ("conv", "none"), "conv_autoencode": ("conv", "autoencode")}
    for label, config in configs.items():
        file, rate = label.split("-rate_")
        model, train = config["model"], config["train"]
        kind = kinds.get(file, (file, "attention"))
        assert (model["compression"], model["compression_loss"], model["compression_rate"]) == (*kind, int(rate))
        if file == "conv_bptt":  # through twice as many windows of half the rows
            assert (train["unroll"], train["chunk"]) == (2 * shared["unroll"], 2 * shared["chunk"])
            train = train | {name: shared[name] for name in ("unroll", "chunk")}
            train["batch_size"] *= 2
        assert train == shared
    assert len(configs) == 21


@pytest.mark.slow
def test_figure_3_is_every_curve_at_the_same_share_of_the_steps() -> None:
    steps = 200
    here, short = (composed("figure3", [f"preset={each}", f"train.max_steps={steps}"]) for each in ("smoke", "paper"))
    paper = composed("figure3", ["preset=paper"])
    axis = max(config["train"]["max_steps"] for config in paper.values())
    assert len(here) >= 4
    for label, config in [*here.items(), *short.items()]:
        published, train = paper[label]["train"], config["train"]
        assert config["model"]["num_layers"] == {"smoke": 2, "paper": 24}[config["preset"]]
        for field in ("max_steps", "lr_change_at", "update_period_from"):
            if published[field] is None:
                assert train[field] is None
            else:
                assert train[field] / steps == pytest.approx(published[field] / axis, abs=0.5 / steps)
        assert (train["lr_after"], train["update_period"]) == (published["lr_after"], published["update_period"])


@pytest.mark.slow
def test_updates_become_rare_at_the_papers_share_of_the_steps() -> None:
    """60,000 of 104,000 steps, every 4 steps from then on; the other run never."""
    here = composed("rare_updates", ["preset=smoke", "train.max_steps=520"])
    paper = composed("rare_updates", ["preset=paper"])
    for configs, start in ((here, 300), (paper, 60_000)):
        rare = configs["every_4_steps"]["train"]
        assert (rare["update_period"], rare["update_period_from"]) == (4, start)
        assert configs["every_step"]["train"]["update_period"] == 1
        assert {config["model"]["name"] for config in configs.values()} == {"transformer_xl"}


@pytest.mark.slow
def test_ablations_are_table_6s() -> None:
    """Recurrence, encoding and loss of each row, in the paper's order."""
    configs = composed("txl_table6", ["preset=cpu"])
    fields = [(c["model"]["memory"] > 0, c["model"]["position"], c["train"]["loss_share"]) for c in configs.values()]
    assert fields == [
        (True, "relative", 1), (True, "shaw", 1), (True, "relative", 0.5), (False, "relative", 1),
        (False, "relative", 0.5), (False, "shaw", 1), (False, "shaw", 0.5), (False, "absolute", 0.5),
        (False, "learned", 0.5),
    ]  # fmt: skip
    report = find_study("txl_table6").report
    assert isinstance(report, Rows)
    assert [label for row in report.rows.values() for label in row.candidates] == list(configs)


def test_without_memory_windows_overlap_and_with_it_longer_ones_are_tried() -> None:
    """Cut end to end, the first tokens of a window would have no context."""
    report = Rows({}, "", by_attention=True)
    assert report.commands({"model": {"memory": 0, "window": 64}}) == {"test": ["evaluate", "--stride", "8"]}
    recurrent = report.commands({"model": {"memory": 128, "window": 64}})
    assert recurrent == {"test": ["evaluate"], "sizes": ["sweep", "--memory", "64,128,256,512"]}


def scored(bits: float) -> dict[str, Any]:
    known = {"headline": "bits_per_byte", "recipe": "folder", "num_parameters": 9, "train_tokens_seen": 7}
    return known | {"bits_per_byte": bits}


def test_ablations_are_summarised_with_the_best_memory() -> None:
    with_memory = [
        {"test": scored(2.0), "sizes": {"chosen": {"bits_per_byte": 1.5, "memory": 64}}},
        {"test": scored(4.0), "sizes": {"chosen": {"bits_per_byte": 2.5, "memory": 128}}},
    ]
    without = [{"test": scored(5.0)}] * 2
    rows = {"with": Row({"a": ""}, (27.0, 26.8)), "without": Row({"b": ""}, (30.0,))}
    report = Rows(rows, "perplexity", by_attention=True)
    summary = report.summarise({"a": with_memory, "b": without})
    entry = summary["rows"]["with"]
    assert (entry["test"]["mean"], entry["test_with_best_memory"]["mean"]) == (3, 2)
    first, second = report.table(summary).splitlines()[2:4]
    assert "64 or 128" in first and first.endswith("27, 26.8") and second.endswith("30")


def test_sizes_are_the_papers_shares() -> None:
    tried = Sizes("compressed", trained=1152, tried=(512, 1024, 4096))
    assert tried.scaled(1152) == [512, 1024, 1152, 4096]
    assert tried.scaled(9) == [4, 8, 9, 32]
    assert tried.scaled(1) == [1, 4]


def test_a_row_is_the_best_of_its_candidates_on_validation() -> None:
    """Chosen on the test split, the row would be the other candidate."""
    report = Rows({"row": Row({"a": "c = 2", "b": "c = 3"}, (0.9,))}, "bits")
    a, b = (
        [{"valid": scored(valid), "test": scored(test)} for valid, test in seeds]
        for seeds in ([(2, 1), (4, 1)], [(2, 3), (3, 5)])
    )
    summary = report.summarise({"a": a, "b": b})
    row = summary["rows"]["row"]
    assert (row["best"], row["test"]["mean"], row["published"]) == ("c = 3", 4, [0.9])
    half = 12.706 * math.sqrt(2) / math.sqrt(2)  # Student's t with one degree of freedom
    assert row["test"]["interval_95"] == pytest.approx([4 - half, 4 + half], rel=1e-3)
    assert report.table(summary).splitlines()[2].split()[-1] == "0.9"


def test_training_is_averaged_over_its_last_tenth(tmp_path: Path) -> None:
    steps = list(range(10, 201, 10))
    known = scored(3.0) | {"train_steps": steps}
    seeds = [known | {"train_bits": [100.0] * 18 + [first, second]} for first, second in ((1.0, 3.0), (5.0, 7.0))]
    entry = InTraining({}, "").summarise({"label": seeds})["variants"]["label"]
    assert entry["train_bits_at_the_end"]["seeds"] == [2, 6]
    assert entry["train_bits"] == [100] * 18 + [3, 5]
    seeds[1] |= {"train_steps": [*steps, 210], "train_bits": [*seeds[1]["train_bits"], 9.0]}  # it came further
    entry = InTraining({}, "").summarise({"label": seeds})["variants"]["label"]
    assert entry["train_bits"] == [100] * 18 + [3, 5] and entry["train_steps"] == steps
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"no record of training to draw; train anew with a lower train\.log_every"):
        InTraining({}, "").read(tmp_path, {"test": known})


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


@pytest.mark.slow
def test_a_study_continues(data: Path, tmp_path: Path, calls: Calls, capsys: Capsys) -> None:
    """Nothing is scored twice, unless the run has moved on or rows differ."""
    out = tmp_path / "study"
    command = ["study", "table8", data, out, "preset=smoke", "train.evaluate_tokens=0", "train.device=cpu"]
    rows = ["--rows", 8]
    run(*command, "train.max_steps=2", *rows)
    assert [call[0] for call in calls] == ["train", "sweep"] * 2
    assert all(call[-2:] == ("--device", "cpu") for call in calls[1::2])
    models = read(out / "table8.json")["figures"]["models"]
    printed = capsys.readouterr().out
    for model, (field, trained, sizes) in {
        "compressive_transformer": ("compressed", 8, [4, 7, 8, 14, 21, 28]),
        "transformer_xl": ("memory", 24, [11, 24, 32, 43, 53]),
    }.items():
        entry = models[model]
        assert (entry["swept"], entry["trained"], [at["size"] for at in entry["valid"]]) == (field, trained, sizes)
        best = min(entry["valid"], key=lambda at: at["mean"])["size"]
        assert entry["chosen"] == [best] and f"chosen: {best}" in printed
        run("evaluate", out / f"{model}-0", f"--{field}", best, *rows, "--json", tmp_path / "e.json")
        assert entry["test"]["seeds"] == [read(tmp_path / "e.json")["bits_per_byte"]]
    assert (out / "table8.png").read_bytes().startswith(b"\x89PNG")
    calls.clear()
    run(*command, "train.max_steps=2", *rows)
    assert [call[0] for call in calls] == ["train"] * 2
    run(*command, "train.max_steps=3", *rows)
    assert [call[0] for call in calls[2:]] == ["train", "sweep"] * 2
    run(*command, "train.max_steps=3", "--rows", 4, "--json", tmp_path / "rows.json")
    assert [call[0] for call in calls[6:]] == ["train", "sweep"] * 2
    assert read(tmp_path / "rows.json")["rows"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table5", "figure3"])
def test_every_study_ends_with_a_table_and_a_picture(
    name: str, data: Path, tmp_path: Path, calls: Calls, capsys: Capsys, monkeypatch: MonkeyPatch
) -> None:
    """Of Table 5 two rows at two rates, of Figure 3 two curves: the others are made alike, and tested above."""
    chosen, report = STUDIES[name], STUDIES[name].report
    labels = list(chosen.variants)[:2]
    if isinstance(report, Rows):
        rows = {key: Row(dict(list(row.candidates.items())[:2]), (1,)) for key, row in list(report.rows.items())[:2]}
        report, labels = replace(report, rows=rows), [label for row in rows.values() for label in row.candidates]
    variants = {label: chosen.variants[label] for label in labels}
    monkeypatch.setitem(STUDIES, name, replace(chosen, variants=variants, report=report))
    out = tmp_path / "study"
    command = ["study", name, data, out, "preset=smoke", "train.max_steps=4", "train.log_every=1", "--rows", 8]
    run(*command, "train.evaluate_tokens=0", "seed=3")
    assert (out / f"{labels[0]}-3").is_dir()
    made = read(out / f"{name}.json")["figures"]["rows" if name == "table5" else "variants"]
    printed = capsys.readouterr().out
    assert all(row in printed for row in made) and len(made) == 2
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("table50", [], "no study 'table50'; choose one of recall, table5"),
        ("table50", [], "txl_table7, figure5"),
        ("recall", [], "needs data prepared as recall"),
        ("figure3", [], "limit the steps, for example train.max_steps=1000"),
        ("table8", ["--rows", 0], "--rows is 0"),
        ("table8", ["preset=smoke", "model.memory=[16,8]"], "model.memory is [16, 8]; a study needs one number"),
        ("table8", ["train.lrr=1"], "train.lrr"),
        ("table5", ["preset=smoke", "model.compression=max"], "study table5 sets model.compression itself; leave it"),
        ("figure3", ["preset=smoke", "train.max_steps=9", "train.lr_change_at=2"], "sets train.lr_change_at itself"),
        ("rare_updates", ["preset=smoke", "model=compressive_transformer"], "study rare_updates sets model itself"),
        ("table5", ["--jobs", 1 << 40], f"--jobs is {1 << 40}; it must be a whole number from 1 to 65536"),
    ],
)
def test_mistakes_are_one_line(name: str, options: list[Any], part: str, data: Path, tmp_path: Path) -> None:
    assert part in mistake(["study", name, data, tmp_path / "out", *options])
    assert not (tmp_path / "out").exists()


def test_a_run_is_no_folder_for_a_study(data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert "is a run; give a folder for the study" in mistake(["study", "figure3", data, tmp_path, "preset=smoke"])
