"""`waveform` as a user meets it: every verb on synthesised audio; every mistake is one line, with exit code 2."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

import waveform
from recipes.cli import main as recipes
from tests.calling import MODELS, Capsys, cli, figures_of, mistake, prepared_tones, printed, settings, write_tones
from tests.content import content
from tests.faults.small_runs import TEXT_SETTINGS, make_text_run
from tests.ranks.run_ranks import command_on_ranks
from waveform import domain
from waveform.audio.files import read_audio
from waveform.cli import main
from waveform.command.outcome import run_with_outcome
from waveform.decoding.int8_cost import int8_cost, middles
from waveform.engine import token_learner
from waveform.engine.dataset import read_dataset
from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import unigram_nll
from waveform.ranks.distributed import World
from waveform.runs.scoring import own_tokens, unigram_nats
from waveform.system import progress
from waveform.system.errors import UserError
from waveform.verbs.sample import _int8_cost


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with odd characters in its name: audio, data and one finished run of each model; what is no data set."""
    place = tmp_path_factory.mktemp("odd [name], a=b")
    prepared_tones(place, train=4, valid=1, test=2)
    for model in MODELS:
        cli("train", place / "data", place / model, *settings(model))
    (shutil.copytree(place / "data", place / "bad") / "dataset.json").write_text("{")
    (place / "strange" / "dataset.json").mkdir(parents=True)
    (place / "code").symlink_to(Path(__file__).parent / "references")
    (place / "plot.png").symlink_to("figures.json")
    cli("train", prepared_tones(place / "few", train=1, valid=1, test=1), place / "other", *settings("wavenet"))
    return place


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data"], "the following arguments are required: RUN_DIR;"),  # and no settings
        (["data", "model=wavenet"], "the following arguments are required: RUN_DIR;"),
        (["data", "run", "train.lr=1", "-x\b"], "unrecognized arguments: -x\\x08;"),
    ],
)
def test_what_argparse_refuses_ends_with_2(arguments: list[str], says: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *arguments])
    assert capsys.readouterr().err == f"waveform train: {says} `waveform train --help` says what it takes\n"


def test_other_data_is_named_by_what_it_is(place: Path, tmp_path: Path) -> None:
    cli("prepare", place / "audio", tmp_path / "data", "data.sample_rate_hz=16000")
    line = mistake(["train", tmp_path / "data", place / "wavenet", *settings("wavenet")])
    assert "dataset.modality.sample_rate_hz (was 24000, is 16000)" in line and "checksums" not in line


def test_training_looks_at_pieces_of_every_recording(
    place: Path, tmp_path: Path, capsys: Capsys, monkeypatch: MonkeyPatch
) -> None:
    looks, look = [], token_learner.evaluate
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL_S", 0)
    monkeypatch.setattr(token_learner, "evaluate", lambda *a, **options: looks.append(look(*a, **options)) or looks[-1])
    options = ["train.evaluate_tokens=1000", "train.sample_seconds=1e-9"]  # less than one sample, which is none
    cli("train", place / "data", tmp_path / "run", *settings("wavenet"), *options, "train.log_every=1")
    recordings = [name.partition("#")[0] for name in looks[-1].names]
    scored = [name for name, count in zip(recordings, looks[-1].counts, strict=True) if count]
    assert len(scored) >= 16 and {*scored} == {*recordings}
    said = capsys.readouterr().err
    assert " bits per sample\n" in said and " samples/s, " in said


def test_the_unigram_is_scored_on_what_was_scored(place: Path) -> None:
    run = waveform.load(place / "wavenet")
    tokens = own_tokens(run, split="test")
    counts = np.bincount(tokens.read(0, start=0, stop=tokens.lengths[0]), minlength=256)
    one = Evaluation(tokens.names[:1], np.ones(1), np.ones(1), "utterance")
    train = read_dataset(place / "data").open_split("train")
    assert unigram_nats(run, tokens, one) == unigram_nll(train.counts, counts)


@pytest.mark.parametrize("model", MODELS)
def test_evaluate(place: Path, tmp_path: Path, model: str, capsys: Capsys) -> None:
    (tmp_path / "link.json").symlink_to("figures.json")  # which is followed
    figures = figures_of(tmp_path / "link.json", "evaluate", place / model)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "figures.json").read_text() == json.dumps(figures, indent=1) + "\n"
    assert figures["model"] == model and figures["step"] == 6 and figures["protocol"] == "utterance"
    assert figures["num_tokens"] == 2 * 9600 and figures["num_utterances"] == 2
    assert figures["bits_per_token"] == pytest.approx(figures["nats_per_token"] / math.log(2))
    assert 1 < figures["unigram_nats_per_token"] < 5.6 and 1 < figures["nats_per_token"] < 6
    assert figures["num_parameters"] > 1000
    assert f"{figures['nats_per_token']:.4f} nats" in capsys.readouterr().out


def test_training_says_what_its_threads_are_for(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    small = [*settings("compressive_transformer"), "model.num_heads=1", "train.max_steps=1"]
    for number, options in enumerate(([], ["train.checkpoint_activations=true"])):
        out = printed("train", place / "data", tmp_path / f"{number}", *small, *options)
        assert ("3 threads for kernels, 1 for torch: " in out) == (not options)


def test_python_nll_equals_evaluate(place: Path) -> None:
    run = waveform.load(place / "compressive_transformer")
    files = sorted((place / "audio" / "test").iterdir())
    nats = [run.nll(read_audio(path, sample_rate_hz=24_000), sample_rate_hz=24_000) for path in files]
    figures = waveform.evaluate(place / "compressive_transformer", show_progress=False)
    assert np.concatenate(nats).mean(dtype=np.float64) == pytest.approx(figures["nats_per_token"], rel=1e-5)


def test_dynamic_evaluation_is_printed_and_training_drawn(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    options = ["--dynamic", "--dynamic-optimiser", "adam", "--dynamic-lr", "1e-3", "--plot", tmp_path / "e.png"]
    dynamic = figures_of(tmp_path / "e.json", "evaluate", place / "compressive_transformer", *options)["dynamic"]
    assert f"dynamic, adam at 0.001: {dynamic['nats_per_token']:.4f} nats = " in capsys.readouterr().out
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    prepared_tones(tmp_path, train=1, valid=1, test=5, seconds=0.1)  # five, for an interval
    runs = [place / model for model in MODELS]
    options = ["--data", tmp_path / "audio", "--plot", tmp_path / "c.png"]
    entries = figures_of(tmp_path / "c.json", "compare", *runs, *options)
    out = capsys.readouterr().out
    assert out.count("preparing ") == 1  # and not once for each run
    assert [entry["model"] for entry in entries] == list(MODELS)
    wavenet = entries[2]["nats_per_token"]
    for entry in entries:
        assert entry["difference_nats"] == pytest.approx(entry["nats_per_token"] - wavenet)
        low, high = entry["interval_95"] or [0, 0]
        assert low <= entry["difference_nats"] <= high
        assert entry["train_tokens_per_second"] > 0 and entry["sampling_tokens_per_second"] > 0
        assert f"{entry['nats_per_token']:.4f}" in out and f"{entry['bits_per_token']:.4f}" in out
        assert entry["learning_curve"]["steps"][-1] == entry["step"]
        assert entry["learning_curve"]["tokens"][-1] == entry["train_tokens_seen"]
    assert entries[2]["interval_95"] is None
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    entries = waveform.compare([place / "wavenet", place / "transformer_xl", place / "wavenet"])  # on two utterances
    difference = entries[1]["difference_nats"]
    assert entries[1]["interval_95"] is None and f"  {difference:+.4f}  " in capsys.readouterr().out
    assert len(entries) == 2


def test_analyse_a_group(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    command = ["analyse", *(place / model for model in MODELS), "--tokens", 8000]
    before = content(place)
    figures = figures_of(tmp_path / "new" / "a.json", *command, "--plot", tmp_path / "new" / "a.png")
    out = capsys.readouterr().out
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    compressive, transformer_xl, wavenet = figures["runs"]
    for run in (compressive, transformer_xl):
        regions = run["attention_by_position"]["regions"]
        assert sum(sum(region["weight"]) for region in regions.values()) == pytest.approx(1)
        assert f"{100 * regions['window']['weight'][0]:.2f}±" in out
        nearest = run["attention_by_head"]["mean_distance"][0]
        assert f"layer 0  {'  '.join(f'{distance:7.1f}' for distance in nearest)}" in out
    assert compressive["compression_loss_by_layer"]["mean"][0] > 0
    assert "absent" in transformer_xl["compression_loss_by_layer"]
    assert wavenet["attention_by_position"] == {"absent": "the model has no attention"}
    assert "wavenet, step 6, test split\n  attention by position: the model has no attention" in out
    context = figures["effective_context"]
    assert context["step"] == 64 and all(len(results) == 3 for results in context["by_ratio"].values())
    assert all(run["state_reuse"]["speedup_over_each_token"] > 1 for run in figures["runs"])
    assert before == content(place)


def test_analyse_reports_too_little_data(place: Path, tmp_path: Path) -> None:
    write_tones(tmp_path / "short" / "test", num=2, seconds=0.005)
    for split in ("train", "valid"):
        write_tones(tmp_path / "short" / split, num=1)
    options = ["--data", tmp_path / "short", "--plot", tmp_path / "a.png"]
    out = printed("analyse", place / "compressive_transformer", *options)
    assert "no utterance is long enough" in out and "relative effective context: too little data" in out
    out = printed("analyse", place / "compressive_transformer", "--tokens", 300)
    assert "of 1 pieces" in out and "nan" not in out  # of one piece there is no standard error
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize("model", MODELS)
def test_samples_are_those_of_a_seed_and_never_overwritten(place: Path, tmp_path: Path, model: str) -> None:
    sample = ["sample", place / model, "--num", 2, "--seconds", 0.05, "--top-p", 0.98, "--seed", 3, "--out"]
    for out in ("a", "b"):
        cli(*sample, tmp_path / out)
    assert "exists" in mistake([*sample, tmp_path / "b"])
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 2 and all("_seed3_top_p0.98_" in name for name in files)  # no other draw takes these names
    for name in files:
        with wave.open(str(tmp_path / "a" / name)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (24_000, 1, 1200)
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / files[0]).read_bytes() != (tmp_path / "a" / files[1]).read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_sample_int8_prints_what_it_costs(place: Path, tmp_path: Path, model: str) -> None:
    out = printed("sample", place / model, "--int8", "--seconds", "0.02", "--out", tmp_path)
    said = r"^int8: NLL (\S+) -> (\S+) nats \(([+-]\S+)\) on [\d,]+ samples of the validation split$"
    ((fp32, int8, difference),) = (map(float, found) for found in re.findall(said, out, re.MULTILINE))
    assert difference == pytest.approx(int8 - fp32, abs=2e-4) and abs(difference) < 0.05
    (file,) = tmp_path.iterdir()
    assert file.stem.endswith("_seed0_int8_0")


def test_int8_cost_equals_nll_and_survives_lost_data(place: Path) -> None:
    run = waveform.load(place / "wavenet")
    split = read_dataset(Path(run.config["dataset"]["path"])).open_split("valid")
    cost = int8_cost(run.model, split, vocab_size=256, window=run.window)
    tokens = middles(split)
    assert tokens is not None and tokens.shape == (1, 3249) and cost.num_samples == 1200
    assert middles(split.cut(2)) is None and middles(split.cut(3)) is not None
    first = tokens.shape[1] // 2 // run.window * run.window  # what precedes is read, not scored
    with torch.no_grad():
        state = run.model.init_state(1, device="cpu", dtype=torch.float32)
        hidden = run.model.forward(tokens[:, :-1], state).hidden
        nll = run.model.head.nll(hidden, tokens[:, 1:])[0, first : first + 1200]
    assert cost.fp32_nats == pytest.approx(float(nll.mean()), abs=1e-5)
    run.config["dataset"]["path"] = str(place / "gone")
    lost = _int8_cost(run)
    assert lost.source == "that the fp32 model sampled" and 0 < lost.fp32_nats < 8


def test_one_command_knows_text_too(place: Path, tmp_path: Path) -> None:
    """And says which of its options are not for such a run."""
    make_text_run(tmp_path)
    run, train = tmp_path / "run", ["train", tmp_path / "data", tmp_path / "again", "preset=smoke", *TEXT_SETTINGS]
    cli(*train)
    cli(*train, "train.max_steps=5")
    out = printed("evaluate", run)
    assert out == printed("evaluate", run, main=recipes) and "bits per byte" in out
    assert "--quality is for runs on audio" in mistake(["evaluate", run, "--quality"])
    cli("compare", run, "--data", tmp_path / "data")
    assert "--out is not for runs on text" in mistake(["sample", run, "--out", tmp_path / "wavs"])
    assert "runs on text" in mistake(["compare", run, place / "wavenet"])
    assert not (tmp_path / "wavs").exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sample P/wavenet --out T/o --seed 99999999999999999999", "it must be a finite number below 2^63"),
        ("sample P/wavenet --out T/o --seed -1", "it must be a whole number from 0 to"),
        ("evaluate P/wavenet --json P/data/dataset.json/f.json", "dataset.json is a file, not a folder"),
        ("evaluate P/wavenet --json /dev/null", "/dev/null: it is not a regular file; give the name of a file"),
        ("compare P/wavenet --json P/data/dataset.json/f.json", "dataset.json is a file, not a folder"),
        ("analyse P/wavenet --plot P/data/dataset.json/f.png", "dataset.json is a file, not a folder"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(
    command: str, says: str, place: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("waveform.speech.run.open_run", lambda *_, **__: pytest.fail("work began"))
    assert says in mistake(words(command, place, tmp_path))


def test_the_demo_compares_where_it_trained(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def report(*_: object, device: str | None = None, **__: object) -> None:
        raise UserError(f"on {device}")

    for name in ("prepare", "train_all"):
        monkeypatch.setattr(f"waveform.verbs.demo.{name}", lambda *_, **__: None)
    monkeypatch.setattr("waveform.verbs.demo.report", report)
    assert "on cpu" in mistake(["demo", "--out", tmp_path / "demo", "train.device=cpu"])


def test_closed_stdout_does_no_harm() -> None:
    command = f"exec '{sys.executable}' -m waveform train --help >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_are_not_utf8_are_printed(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    with io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict") as out:  # as in the locale en_US.UTF-8
        monkeypatch.setattr("sys.stdout", out)
        cli("sample", place / "wavenet", "--out", tmp_path / "\udcff", "--seconds", 0.001)
        assert isinstance(out.buffer, io.BytesIO) and b"/\\udcff/wavenet_step6" in out.buffer.getvalue()


def test_a_pipe_closed_by_its_reader_is_not_an_error(capsys: Capsys, monkeypatch: MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["train", "x", "y", "--print-config"]) == 128 + signal.SIGPIPE
        assert capsys.readouterr().err == ""


def test_a_signal_that_a_library_swallows_is_said_at_the_end(capsys: Capsys) -> None:
    """As compilers do, in whose middle it comes."""

    def swallow() -> int:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    def hide() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        except BaseException as error:
            raise SystemError("<function> returned a result with an exception set") from error
        return 0

    for run in (swallow, hide):
        assert run_with_outcome("waveform sample", run) == 128 + signal.SIGTERM
        assert capsys.readouterr().err == "waveform sample: stopped by SIGTERM\n"


def test_tensorboard_holds_curves_and_a_sample(place: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "transformer_xl" / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"train/nll_nats", "train/lr", "evaluate/nll_bits"} <= set(tags["scalars"])
    assert tags["audio"] == ["sample"] and tags["images"] == ["sample/mel"]


def test_public_functions_stay_functions() -> None:
    """A module of the same name would hide the function once it is imported."""
    for _ in range(2):
        assert all(callable(getattr(waveform, name)) for name in waveform.__all__)


def test_prepared_data_is_not_split_again(place: Path, tmp_path: Path) -> None:
    write_tones(tmp_path / "audio", num=12)
    data = tmp_path / "data"
    cli("prepare", tmp_path / "audio", data, "data.split.valid=0.3", "data.split.test=0.35")
    train = ["train", data, tmp_path / "run", *settings("wavenet")]
    line = mistake([*train, "data.split.test=0.35", "data.split.valid=0.2"])
    assert f"{data} was prepared differently: data.split.valid was 0.3 and is 0.2; leave the setting out" in line
    line = mistake(["train", place / "data", *train[2:], "data.split.by=file"])
    assert "data.split.by was not used and is file" in line
    assert not (tmp_path / "run").exists()
    for agreeing in ([], ["data.split.valid=0.3", "data.num_workers=1"]):
        cli(*train, *agreeing)
        shutil.rmtree(tmp_path / "run")


def test_files_added_later_do_not_disturb_a_run(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    audio = shutil.copytree(place / "audio", tmp_path / "audio")
    command = ["train", audio, tmp_path / "run", *settings("wavenet")]
    out = printed(*command)
    assert "preparing" in out and "files" in out and list(tmp_path.glob("*.prepared"))
    before = waveform.evaluate(tmp_path / "run", show_progress=False)["data_checksum"]
    write_tones(audio / "train", num=6)
    write_tones(audio / "test", num=3)
    capsys.readouterr()
    out = printed(*command, "train.max_steps=8", "train.log_every=1")  # a longer budget goes on
    err = capsys.readouterr().err
    assert "as prepared when this run began" in out and "step 8" in out
    assert "resumed at step 6" in err and "note:" not in err and "warning:" not in err
    assert waveform.evaluate(tmp_path / "run", show_progress=False)["data_checksum"] == before
    cli("prepare", audio, next(tmp_path.glob("*.prepared")))
    assert "the data has changed" in mistake([*command, "train.max_steps=9"])


def test_config_dir_adds_a_preset(tmp_path: Path) -> None:
    folder = tmp_path / "my, configs=[1] 'é'"
    (folder / "preset").mkdir(parents=True)
    for max_steps in (77, 78):  # in a notebook, say, after an edit
        (folder / "preset" / "mine.yaml").write_text(f"train:\n  max_steps: {max_steps}\n")
        out = printed("train", "x", "y", "--print-config", "--config-dir", folder, "preset=mine")
        assert f"max_steps: {max_steps}" in out


def words(command: str, place: Path, folder: Path) -> list[str | Path]:
    """The arguments of a command, in which P/ stands for `place` and T/ for `folder`."""
    known = {"P/": place, "T/": folder}
    return [known[word[:2]] / word[2:] if word[:2] in known else word for word in command.split()]


MISTAKES: list[tuple[str, list[str]]] = [
    ("prepare T/none T/d", ["no such folder", "none"]),
    ("train T/none T/r", ["no such folder", "none"]),
    ("train T/ T/r", ["it holds nothing"]),
    ("train P/code/__init__.py T/r", ["__init__.py is a file; give a folder of audio"]),
    ("prepare P/code T/d", ["no audio"]),
    ("prepare P/audio T/d seed=3", ["seed=3 is for training; prepare reads the settings of data: leave it out"]),
    ("train P/data T/r preset=demo train.evaluate_every=3", ["no effect while train.evaluate_tokens is 0"]),
    ("train P/data T/r train.max_step=3", ["train.max_step", "did you mean", "train.max_steps"]),
    ("train P/data T/r seed=abc", ["seed", "abc"]),
    ("train P/data T/r train.lr=fast", ["train.lr", "fast"]),
    ("train P/data T/r steps", ["steps", "key=value"]),
    ("train P/data T/r train.lr=[1,", ["train.lr"]),
    (
        "train P/audio T/r preset=cpu",
        ["unknown preset 'cpu'", "is not a prepared data set, so this takes it as a folder of audio"],
    ),
    ("train P/strange T/r preset=cpu", ["dataset.json is damaged"]),
    ("train P/audio T/r preset=demo model.d_model=65536", ["GB", "lower model.d_model=65536"]),
    ("train P/data T/r model.memory=16777216", ["GB", "model.memory"]),
    (
        "train P/data T/r model=wavenet model.num_layers=3 preset=demo train.max_seconds=1",
        ["unknown setting 'model.num_layers' of wavenet; it is a setting of compressive_transformer, lstm"],
    ),
    ("train P/data T/r lr=1", ["unknown setting 'lr'; did you mean 'train.lr'"]),
    ("train P/nothing T/r preset=cpu", ["no such folder", "nothing"]),
    ("train P/data T/r +foo=1", ["unknown setting 'foo'"]),
    ("train P/data T/r ~train.lr=0.0003", ["~train.lr", "give it a value"]),
    ("train P/data T/r seed=99999999999999999999", ["from 0 to 2147483647"]),
    ("train P/data T/r train.batch_size=2 train.batch_size=2.5", ["train.batch_size=2.5: "]),
    ("train P/data T/r train=", ["unknown train ''; choose one of default"]),
    ("prepare P/audio P/bad", ["dataset.json is damaged", "remove the folder", "bad and prepare the data again"]),
    ("train P/data T/r train.sample_seconds=-1", ["train.sample_seconds is"]),
    ("train P/data T/r train.sample_seconds=1e12", ["train.sample_seconds is"]),
    (
        f"train P/data P/wavenet {' '.join(settings('wavenet'))} train.lr=0.5",
        ["different configuration", "train.lr", "0.5"],
    ),
    (
        "train P/data P/wavenet preset=hour",
        ['configuration: preset (was "small", is "hour"). Give another folder, or resume it'],
    ),
    ("train P/data P/audio", ["contains other files"]),
    ("sample P/audio --out T/o", ["is not a run"]),
    ("evaluate P/wavenet --memory 5", ["no 'memory'"]),
    ("evaluate P/wavenet --dynamic-lr 0.1", ["--dynamic-lr", "give --dynamic too"]),
    ("evaluate P/wavenet --stride 4 --protocol chunk", ["--stride begins each window with empty memories"]),
    ("evaluate P/wavenet --stride 4 --dynamic", ["--stride begins each window with empty memories"]),
    ("evaluate P/wavenet --rows 4 --protocol carry", ["--protocol=carry reads one stream, and --rows cuts it"]),
    ("analyse P/transformer_xl --tokens 100", ["--tokens 100", "at least 128"]),
    ("analyse P/wavenet --tokens 0", ["--tokens", "at least 1"]),
    ("analyse P/wavenet --json T/", ["--json", "is a folder"]),
    ("analyse P/wavenet --json P/figures.json --plot P/plot.png", ["the figures and the plot would be one file"]),
    ("compare P/wavenet P/other", ["cannot be compared"]),
    ("analyse P/wavenet P/other", ["cannot be compared or analysed as a group"]),
    ("analyse P/wavenet --context-step 0", ["--context-step", "at least 1"]),
    ("sample P/wavenet --out T/o --prime P/data/dataset.json", ["dataset.json"]),
    ("sample P/wavenet --out T/o --seconds 0", ["seconds"]),
    ("sample P/wavenet --out T/o --num 0", ["num"]),
    ("sample P/wavenet --out P/data", ["is a prepared data set"]),
    ("demo --out T/o trian.lr=1", ["unknown setting 'trian.lr'"]),
    ("demo --out T/o model=lstm", ["model=lstm: the demo trains compressive_transformer, transformer_xl, wavenet"]),
    ("demo --out T/o +model=lstm", ["+model=lstm: the demo trains compressive_transformer"]),
    ("demo --out P/audio", ["is not empty"]),
]


@pytest.mark.parametrize(("command", "says"), MISTAKES)
def test_mistakes_get_one_line(command: str, says: list[str], place: Path, tmp_path: Path) -> None:
    line = mistake(words(command, place, tmp_path))
    assert all(part in line for part in says), line
    assert not (tmp_path / "o").exists()  # no empty samples
    assert not (tmp_path / "r" / "config.yaml").exists()  # the corrected command may use the same folder
    assert not list(tmp_path.glob("*.prepared"))


def test_compare_refuses_runs_whose_state_is_reset_at_other_places(place: Path, tmp_path: Path) -> None:
    runs = [place / "wavenet", tmp_path / "64", tmp_path / "128"]
    for run in runs[1:]:
        chunks = [*settings("wavenet"), "train.max_steps=1", "train.state=chunk", f"train.chunk={run.name}"]
        cli("train", place / "data", run, *chunks)
    assert "reset at different places, by chunk of 64 and by utterance" in mistake(["compare", *runs[:2]])
    for options in ([], ["--protocol", "chunk"]):
        line = mistake(["compare", *runs[1:], *options])
        assert "reset at different places, by chunk of 128 and by chunk of 64" in line
    cli("compare", *runs, "--protocol", "utterance")
    page = ("--num", 0, "--real", 0, "--out", tmp_path / "page.html")
    (entry,) = figures_of(tmp_path / "page.json", "report", runs[1], *page)["comparison"]
    figures = figures_of(tmp_path / "evaluated.json", "evaluate", runs[1])
    assert entry["protocol"] == figures["protocol"] == "chunk" and entry["chunk"] == 64
    assert entry["nats_per_token"] == pytest.approx(figures["nats_per_token"])


@pytest.mark.slow
def test_two_processes_do_what_one_does(place: Path, tmp_path: Path) -> None:
    def ranks(*arguments: Any) -> str:
        return command_on_ranks("waveform", arguments, tmp_path / "ranks")

    ranks("train", place / "data", tmp_path / "run", *settings("compressive_transformer"))
    run = waveform.load(tmp_path / "run")
    assert run.step == 6
    alone = waveform.evaluate(place / "compressive_transformer", show_progress=False)
    together = waveform.evaluate(tmp_path / "run", show_progress=False)
    assert together["train_tokens_seen"] == alone["train_tokens_seen"]
    out = ranks("evaluate", tmp_path / "run", "--json", tmp_path / "shared.json")
    shared = json.loads((tmp_path / "shared.json").read_text())
    assert shared["num_tokens"] == together["num_tokens"] and out.count("nats = ") == 1
    assert shared["nats_per_token"] == pytest.approx(together["nats_per_token"], rel=1e-9)
    assert together["nats_per_token"] == pytest.approx(alone["nats_per_token"], abs=1e-3)

    sampling = ["sample", tmp_path / "run", "--num", 3, "--seconds", 0.05, "--out"]
    assert ranks(*sampling, tmp_path / "shared").count(".wav") == 3
    cli(*sampling, tmp_path / "alone")
    for path in (tmp_path / "alone").iterdir():  # each stream is drawn once, as by one process
        assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes()
    reporting = ["report", tmp_path / "run", "--num", 2, "--seconds", 0.05, "--real", 1, "--out"]
    ranks(*reporting, tmp_path / "shared.html")
    cli(*reporting, tmp_path / "alone.html")
    pages = [(tmp_path / f"{name}.html").read_text() for name in ("alone", "shared")]
    sounds, shared_sounds = (re.findall(r"data:audio/flac;base64,([^\"]+)", page) for page in pages)
    assert len(sounds) == 6 and shared_sounds == sounds


@pytest.mark.parametrize("verb", ["evaluate", "compare"])
def test_scoring_is_shared_among_processes(verb: str, place: Path, monkeypatch: MonkeyPatch) -> None:
    """Those of the job, of which torchrun starts several; that each scores its share is tested with the evaluator."""
    ours, score = World(), Mock(side_effect=domain.score)
    monkeypatch.setattr(f"waveform.verbs.{verb}.job", lambda **_: nullcontext(ours))
    monkeypatch.setattr(domain, "score", score)
    cli(verb, place / "wavenet")
    assert score.called and all(call.kwargs["world"] is ours for call in score.call_args_list)
