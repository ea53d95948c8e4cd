"""Runs by name: folders, archives that `export` made and bundled runs, in every verb; hostile archives are refused."""

import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import yaml
from pytest import MonkeyPatch

import waveform
from tests.calling import Capsys, before, cli, config_of, figures_of, mistake
from tests.content import content
from tests.faults.hostile_runs import edit_config
from tests.faults.small_runs import SETTINGS
from tests.recipes import calling as recipes
from waveform.audio.demo_speech import demo_speech_dir
from waveform.audio.demo_voices import demo_voices_dir
from waveform.cli import main
from waveform.engine import checkpoint
from waveform.ranks.distributed import World
from waveform.runs import archive, named
from waveform.runs.scoring import EvaluateOptions
from waveform.speech import data as speech_data
from waveform.speech.domain import Speech


@pytest.fixture(scope="module")
def archived(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a finished run on speech."""
    file = tmp_path_factory.mktemp("archived") / "speech.zip"
    cli("export", speech / "run", file)
    return file


def test_processes_score_the_same_checkpoint(speech: Path, monkeypatch: MonkeyPatch) -> None:
    """One of them is so early that training saves another one before the next process looks."""
    steps, load = iter([4, 6]), Speech.load
    monkeypatch.setattr(Speech, "load", lambda _, *given, **how: replace(load(*given, **how), step=next(steps)))
    monkeypatch.setattr(World, "largest", lambda _, *own: [max(pair) for pair in zip(own, (6, -6), strict=True)])
    assert Speech().load_to_score(speech / "run", EvaluateOptions(), world=World()).step == 6


@pytest.fixture
def bundled(archived: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> str:
    """The name of a bundled run, made by `export`; the current folder is an empty one."""
    (tmp_path / "bundled").mkdir()
    shutil.copy(archived, tmp_path / "bundled" / "speech-en.zip")
    monkeypatch.setattr(named, "BUNDLED", tmp_path / "bundled")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return "speech-en"


def test_an_archive_has_what_sampling_and_scoring_need(
    speech: Path, archived: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    step = "checkpoints/step_00000004"
    with zipfile.ZipFile(archived) as exported:
        files = {entry.filename: entry.compress_type for entry in exported.infolist()}
        config = exported.read("config.yaml").decode()
    of_step = [f"{step}/{name}" for name in ("complete.json", "progress.json", "model.safetensors")]
    assert files == dict.fromkeys(["config.yaml", "metrics.jsonl", *of_step], zipfile.ZIP_DEFLATED)
    assert str(speech) not in config and yaml.safe_load(config)["dataset"]["path"] == ""
    cli("export", speech / "run", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (archived).read_bytes()
    monkeypatch.setattr(archive, "_MAX_DEFLATED_BYTES", 8000)
    cli("export", speech / "run", tmp_path / "large")
    with zipfile.ZipFile(tmp_path / "large") as stored:  # what is large: a reader allows it the size of the archive
        assert stored.getinfo(f"{step}/model.safetensors").compress_type == zipfile.ZIP_STORED


def test_many_files_of_a_checkpoint_fit_an_archive(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """As a run that many processes trained has: what is compressed stays within what a reader allows."""
    step = tmp_path / "run" / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    for rank in range(20):
        (step / f"rank_{rank}.safetensors").write_bytes(bytes(900))
    monkeypatch.setattr(archive, "_MAX_DEFLATED_BYTES", 8000)
    archive._zip(tmp_path / "run", tmp_path / "run.zip")
    archive.unpack(tmp_path / "run.zip", tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "run")


def test_a_name_stands_for_a_run_folder_in_every_verb(bundled: str, speech: Path, tmp_path: Path) -> None:
    data, figures, sounds = ["--data", speech / "data"], [], []
    for number, run in enumerate((bundled, str(speech / "run"))):
        cli("sample", run, "--out", tmp_path / f"{number}", "--seconds", 0.01)
        sounds += [path.read_bytes() for path in (tmp_path / f"{number}").iterdir()]
        commands = ["evaluate", run, *data], ["compare", run, *data], ["analyse", run, *data, "--tokens", 500]
        figures.append([figures_of(tmp_path / "f.json", *command) for command in commands])
    (evaluated, (compared,), analysed), (by_folder, (other,), _) = figures
    assert evaluated == {**by_folder, "run": bundled, "unigram_nats_per_token": None}
    assert compared["learning_curve"] == other["learning_curve"]
    assert analysed["runs"][0]["run"] == bundled
    assert len(sounds) == 2 and sounds[0] == sounds[1]
    cli("evaluate", bundled, "--data", speech / "audio")
    assert [path.suffix for path in Path().iterdir()] == [".prepared"]  # kept, for the next time


def test_a_run_goes_on_from_a_bundled_one(bundled: str, speech: Path, tmp_path: Path, capsys: Capsys) -> None:
    command = ["train", speech / "data", tmp_path / "run", "--from", bundled, "train.max_steps=1"]
    cli(*command)
    assert "beginning with the weights of speech-en, step 4\n" in capsys.readouterr().out
    assert config_of(tmp_path / "run")["origin"]["run"] == bundled
    cli(*command, "train.max_steps=2")


def test_what_needs_the_data_says_so(bundled: str, archived: Path, speech: Path) -> None:
    shutil.copy(archived, "own.zip")
    for verb in ("evaluate", "compare", "analyse"):
        assert "own.zip is without the data that it was trained on" in mistake([verb, "own.zip"])
    line = mistake(["train", speech / "data", "run", "--from", bundled, "--from-optimiser"])
    assert "was exported without its optimiser; leave out --from-optimiser" in line and not Path("run").exists()
    line = mistake(["export", bundled, "again.zip", "--optimiser"])
    assert "was itself exported without its optimiser; leave out --optimiser" in line and not Path("again.zip").exists()


def test_a_bundled_run_is_scored_on_the_bundled_speech(
    bundled: str, speech: Path, capsys: Capsys, monkeypatch: MonkeyPatch
) -> None:
    assert {path.name for path in demo_speech_dir().iterdir()} == {"train", "valid", "test"}
    monkeypatch.setattr(speech_data, "demo_speech_dir", lambda: speech / "audio")
    own = figures_of(Path("own.json"), "evaluate", speech / "run")
    capsys.readouterr()
    evaluated = figures_of(Path("bundled.json"), "evaluate", bundled)
    assert capsys.readouterr().out.startswith("speech-en: on the test recordings of the bundled speech\n")
    for field in ("num_utterances", "nats_per_token", "data_checksum"):
        assert evaluated[field] == own[field]
    (valid,) = figures_of(Path("compared.json"), "compare", bundled, "--split", "valid")
    assert valid["num_utterances"] == 1


def test_a_bundled_run_with_labels_is_scored_on_the_bundled_voices(capsys: Capsys) -> None:
    run = waveform.load("speech-voices")
    tokens = speech_data.open_split(run, data=None, split="test", show_progress=True)
    assert capsys.readouterr().out == "speech-voices: on the test recordings of the bundled voices\n"
    assert len(tokens) == 6 and 16 < tokens.num_tokens / 24_000 < 17
    assert sorted({*map(str, tokens.labels)}) == run.labels
    attribution = (demo_voices_dir().parent / "README.md").read_text()
    for needed in ("fillets-ng-data-nl", "Danihelka", "General Public License, version 2", "11 kHz"):
        assert needed in attribution
    assert "Version 2, June 1991" in (demo_voices_dir().parent / "LICENSE").read_text()


def test_a_missing_run_is_one_line_with_the_bundled_names(bundled: str) -> None:
    line = mistake(["sample", "nosuch", "--out", "wav"])
    assert line.endswith("no such run folder: nosuch; `train` makes one, and waveform comes with speech-en")
    assert "/dev/null is neither" in mistake(["sample", "/dev/null", "--out", "wav"])
    Path(bundled).mkdir()  # a folder comes before a bundled run
    assert "speech-en is not a run" in mistake(["evaluate", bundled])


def test_an_archive_with_its_optimiser_resumes(speech: Path, tmp_path: Path) -> None:
    cli("export", speech / "run", tmp_path / "whole.zip", "--optimiser")
    with zipfile.ZipFile(tmp_path / "whole.zip") as whole:
        whole.extractall(tmp_path / "whole")
    shutil.copytree(speech / "run", tmp_path / "copy")
    for run in ("whole", "copy"):
        cli("train", speech / "data", tmp_path / run, *SETTINGS, "train.max_steps=5")
    name = "checkpoints/step_00000005/model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()


def test_a_run_does_not_say_how_many_processes_prepare_other_audio(
    speech: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    run = shutil.copytree(speech / "run", tmp_path / "run")
    edit_config(run, lambda config: config["data"].update(num_workers=10**6))
    opened = []
    monkeypatch.setattr("waveform.speech.data.open_data", lambda *_, config, **options: opened.append(config))
    with pytest.raises(AttributeError):  # of no data
        main(["evaluate", str(run), "--data", str(speech / "audio")])
    assert [config.num_workers for config in opened] == [None]


@pytest.mark.parametrize("verb", ["evaluate", "compare", "sample", "export"])
def test_a_run_of_an_unknown_kind_is_one_line(verb: str, speech: Path, tmp_path: Path) -> None:
    run = shutil.copytree(speech / "run", tmp_path / "run")
    edit_config(run, lambda config: config["dataset"]["modality"].update(kind="video"))
    more = {"compare": [speech / "run"], "sample": ["--out", tmp_path / "x"], "export": [tmp_path / "x.zip"]}
    said = mistake([verb, run, *more.get(verb, ())])
    assert "run/config.yaml: no installed package handles data of the kind 'video'" in said


def test_export_overwrites_nothing(speech: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "exists; give a new name" in mistake(["export", speech / "run", tmp_path / "file"])
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_text_is_exported_with_its_vocabulary(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.zip"
    recipes.run("export", text / "run", file)
    sample = ["--prompt", "a", "--tokens", 8]
    own = recipes.printed("sample", text / "run", *sample)
    assert recipes.printed("sample", file, *sample) == own
    assert "evaluate, compare, analyse and report take a data set with --data" in recipes.mistake(["evaluate", file])
    own = recipes.printed("evaluate", text / "run")
    assert recipes.printed("evaluate", file, "--data", text / "data") == own
    recipes.run("train", text / "data", tmp_path / "run", "--from", file, "train.max_steps=1")


@pytest.mark.parametrize(
    ("command", "owner", "reads"),
    [
        ("sample RUN --tokens 3", checkpoint.Checkpoint, "model_weights"),
        ("export RUN PLACE/run.zip", checkpoint, "copy"),
        ("train DATA PLACE/new --from RUN train.max_steps=1", checkpoint.Checkpoint, "weights_digest"),
    ],
)
def test_if_training_removes_a_checkpoint_that_is_being_read_another_is_read(
    command: str, owner: object, reads: str, text: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    run = shutil.copytree(text / "run", tmp_path / "run")
    newest = run / "checkpoints" / "step_00000004"
    before(monkeypatch, owner, reads, lambda *_, **__: shutil.rmtree(newest, ignore_errors=True))
    for name, place in {"RUN": run, "DATA": text / "data", "PLACE": tmp_path}.items():
        command = command.replace(name, str(place))
    recipes.run(*command.split())


Attack = Callable[[Path], None]


def rewritten(change: Callable[[dict[str, bytes]], Any] = len, *, method: int = zipfile.ZIP_STORED) -> Attack:
    def attack(file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        change(content)
        with zipfile.ZipFile(file, "w", method) as archive:
            for name, data in content.items():
                archive.writestr(name, data)

    return attack


def add(name: str) -> Attack:
    return rewritten(lambda content: content.update({name: b"x"}))


def drop(name: str) -> Attack:
    return rewritten(lambda content: content.pop(name))


def bomb(file: Path) -> None:
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        for name in ("dataset", "tokenizer"):
            with archive.open(f"data/{name}.json", "w") as entry:
                for _ in range(33):
                    entry.write(bytes(1 << 20))


def twice(file: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("config.yaml", b"model: {}")


def overlap(file: Path) -> None:
    """Make the entry of the weights, stored, claim more bytes than the archive has."""
    rewritten()(file)
    content = bytearray(file.read_bytes())
    at = content.find(b"PK\x01\x02")
    while at >= 0:
        length = struct.unpack_from("<H", content, at + 28)[0]
        if content[at + 46 : at + 46 + length].endswith(b"safetensors"):
            struct.pack_into("<II", content, at + 20, 1 << 30, 1 << 30)
        at = content.find(b"PK\x01\x02", at + 4)
    file.write_bytes(content)


_ATTACKS: dict[str, tuple[Attack, str]] = {
    "above": (add("../evil"), "a run has no file '../evil'"),
    "absolute": (add("/nonexistent/evil"), "a run has no file '/nonexistent/evil'"),
    "line feed": (add("config.yaml\n"), "a run has no file 'config.yaml\\n'"),
    "no config": (drop("config.yaml"), "it has no config.yaml"),
    "bzip2": (rewritten(method=zipfile.ZIP_BZIP2), "is compressed in another way"),
    "bomb": (bomb, "it would grow by 69,"),
    "two checkpoints": (add("checkpoints/step_00000002/progress.json"), "it has several checkpoints"),
    "two of one name": (twice, "two of its files have the same name"),
    "overlapping": (overlap, "its files overlap"),
    "many": (rewritten(lambda c: c.update({f"{i}": b"" for i in range(5000)})), "it has 5005 files"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-9]), "is not a run that `waveform export` made"),
    "not a zip": (lambda file: file.write_bytes(b"PK" * 99), "is not a run that `waveform export` made"),
    "a flipped bit": (
        lambda file: file.write_bytes((c := file.read_bytes())[:5000] + bytes([c[5000] ^ 1]) + c[5001:]),
        "is not a run that `waveform export` made (Bad CRC-32",
    ),
    "other weights": (add("checkpoints/step_00000004/model.safetensors"), "model.safetensors is damaged or cut short"),
    "no weights": (drop("checkpoints/step_00000004/model.safetensors"), "cannot read"),
}


@pytest.mark.parametrize("name", _ATTACKS)
def test_a_hostile_archive_is_refused(name: str, archived: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    temporary, file = tmp_path / "temporary", tmp_path / "a" / "run.zip"
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for folder in (temporary, file.parent):
        folder.mkdir()
    shutil.copy(archived, file)
    attack, says = _ATTACKS[name]
    attack(file)
    line = mistake(["sample", file, "--out", tmp_path / "wav"])
    assert says in line and str(file) in line and gettempdir() + "/waveform-" not in line
    if "weights" not in name:  # these are seen once it is unpacked, and stay until this process ends
        assert not list(temporary.iterdir())
    left = sorted(path for path in tmp_path.rglob("*") if temporary not in path.parents)
    assert left == [file.parent, file, temporary]


@pytest.mark.parametrize("name", named.bundled_names())
def test_the_bundled_runs_make_sound(name: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli("sample", name, "--out", "samples", "--seconds", "0.01")
    assert len(list((tmp_path / "samples").glob("*.wav"))) == 1


def test_there_are_bundled_runs_and_the_page_names_them() -> None:
    names = named.bundled_names()
    page = (named.BUNDLED / "README.md").read_text(encoding="utf-8")
    assert names == ["speech-en", "speech-en-transformer-xl", "speech-en-wavenet", "speech-voices"]
    assert all(f"`{name}`" in page for name in names)
    sizes = {path.stem: path.stat().st_size for path in named.BUNDLED.glob("*.zip")}
    assert sizes.pop("speech-voices") < 3e6 and sum(sizes.values()) < 8e6
