"""Published corpora, in tiny folders of their true layout."""

import json
import re
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from pytest import MonkeyPatch

from tests.audio.conftest import write_audio
from tests.calling import Capsys, cli, mistake
from waveform.audio.audio_format import AudioFormat, format_of
from waveform.audio.corpus import catalogue
from waveform.audio.corpus.catalogue import Corpus, corpora, find_corpus
from waveform.audio.corpus.labels import find_labels
from waveform.audio.corpus.splits import SPLITS, SplitConfig
from waveform.cli import main
from waveform.engine.dataset import Dataset, read_dataset
from waveform.system.errors import UserError

SC09 = [
    f"{word}/{speaker}_nohash_{i}.wav" for word in ("zero", "nine") for speaker in ("0a7c2a8d", "ff") for i in (0, 1)
]
LISTS = {
    "validation_list.txt": ["cat/0a7c2a8d_nohash_0.wav", SC09[0]],
    "testing_list.txt": [SC09[5], SC09[6], "zero/00_nohash_3.wav"],
}


def make(folder: Path, *paths: str, rate_hz: int = 16_000) -> Path:
    """The folder, with a tenth of a second of sound at each path."""
    for i, path in enumerate(paths):
        write_audio(folder / path, seed=i, duration_s=0.1, sample_rate_hz=rate_hz)
    return folder


@pytest.fixture(name="sc09")
def make_sc09(tmp_path: Path) -> Path:
    folder = make(tmp_path / "sc09", *SC09)
    for name, lines in LISTS.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def publish(monkeypatch: MonkeyPatch, name: str, **counts: object) -> None:
    """Have a corpus of so many files, or labels, be the published one."""
    known = {**corpora(), name: msgspec.structs.replace(corpora()[name], **counts)}
    monkeypatch.setattr(catalogue, "corpora", lambda: known)


def prepared(folder: Path, name: str, *more: str) -> Dataset:
    cli("prepare", folder, folder.parent / "data", "--corpus", name, *more)
    return read_dataset(folder.parent / "data")


def refusal(folder: Path, *more: str) -> str:
    """The line with which a folder is not prepared."""
    return mistake(["prepare", folder, folder.parent / "data", *more])


def names(dataset: Dataset) -> dict[str, list[str]]:
    return {split: dataset.open_split(split).names for split in SPLITS}


def test_sc09(sc09: Path, monkeypatch: MonkeyPatch) -> None:
    make(sc09, "cat/0a7c2a8d_nohash_0.wav", "_background_noise_/pink_noise.wav")
    publish(monkeypatch, "sc09", files={"": 8})
    dataset = prepared(sc09, "sc09")
    divided = names(dataset)
    assert divided["valid"] == SC09[:1] and divided["test"] == sorted(SC09[5:7])
    assert divided["train"] == sorted({*SC09} - {*divided["valid"], *divided["test"]})
    assert format_of(dataset.modality) == AudioFormat(16_000, "mu_law_floor", "clip", 16_000)
    assert dataset.modality["corpus"] == {"name": "sc09", "here": 8, "published": 8}
    assert dataset.sources["split"] == {"corpus": "sc09"} and dataset.sources["labels"] == "corpus"
    assert dataset.labels == {path: path.split("/")[0] for path in SC09}
    tokens = dataset.open_split("test")
    clip = tokens.read(0, start=0, stop=1600)
    assert clip.min() == 0 and clip.max() == 255
    report = json.loads((dataset.folder / "report.json").read_text())
    assert report["split"] == "as published, by validation_list.txt and testing_list.txt"
    assert report["other_files"] == {".txt": 2, ".wav": 2} and report["refused"] == {}


def test_a_part_is_refused_unless_asked_for(sc09: Path) -> None:
    line = refusal(sc09, "--corpus", "sc09")
    assert f"{sc09} has 8 recordings of SC09 (the digits of Speech Commands v0.02), which has 38,908; unpack" in line
    assert "or accept a part with --partial" in line and not (sc09.parent / "data").exists()
    dataset = prepared(sc09, "sc09", "--partial")
    assert dataset.modality["corpus"] == {"name": "sc09", "here": 8, "published": 38_908}


def test_what_does_not_go_with_a_corpus(sc09: Path) -> None:
    assert "--partial is for a part of a published corpus" in refusal(sc09, "--partial")
    line = refusal(sc09, "--corpus", "sc10")
    assert "--corpus sc10 does not exist; choose one of sc09, youtubemix, beethoven, ljspeech, libritts, vctk" in line
    line = refusal(sc09, "--corpus", "sc09", "data.split.valid=0.2")
    assert "data.split.valid=0.2: SC09 (the digits of Speech Commands v0.02) is divided as published; leave it" in line
    line = refusal(sc09.parent, "--corpus", "sc09", "--partial")
    assert "it has no file like seven/0a7c2a8d_nohash_0.wav; give the folder that" in line
    line = refusal(sc09, "--corpus", "libritts")
    assert "is not LibriTTS as published: it has no file like train-clean-100/103/1241/103_1241" in line
    (sc09 / "testing_list.txt").unlink()
    line = refusal(sc09, "--corpus", "sc09", "--partial")
    assert "testing_list.txt, which divides SC09" in line and "unpack it again" in line


def test_settings_of_a_corpus_give_way_to_yours(sc09: Path) -> None:
    dataset = prepared(sc09, "sc09", "--partial", "data.quantiser=mu_law", "data.sample_rate_hz=8000")
    assert format_of(dataset.modality) == AudioFormat(8_000, "mu_law", "clip", 16_000)
    assert "corpus was sc09 and is None" in refusal(sc09)
    assert "data.quantiser was mu_law and is mu_law_floor" in refusal(sc09, "--corpus", "sc09", "--partial")
    line = mistake(["train", dataset.folder, sc09.parent / "run", "data.split.valid=0.3"])
    assert "data.split.valid was not used and is 0.3" in line


@pytest.mark.parametrize(
    ("name", "file", "quantiser"),
    [("youtubemix", "out{}.wav", "mu_law_floor"), ("beethoven", "{}.wav", "linear_floor")],
)
def test_music_in_natural_order(name: str, file: str, quantiser: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    folder = make(tmp_path / "corpus", *(file.format(i) for i in range(17)))
    publish(monkeypatch, name, files={"": 17})
    dataset = prepared(folder, name, "data.piece_samples=400")
    divided = names(dataset)
    assert divided["valid"] == [f"{file.format(14)}#{i:06d}" for i in range(4)]
    assert sorted({path.split("#")[0] for path in divided["test"]}) == [file.format(15), file.format(16)]
    assert format_of(dataset.modality) == AudioFormat(16_000, quantiser, "clip", 400, True)
    assert format_of(dataset.modality) == AudioFormat(**{**find_corpus(name).data, "piece_samples": 400})
    assert dataset.labels == {}
    assert dataset.modality["corpus"]["here"] == dataset.modality["corpus"]["published"]


def test_pieces_have_the_label_of_their_file(sc09: Path) -> None:
    tokens = prepared(sc09, "sc09", "--partial", "data.piece_samples=1000").open_split("test")
    assert tokens.labels == [name.split("/")[0] for name in tokens.names]
    assert tokens.names[0].endswith("#000000")


def test_labels_of_a_corpus_give_way_to_yours(sc09: Path) -> None:
    assert prepared(sc09, "sc09", "--partial", "data.labels=none").labels == {}
    for corpus, what in (
        (None, ", but no --corpus is given"),
        (find_corpus("ljspeech"), " labels no file; leave it out"),
    ):
        with pytest.raises(UserError, match=f"data.labels=corpus{what}"):
            find_labels("corpus", paths=SC09, corpus=corpus)


def test_ljspeech(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    paths = [f"wavs/LJ001-{i:04d}.wav" for i in range(40)]
    folder = make(tmp_path / "corpus", *paths, rate_hz=22_050)
    publish(monkeypatch, "ljspeech", files={"": 40})
    dataset = prepared(folder, "ljspeech", "data.split.valid=0.2", "data.split.test=0.2")
    divided = names(dataset)
    assert sorted(chain(*divided.values())) == paths and min(map(len, divided.values())) > 2
    assert dataset.modality["sample_rate_hz"] == 22_050
    assert dataset.sources["split"] == {"corpus": "ljspeech", "split.valid": 0.2, "split.test": 0.2}


def test_libritts(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    paths = [f"{part}/{i}/12/{i}_12_000001_000000.wav" for i in (1, 2) for part in
             ("train-clean-100", "train-other-500", "dev-clean", "test-other")]  # fmt: skip
    another = "train-clean-5/1/12/1_12_000001_000000.wav"  # which is not LibriTTS's
    folder = make(tmp_path / "corpus", *paths, another, rate_hz=24_000)
    counts = dict.fromkeys(corpora()["libritts"].files, 2)
    publish(monkeypatch, "libritts", files={**counts, "train-other-500": 3})
    assert "has 8 recordings of LibriTTS, which has 9; unpack" in refusal(folder, "--corpus", "libritts")
    publish(monkeypatch, "libritts", files=counts)  # parts that are not there do not count
    dataset = prepared(folder, "libritts")
    assert dataset.modality["corpus"] == {"name": "libritts", "here": 8, "published": 8}
    assert names(dataset) == {
        "train": sorted(path for path in paths if path.startswith("train")),
        "valid": sorted(path for path in paths if path.startswith("dev")),
        "test": sorted(path for path in paths if path.startswith("test")),
    }


def test_a_part_of_libritts_that_cannot_be_divided(tmp_path: Path) -> None:
    folder = make(tmp_path / "corpus", "train-clean-100/1/12/1_12_000001_000000.wav", rate_hz=24_000)
    line = refusal(folder, "--corpus", "libritts", "--partial")
    assert "valid and test would be empty: 1 file, divided as published: train is " in line
    assert "valid is dev-clean or dev-other, test is test-clean or test-other" in line


def test_vctk_is_divided_by_speaker(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    speakers = [*(f"p{225 + i}" for i in range(11)), "s5"]
    paths = [f"wav48_silence_trimmed/{speaker}/{speaker}_{i:03d}_mic1.flac" for speaker in speakers for i in (1, 2)]
    folder = make(tmp_path / "corpus", *paths, "wav48_silence_trimmed/p225/p225_001_mic2.flac", rate_hz=48_000)
    publish(monkeypatch, "vctk", labels=12)
    dataset = prepared(folder, "vctk", "data.split.valid=0.3", "data.split.test=0.3")
    divided = names(dataset)
    assert sorted(chain(*divided.values())) == sorted(paths)
    of_speakers = {split: {path.split("/")[1] for path in of_split} for split, of_split in divided.items()}
    assert sum(map(len, of_speakers.values())) == 12  # each in one split
    corpus = find_corpus("vctk")
    again = corpus.divide(
        folder, [*paths, "wav48_silence_trimmed/p999/p999_001_mic1.flac"], SplitConfig("file", 0.3, 0.3)
    )
    assert all(again.splits[path] == split for split, of_split in divided.items() for path in of_split)


@pytest.mark.parametrize("corpus", corpora().values(), ids=lambda corpus: corpus.name)
def test_descriptions_are_sound(corpus: Corpus) -> None:
    assert corpus.holds(corpus.example) and not corpus.holds(f"deeper/{corpus.example}")
    assert not corpus.holds(corpus.example + "x") and corpus.label_of("x.txt") is None
    assert all(len(digest) in (0, 64) for digest in corpus.archives.values())
    assert bool(corpus.files) != (corpus.labels is not None) and corpus.source.startswith("https://")
    AudioFormat(**corpus.data)


def test_the_help_names_every_corpus(capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    assert {*re.findall(r"\w+", capsys.readouterr().out)} >= corpora().keys()
