"""Labels of a corpus: read from folders or a CSV, kept in its data set, and refused with one line."""

import re
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from tests.audio.conftest import write_audio
from waveform.audio.corpus import groups
from waveform.audio.corpus.labels import find_labels
from waveform.audio.corpus.prepare import DataConfig, prepare
from waveform.engine.dataset import Dataset, read_dataset
from waveform.system.errors import UserError

PATHS = ["ann/1.wav", "ann/deep/2.wav", "bob/1.wav", "top.wav"]


def csv_file(folder: Path, content: str) -> Path:
    file = folder / "labels.csv"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    return file


def test_folders_are_labels() -> None:
    assert find_labels("folder", paths=PATHS) == {"ann/1.wav": "ann", "ann/deep/2.wav": "ann", "bob/1.wav": "bob"}
    in_layout = ["train/ann/1.wav", "test/bob/x/2.wav", "valid/3.wav"]
    expected = {"train/ann/1.wav": "ann", "test/bob/x/2.wav": "bob"}
    assert find_labels("folder", paths=in_layout, layout="train/valid/test") == expected
    assert find_labels(None, paths=PATHS) == find_labels("none", paths=PATHS) == {}


def test_a_csv_has_labels_of_some_files(tmp_path: Path) -> None:
    file = csv_file(tmp_path, '\ufefflabel,other,path\n Ann B. ,1,top.wav\n"x, y",2,bob/1.wav,\n')
    assert find_labels(str(file), paths=PATHS) == {"top.wav": "Ann B.", "bob/1.wav": "x, y"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "labels no file; leave it out"),
        ("name,speaker\ntop.wav,a\n", "has no column 'path'; its first line must name the columns path,label"),
        ("path,speaker\ntop.wav,a\n", "has no column 'label'"),
        ("path,label\nnone.wav,a\n", "there is no audio file none.wav; paths are relative to the audio folder"),
        ("path,label\ntop.wav,a\nbob/1.wav,b\ntop.wav,a\n", "line 4: top.wav is listed twice; give it one label"),
        ("path,label\ntop.wav,  \n", "line 2: the label of top.wav is empty; give it one, or leave the line out"),
        ("path,label\ntop.wav,Smith, Ann\n", "line 2: there are more values than columns; quote a value"),
        ("path,label\ntop.wav\n", "line 2: the label of top.wav is empty"),
        ("path,label\ntop.wav,a\x1bb\n", r"'a\x1bb' (top.wav) cannot be a label, which is 1 to 100 bytes"),
        ("path,label\n", "labels no file; leave it out"),
        ('path,label\n"top.wav,a\n', "is not a CSV in UTF-8"),
        ("path,label\ntop.wav,\udce4\n", "is not a CSV in UTF-8"),  # ä in Latin-1
    ],
)
def test_a_csv_with_a_mistake(content: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        find_labels(str(csv_file(tmp_path, content)), paths=PATHS)
    assert words in str(error.value) and "data.labels=" in str(error.value) and "\n" not in str(error.value)


def test_labels_that_are_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.labels=folder labels no file; leave it out"):
        find_labels("folder", paths=["a.wav"])
    with pytest.raises(UserError, match=r"data.labels=folder labels no file; leave it out"):
        find_labels("folder", paths=["train/a.wav"], layout="train/test")
    with pytest.raises(UserError, match=r"cannot read data.labels=.*none.csv \(No such file or directory\)"):
        find_labels(str(tmp_path / "none.csv"), paths=PATHS)


# In a data set


@pytest.fixture
def speakers(tmp_path: Path) -> Path:
    """Nine short files of two speakers, in a train/valid/test layout, and one of nobody's."""
    folder = tmp_path / "audio"
    for split, num in (("train", 2), ("valid", 1), ("test", 1)):
        for i in range(num):
            for speaker in ("ann", "bob"):
                write_audio(folder / split / speaker / f"{i}.wav", seed=i, duration_s=0.1)
    write_audio(folder / "train" / "nobody.wav", duration_s=0.1)
    return folder


def _prepare(audio: Path, data: Path, labels: str | None = None) -> Dataset:
    return prepare(audio, data, config=DataConfig(labels=labels), show_progress=False)


def labels_of(data: Dataset) -> list[str | None]:
    return data.open_split("train").labels


def test_a_data_set_keeps_labels(speakers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepare(speakers, tmp_path / "data", config=DataConfig(labels="folder"))
    assert "labels      2 (fewest files: 4, of ann); 1 file unlabelled" in capsys.readouterr().out
    for opened in (data, read_dataset(tmp_path / "data")):
        assert labels_of(opened) == ["ann", "ann", "bob", "bob", None]
        assert opened.open_split("test").labels == ["ann", "bob"]
        assert opened.open_split("test").label_numbers == [0, 0]
    assert _prepare(speakers, tmp_path / "data") == data  # asked once, they stay


def test_a_data_set_without_labels_is_as_before(speakers: Path, tmp_path: Path) -> None:
    plain = _prepare(speakers, tmp_path / "plain")
    labelled = _prepare(speakers, tmp_path / "labelled", "folder")
    assert not any(b"label" in (tmp_path / "plain" / f"{name}.json").read_bytes() for name in ("dataset", "report"))
    assert plain.digests == labelled.digests  # the same shards
    assert plain.open_split("test").checksum == labelled.open_split("test").checksum
    assert (tmp_path / "plain" / "dataset.json").read_bytes() != (tmp_path / "labelled" / "dataset.json").read_bytes()


def test_labels_are_given_without_decoding_again(speakers: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    _prepare(speakers, tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(groups, "AudioFile", None)
        data = _prepare(speakers, tmp_path / "data", "folder")
        assert labels_of(data) == ["ann", "ann", "bob", "bob", None]
    write_audio(speakers / "train" / "cat" / "0.wav", duration_s=0.1)
    (speakers / "train" / "ann" / "0.wav").unlink()
    data = _prepare(speakers, tmp_path / "data")
    assert labels_of(data) == ["ann", "bob", "bob", "cat", None]


def test_labels_from_a_csv_follow_the_file(speakers: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    csv_file(tmp_path, "path,label\ntrain/nobody.wav,ann\n")
    monkeypatch.chdir(tmp_path)
    assert labels_of(_prepare(speakers, tmp_path / "data", "labels.csv")) == [None] * 4 + ["ann"]
    csv_file(tmp_path, "path,label\ntrain/nobody.wav,bob\n")
    monkeypatch.chdir(speakers)
    assert labels_of(_prepare(speakers, tmp_path / "data")) == [None] * 4 + ["bob"]
    (tmp_path / "labels.csv").rename(tmp_path / "moved.csv")
    with pytest.raises(UserError, match="cannot read"):
        _prepare(speakers, tmp_path / "data")
    for named in (str(tmp_path / "moved.csv"), None):  # named once, it is found again
        assert labels_of(_prepare(speakers, tmp_path / "data", named)) == [None] * 4 + ["bob"]


def test_other_labels_are_refused(speakers: Path, tmp_path: Path) -> None:
    _prepare(speakers, tmp_path / "data", "folder")
    file = csv_file(tmp_path, "path,label\ntrain/nobody.wav,ann\n")
    for asked in (str(file), "none"):
        said = f"was prepared differently: data.labels was folder and is {asked}"
        with pytest.raises(UserError, match=re.escape(said)):
            _prepare(speakers, tmp_path / "data", asked)
    with pytest.raises(UserError, match="there is no audio file x"):
        _prepare(speakers, tmp_path / "new", str(csv_file(tmp_path, "path,label\nx,ann\n")))
    assert not (tmp_path / "new").exists()
