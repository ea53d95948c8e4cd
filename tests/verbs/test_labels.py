"""Labels of utterances as a user meets them: prepare, train, sample, evaluate, compare, report, export, --from."""

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

import waveform
from tests.audio.conftest import write_audio
from tests.calling import Capsys, cli, config_of, figures_of, mistake, pcm_of, settings
from waveform.audio.files import read_audio
from waveform.engine.sampler import SamplingConfig
from waveform.runs.opened import find_saved
from waveform.runs.scoring import EvaluateOptions
from waveform.speech.figures import by_label_rows

evaluate = partial(waveform.evaluate, show_progress=False)
SPEAKERS = ("ann", "bob b.", "ümit")
MODEL = "wavenet"
SETTINGS = [
    *(*settings(MODEL), "train.lr=0.05", "train.warmup_steps=0", "train.batch_size=4"),  # each label is read
    "model.prediction=none",  # beside which a label of such short sounds changes hardly anything
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Audio of three speakers, and of one more for the test; labelled data, and runs with and without its labels."""
    place = tmp_path_factory.mktemp("place")
    audio = place / "audio"
    paths = [audio / split / speaker / "a.wav" for split in ("train", "valid", "test") for speaker in SPEAKERS]
    paths += [audio / "test" / "zoe" / "a.wav", audio / "test" / "zoe" / "b.wav", audio / "test" / "a.wav"]
    for seed, path in enumerate(paths):
        write_audio(path, seed=seed, duration_s=0.1)
    cli("prepare", place / "audio", place / "data", "data.labels=folder")
    cli("train", place / "data", place / "run", *SETTINGS)
    cli("train", place / "data", place / "plain", *SETTINGS, "data.labels=none")
    return place


@pytest.fixture(scope="module")
def bare(place: Path) -> Path:
    """data/, the same audio without labels, and run/, trained on it."""
    bare = place / "bare"
    cli("prepare", place / "audio", bare / "data")
    cli("train", bare / "data", bare / "run", *SETTINGS)
    return bare


def test_a_run_knows_the_labels_of_its_training_data(place: Path) -> None:
    assert config_of(place / "run")["dataset"]["labels"] == list(SPEAKERS)  # zoe is only in the test split
    assert waveform.load(place / "run").labels == list(SPEAKERS)
    plain = config_of(place / "plain")
    assert "labels" not in plain["dataset"] and sorted(plain["dataset"]["checksums"]) == ["test", "train", "valid"]
    labelled, unlabelled = (evaluate(place / run)["num_parameters"] for run in ("run", "plain"))
    assert labelled - unlabelled == 4 * 8  # a vector of 8 for each speaker and for unknown ones


def test_sample_by_label(place: Path, tmp_path: Path) -> None:
    common = ["sample", place / "run", "--seconds", 0.02, "--seed", 3, "--num", 2]
    cli(*common, "--out", tmp_path / "one", "--label", "bob b.")
    cli(*common, "--out", tmp_path / "each", "--label", "each")
    cli(*common, "--out", tmp_path / "none")
    begin = f"{MODEL}_step6_seed3"
    names = [f"{begin}_{speaker}_{i}.wav" for speaker in SPEAKERS for i in range(2)]
    assert sorted(path.name for path in (tmp_path / "each").iterdir()) == sorted(names)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [f"{begin}_bob b._{i}.wav" for i in range(2)]
    assert sorted(path.name for path in (tmp_path / "none").iterdir()) == [f"{begin}_{i}.wav" for i in range(2)]
    run = waveform.load(place / "run")
    from_python = run.sample(num=2, seconds=0.02, sampling=SamplingConfig(seed=3), labels=["bob b."] * 2)
    pcm = np.frombuffer(pcm_of(tmp_path / "one" / f"{begin}_bob b._1.wav"), dtype="<i2")
    np.testing.assert_allclose(pcm / 32767, from_python[1], atol=1e-4)


def test_labels_change_sound_and_nll(place: Path) -> None:
    run = waveform.load(place / "run")
    audio = np.random.default_rng(0).uniform(-0.5, 0.5, 300).astype(np.float32)
    nlls = [run.nll(audio, sample_rate_hz=24_000, label=label) for label in (None, *SPEAKERS)]
    assert len({nll.tobytes() for nll in nlls}) == 4
    with pytest.raises(waveform.UserError, match=r"has no label 'bob'; of its 3, try bob b\."):
        run.nll(audio, sample_rate_hz=24_000, label="bob")


def test_evaluate_by_label(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    figures = figures_of(tmp_path / "e.json", "evaluate", place / "run")
    by_label = {entry.pop("label"): entry for entry in figures["nll_by_label"]}
    assert by_label.keys() == {*SPEAKERS, "zoe", None}
    assert {label: entry["num_utterances"] for label, entry in by_label.items()} == {
        "zoe": 2, "ann": 1, "bob b.": 1, "ümit": 1, None: 1
    }  # fmt: skip
    total = sum(entry["num_tokens"] * entry["nats_per_token"] for entry in by_label.values())
    assert total / figures["num_tokens"] == pytest.approx(figures["nats_per_token"])
    out = capsys.readouterr().out
    for label, entry in by_label.items():
        shown = label or "(unlabelled)"
        pattern = rf"^{re.escape(shown)} +{entry['num_utterances']} +{entry['nats_per_token']:.4f}$"
        assert re.search(pattern, out, re.MULTILINE)
    run = waveform.load(place / "run")
    audio = read_audio(next((place / "audio" / "test" / "ann").iterdir()), sample_rate_hz=24_000)
    own, other = (run.nll(audio, sample_rate_hz=24_000, label=label).mean(dtype=float) for label in ("ann", None))
    assert by_label["ann"]["nats_per_token"] == pytest.approx(own, rel=1e-5) != pytest.approx(other, rel=1e-4)


def test_pieces_keep_the_labels_of_their_utterances(place: Path) -> None:
    """And linear prediction alone begins each piece anew, as the run does."""
    whole, pieces = (evaluate(place / "run", EvaluateOptions(rows=rows)) for rows in (None, 8))
    one, other = (
        {entry["label"]: (entry["num_tokens"], entry["num_utterances"]) for entry in figures["nll_by_label"]}
        for figures in (whole, pieces)
    )
    assert one == other and pieces["state"] != whole["state"]
    assert pieces["linear_prediction_nats_per_token"] > whole["linear_prediction_nats_per_token"]
    assert pieces["num_utterances"] == whole["num_utterances"] and pieces["data_checksum"] == whole["data_checksum"]


def test_many_labels_are_cut_short() -> None:
    rows = by_label_rows([[{"label": f"s{i}", "num_utterances": 1, "nats_per_token": 2.0} for i in range(31)]])
    assert len(rows) == 20 + 1 and rows[-1] == ["(11 more labels: --json)", "", ""]


def test_a_run_without_labels_is_compared_on_the_same_tokens(place: Path, bare: Path, tmp_path: Path) -> None:
    plain, labelled = figures_of(tmp_path / "c.json", "compare", place / "plain", place / "run")
    assert plain["nats_per_token"] != labelled["nats_per_token"]
    assert labelled["nll_by_label"] == evaluate(place / "run")["nll_by_label"]
    # The same audio without labels, too: those of the labelled run's data serve. What is not read changes nothing.
    weights = "checkpoints/step_00000006/model.safetensors"
    assert (bare / "run" / weights).read_bytes() == (place / "plain" / weights).read_bytes()
    other, again = figures_of(tmp_path / "c.json", "compare", bare / "run", place / "run")
    assert again["nats_per_token"] == labelled["nats_per_token"]
    assert other["nats_per_token"] == plain["nats_per_token"]
    assert [entry["label"] for entry in other["nll_by_label"]] == [entry["label"] for entry in again["nll_by_label"]]


def test_runs_with_other_labels_of_the_same_audio_are_not_compared(place: Path, tmp_path: Path) -> None:
    rows = [f"{path.relative_to(place / 'audio')},x" for path in (place / "audio").rglob("*.wav")]
    (tmp_path / "l.csv").write_text("\n".join(["path,label", *rows]))
    cli("train", place / "audio", tmp_path / "run", *SETTINGS, f"data.labels={tmp_path / 'l.csv'}")
    assert "different labels for the same utterances" in mistake(["compare", place / "run", tmp_path / "run"])
    cli("compare", place / "run", tmp_path / "run", "--data", place / "data")


def test_report_by_label(place: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    runs = [place / "plain", place / "run"]
    options = ["--num", 1, "--seconds", 0.05, "--real", 0, "--temperatures", 1]
    figures = figures_of(tmp_path / "r.json", "report", *runs, "--out", page, *options)
    scored = [entry["nats_per_token"] for entry in figures["comparison"]]
    evaluated = [evaluate(run)["nats_per_token"] for run in runs]
    assert scored == pytest.approx(evaluated, rel=1e-6)  # each run reads the labels that it knows
    html = page.read_text()
    assert re.findall(r"<h3>(Label.*?)</h3>", html) == [f"Label {speaker}, temperature 1" for speaker in SPEAKERS]
    section = html.partition('<section id="nll-by-label">')[2].partition("</section>")[0]
    assert "<td>zoe</td><td>2</td>" in section and "<td>(unlabelled)</td><td>1</td>" in section


def test_raw_audio_is_labelled_if_asked(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    audio = place / "audio"
    train = ["train", audio, tmp_path / "run", *SETTINGS, "data.labels=folder"]
    cli(*train)
    assert f"of audio with {len(SPEAKERS)} labels" in capsys.readouterr().out
    cli(*train, "train.max_steps=8")  # resumed
    assert config_of(tmp_path / "run")["dataset"]["labels"] == list(SPEAKERS)
    for name, asked in (("plain", []), ("none", ["data.labels=none"])):  # from the same prepared audio
        cli("train", audio, tmp_path / name, *SETTINGS, *asked)
        assert "labels" not in config_of(tmp_path / name)["dataset"]
    cli(*train, "train.max_steps=10")
    assert "data.labels" in mistake([*train[:-1], "train.max_steps=11"])


def test_data_that_is_labelled_later(place: Path, bare: Path, tmp_path: Path, capsys: Capsys) -> None:
    """A run that began before goes on without labels, and says how; one that reads labels cannot go on without."""
    shutil.copytree(bare, tmp_path, dirs_exist_ok=True)
    train = ["train", tmp_path / "data", tmp_path / "run", *SETTINGS]
    cli("prepare", place / "audio", tmp_path / "data", "data.labels=folder")
    line = mistake([*train, "train.max_steps=8"])
    assert "the data has changed since the run in" in line and "had no labels (data.labels=none)" in line
    cli(*train, "train.max_steps=8", "data.labels=none")
    assert "resumed at step 6" in capsys.readouterr().err
    line = mistake(["train", place / "data", place / "run", *SETTINGS, "data.labels=none"])
    assert "began, which had labels, so it cannot be resumed" in line


def test_an_archive_needs_no_data(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    cli("export", place / "run", tmp_path / "run.zip")
    common = ["sample", tmp_path / "run.zip", "--seconds", 0.01, "--out", tmp_path / "out"]
    cli(*common, "--label", "ümit")
    assert len(list((tmp_path / "out").iterdir())) == 1
    assert "has no label 'x'; of its 3, try ann, bob b., ümit" in mistake([*common, "--label", "x"])
    cli("evaluate", tmp_path / "run.zip", "--data", place / "data")
    assert re.search(r"^zoe +2 ", capsys.readouterr().out, re.MULTILINE)


def test_a_run_goes_on_with_the_labels_that_it_has(place: Path, tmp_path: Path) -> None:
    go_on = ["train", place / "data", tmp_path / "same", "--from", place / "run", "train.max_steps=1"]
    cli(*go_on)
    assert find_saved(tmp_path / "same").config["dataset"]["labels"] == list(SPEAKERS)
    refused = mistake([*go_on[:2], tmp_path / "other", *go_on[3:], "data.labels=none"])
    assert 'dataset.labels (was ["ann", "bob b.", "ümit"], is []); begin without --from' in refused


def test_a_run_without_labels_goes_on_with_some(place: Path, tmp_path: Path) -> None:
    """It begins as it was, whatever the label, and learns how they differ."""
    go_on = ["train", place / "data", tmp_path / "new", "--from", place / "plain"]
    refused = mistake([*go_on, "--from-optimiser"])
    assert '(was [], is ["ann", "bob b.", "ümit"]); begin without --from or --from-optimiser' in refused
    audio, rate_hz = soundfile.read(place / "audio" / "test" / "ann" / "a.wav")

    def by_label(name: str) -> list[float]:
        run = waveform.load(tmp_path / name)
        return [run.nll(audio, sample_rate_hz=rate_hz, label=label).mean() for label in SPEAKERS]

    cli(*go_on, "train.max_steps=1", "train.lr=1e-9", "train.lr_floor=0")
    before = waveform.load(place / "plain").nll(audio, sample_rate_hz=rate_hz).mean()
    assert by_label("new") == pytest.approx([before] * 3, rel=1e-6)
    cli(*go_on[:2], tmp_path / "learned", *go_on[3:], "train.max_steps=9")
    ann, _, umit = by_label("learned")
    assert abs(ann - umit) > 1e-3


def test_changed_labels_are_not_resumed(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "data", tmp_path / "data")
    train = ["train", tmp_path / "data", tmp_path / "run", *SETTINGS]
    cli(*train)
    audio, file = shutil.copytree(place / "audio", tmp_path / "audio"), tmp_path / "l.csv"
    rows = [f"{path.relative_to(audio)},{path.parent.name}" for path in audio.rglob("a.wav")]
    labels = "\n".join(["path,label", *rows])
    new = ["train", audio, tmp_path / "new", *SETTINGS, f"data.labels={file}"]
    file.write_text(labels)
    cli(*new)
    # The same names, of other utterances
    file.write_text(labels.replace(",ann", ",x").replace(",ümit", ",ann").replace(",x", ",ümit"))
    (cache,) = (path for path in tmp_path.iterdir() if path.name.endswith(".prepared"))
    cli("prepare", audio, cache)
    assert "the data has changed since the run" in mistake([*new, "train.max_steps=9"])
    (audio / "train" / "ann").rename(audio / "train" / "eve")  # another name
    cli("prepare", audio, tmp_path / "data")
    assert "the data has changed since the run" in mistake([*train, "train.max_steps=9"])


def test_hostile_names_are_refused(place: Path, tmp_path: Path) -> None:
    """A run from an untrusted place cannot write elsewhere by its labels, which are in names of files."""
    shutil.copytree(place / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("- bob b.", "- ../../x"))
    common = ["sample", tmp_path / "run", "--out", tmp_path / "out", "--label", "each"]
    assert "'../../x' is not a label" in mistake(common)


@pytest.mark.slow
def test_trials_of_tune_read_labels(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    """And so does what the best one's command trains."""
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    space = tmp_path / "space.yaml"
    space.write_text("train.lr: [0.05, 0.02]")
    given = [s for s in SETTINGS if not s.startswith(("train.lr=", "train.max_steps=", "train.evaluate_every="))]
    search = ["tune", place / "data", tmp_path / "tuned", "--budget", "0.2s", "--trials", 2, "--space", space]
    trials = figures_of(tmp_path / "tune.json", *search, *given)
    (command,) = re.findall(r"^    waveform (train .*)$", capsys.readouterr().out, re.MULTILINE)
    cli(*shlex.split(command.replace("RUN_DIR", str(tmp_path / "preset"))))
    runs = [*(Path(trial["run"]) for trial in trials), tmp_path / "preset"]
    assert [waveform.load(run).labels for run in runs] == [list(SPEAKERS)] * 3
    for trial, run in zip(trials, runs, strict=False):  # judged with the labels that it was trained with
        nll = evaluate(run, EvaluateOptions(split="valid"))["nats_per_token"]
        assert trial["nats_per_token"] == pytest.approx(nll, rel=1e-6)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sample plain --out o --label ann", "was trained without labels, so it has no 'ann'; leave it"),
        ("sample plain --out o --label each", "was trained without labels"),
        ("sample run --out o --label bob", "has no label 'bob'; of its 3, try bob b."),
        ("sample run --out - --label each", "take one sound, not 3; give"),
        ("prepare audio new data.labels=missing.csv", "missing.csv (No such file or directory); give folder"),
        ("train data new data.labels=missing.csv", "/missing.csv; leave the setting out"),
        ("train data new model.num_labels=4", "unknown setting 'model.num_labels'"),
        ("train data new train.label_dropout=1", "it must be at least 0 and below 1"),
    ],
)
def test_mistakes(command: str, says: str, place: Path) -> None:
    names = ("run", "plain", "audio", "data", "new", "o")
    assert says in mistake([place / word if word in names else word for word in command.split()])
    assert not (place / "new").exists() and not (place / "o").exists()
