"""Preparing a folder of audio: incremental, killed, refused."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
from pytest import MonkeyPatch

from tests.audio.conftest import interrupt, write_audio
from tests.calling import Capsys, before
from tests.content import content
from tests.faults import forks
from waveform.audio.audio_format import AudioFormat
from waveform.audio.corpus import groups, workers
from waveform.audio.corpus.prepare import DataConfig, prepare
from waveform.audio.corpus.scan import scan_folder
from waveform.audio.corpus.splits import SPLITS, SplitConfig
from waveform.audio.decoding_process import DecodingProcessDied
from waveform.audio.demo_speech import demo_speech_dir
from waveform.audio.files import read_audio
from waveform.engine.dataset import Dataset
from waveform.engine.shards import Shard
from waveform.engine.token_set import TokenSet
from waveform.system import progress
from waveform.system.console import counted
from waveform.system.errors import UserError


def _prepare(audio_dir: Path, data_dir: Path, config: DataConfig | None = None) -> Dataset:
    return prepare(audio_dir, data_dir, config=config, show_progress=False)


def assert_is_audio(tokens: TokenSet, name: str, audio_dir: Path) -> None:
    """The tokens of a recording are those of its samples."""
    expected = AudioFormat().encode(read_audio(audio_dir / name, sample_rate_hz=24_000))
    index = tokens.names.index(name)
    np.testing.assert_array_equal(tokens.read(index, start=0, stop=tokens.lengths[index]), expected)


@pytest.fixture
def decoded(monkeypatch: MonkeyPatch) -> list[str]:
    """The names of the files that are decoded, in order."""
    names: list[str] = []
    before(monkeypatch, groups, "AudioFile", lambda path: names.append(Path(path).name))
    return names


def test_tokens_are_the_audio(corpus_dir: Path, tmp_path: Path) -> None:
    dataset = _prepare(corpus_dir, tmp_path / "data")
    expected = {"kind": "audio", "sample_rate_hz": 24_000, "quantiser": "mu-law", "num_classes": 256}
    assert dataset.vocab_size == 256 and dataset.modality == expected
    assert len(dataset.splits["train"]) > 1
    names = set()
    for split in SPLITS:
        tokens = dataset.open_split(split)
        for name in tokens.names:
            assert_is_audio(tokens, name, corpus_dir)
            assert name.startswith(split)
            names.add(name)
    assert len(names) == 12


def test_the_pool_gives_the_same_bytes(corpus_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    _prepare(corpus_dir, tmp_path / "inline")
    monkeypatch.setattr(workers, "_MIN_POOL_BYTES", 0)
    _prepare(corpus_dir, tmp_path / "pool", DataConfig(num_workers=2))
    assert content(tmp_path / "pool") == content(tmp_path / "inline")


_DYING_POOL = """
import multiprocessing, sys, time
from pathlib import Path
from waveform.audio.corpus import groups, prepare, workers
from waveform.system.errors import UserError

Process, Pool = multiprocessing.get_context("spawn").Process, workers.ProcessPoolExecutor
start, submit, started = Process.start, Pool.submit, []


def kill_first(at, *, of=1):
    if moment == at and len(started) == of:
        started[0].kill()
        time.sleep(1)  # in which the pool notices


def patched_start(self):
    kill_first("before the second starts")
    start(self)
    started.append(self)
    kill_first("while the second starts", of=2)


def patched_submit(self, *args, **kwargs):
    kill_first("between two groups")
    return submit(self, *args, **kwargs)


if __name__ == "__main__":
    Process.start, Pool.submit = patched_start, patched_submit
    groups._MIN_GROUP_BYTES, workers._MIN_POOL_BYTES = 40_000, 0
    config = prepare.DataConfig(num_workers=2)
    for moment in ("before the second starts", "while the second starts", "between two groups"):
        started.clear()
        try:
            prepare.prepare(Path(sys.argv[1]), Path(sys.argv[2], moment), config=config, show_progress=False)
        except UserError as error:
            print(f"{moment}: {error}")
"""


@pytest.mark.slow
def test_a_worker_that_dies_while_others_start_is_reported(corpus_dir: Path, tmp_path: Path) -> None:
    """Python's pool does not end a process that it is starting meanwhile; `submit` may raise two kinds of errors."""
    script = tmp_path / "script.py"
    script.write_text(_DYING_POOL)
    command = [sys.executable, str(script), str(corpus_dir), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.count(": a process that decodes audio died") == 3, ended
    assert ended.stdout.count("with data.num_workers=1 if it happens again") == 3
    assert not ended.stderr


def test_nothing_is_done_twice(
    corpus_dir: Path, tmp_path: Path, decoded: list[str], monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL_S", 0)
    (corpus_dir / "train" / "bad.wav").write_bytes(b"no audio")
    first = prepare(corpus_dir, tmp_path / "data")
    said = capsys.readouterr()
    assert "13 files read" in said.out and len(decoded) == 13 and " x real time" in said.err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*") if path.is_file()}
    again = prepare(corpus_dir, tmp_path / "data")
    out = capsys.readouterr().out
    assert "data: 13 files unchanged\n" in out and "train/bad.wav: not readable as audio" in out
    assert len(decoded) == 13 and again == first
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_file_on_which_decoding_dies_once_is_used(corpus_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Something else may have killed the process; if it dies again, the file is refused (faults/hostile_audio)."""
    dies_once = Mock(side_effect=[DecodingProcessDied("a.wav", "it was killed"), *[None] * 12])
    before(monkeypatch, groups, "AudioFile", dies_once)
    dataset = _prepare(corpus_dir, tmp_path / "data")
    assert dies_once.call_count == 13 and not any("refused" in record for record in dataset.sources["files"].values())


def test_a_file_on_which_decoding_died_is_tried_again(
    corpus_dir: Path, tmp_path: Path, decoded: list[str], monkeypatch: MonkeyPatch
) -> None:
    def die(path: Path) -> None:
        if path.name == "clip3.wav":
            raise DecodingProcessDied(path, "it was killed")

    (corpus_dir / "train" / "bad.wav").write_bytes(b"no audio")
    with monkeypatch.context() as patch:
        before(patch, groups, "AudioFile", die)
        records = _prepare(corpus_dir, tmp_path / "data").sources["files"]
    decoded.clear()
    assert {path for path in records if "refused" in records[path]} == {"train/bad.wav", "train/clip3.wav"}
    dataset = _prepare(corpus_dir, tmp_path / "data")
    assert decoded == ["clip3.wav"] and "train/clip3.wav" in dataset.open_split("train").names


def test_added_files_alone_are_decoded(
    corpus_dir: Path, tmp_path: Path, decoded: list[str], monkeypatch: MonkeyPatch
) -> None:
    first = _prepare(corpus_dir, tmp_path / "data")
    before = content(tmp_path / "data" / "shards")
    decoded.clear()
    write_audio(corpus_dir / "train" / "added.flac")
    second = _prepare(corpus_dir, tmp_path / "data")
    after = content(tmp_path / "data" / "shards")
    assert decoded == ["added.flac"]
    assert before.items() < after.items() and len(after) == len(before) + 1
    assert set(first.splits["train"]) < set(second.splits["train"])
    assert "train/added.flac" in second.open_split("train").names
    monkeypatch.setattr("waveform.audio.corpus.prepare._MAX_SHARDS", len(after) - 1)
    third = _prepare(corpus_dir, tmp_path / "data")  # as if it had been updated hundreds of times
    assert third.splits == _prepare(corpus_dir, tmp_path / "fresh").splits != second.splits


def test_changed_and_removed_files(corpus_dir: Path, tmp_path: Path, decoded: list[str]) -> None:
    first = _prepare(corpus_dir, tmp_path / "data")
    files = first.sources["files"]
    victims = {files["train/clip0.wav"]["shard"], files["train/clip7.wav"]["shard"]}
    affected = {Path(path).name for path, record in files.items() if record["shard"] in victims}
    decoded.clear()
    size = (corpus_dir / "train" / "clip0.wav").stat().st_size
    write_audio(corpus_dir / "train" / "clip0.wav", seed=99, duration_s=0.3)
    assert (corpus_dir / "train" / "clip0.wav").stat().st_size == size
    (corpus_dir / "train" / "clip7.wav").unlink()
    second = _prepare(corpus_dir, tmp_path / "data")
    assert set(decoded) == affected - {"clip7.wav"} and len(decoded) < 11
    train = second.open_split("train")
    assert "train/clip7.wav" not in train.names and len(train) == 7
    assert_is_audio(train, "train/clip0.wav", corpus_dir)
    on_disk = {f"shards/{name}" for name in os.listdir(tmp_path / "data" / "shards")}
    assert on_disk == {shard for shards in second.splits.values() for shard in shards}
    for split in SPLITS:  # the same tokens as in a data set prepared from scratch
        fresh = _prepare(corpus_dir, tmp_path / "fresh").open_split(split)
        assert fresh.checksum == second.open_split(split).checksum


def test_damaged_and_lost_shards_are_made_again(
    corpus_dir: Path, tmp_path: Path, decoded: list[str], capsys: Capsys
) -> None:
    """Preparing again is what every message about damaged tokens advises."""
    dataset = _prepare(corpus_dir, tmp_path / "data")
    whole = content(tmp_path / "data")
    flipped, gone, cut = (tmp_path / "data" / dataset.splits[split][0] for split in SPLITS)
    damaged = bytearray(flipped.read_bytes())
    damaged[100] ^= 1
    flipped.write_bytes(damaged)
    gone.unlink()
    cut.write_bytes(b"cut")
    decoded.clear()
    prepare(corpus_dir, tmp_path / "data")
    assert content(tmp_path / "data") == whole and 0 < len(decoded) < 12
    assert f"{counted(len(decoded), 'file')} read, " in capsys.readouterr().out


def test_finished_groups_are_not_decoded_again(
    corpus_dir: Path, tmp_path: Path, decoded: list[str], monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    interrupt(monkeypatch, lambda: _prepare(corpus_dir, tmp_path / "data"), after=3)
    shards = sorted((tmp_path / "data" / "shards").iterdir())
    assert len(shards) == 3
    os.rename(shards[0], tmp_path / "lost")  # a record without its shard is not used
    finished = set(decoded) - {Path(utterance.name).name for utterance in Shard(tmp_path / "lost").utterances}
    decoded.clear()
    prepare(corpus_dir, tmp_path / "data")
    assert finished and not finished & set(decoded) and len(finished) + len(decoded) == 12
    assert f"{counted(len(finished), 'file')} taken from an interrupted run" in capsys.readouterr().out
    assert not (tmp_path / "data" / "unfinished").exists()


_KILLED_POOL = """
import sys, time
from waveform import cli
from waveform.audio.corpus import groups, workers
groups.AudioFile = lambda path: time.sleep(600)  # also in the workers, which import this script
groups._MIN_GROUP_BYTES, workers._MIN_POOL_BYTES = 1, 0
if __name__ == "__main__":
    cli.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers through /proc")
def test_a_killed_pool_leaves_no_worker(corpus_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_KILLED_POOL)
    process = forks.start([str(script), "prepare", str(corpus_dir), str(tmp_path / "data"), "data.num_workers=2"])
    try:
        pool = forks.wait_for(
            lambda: len(found := forks.children(process.pid, of="spawn_main")) == 2 and found, "no workers came"
        )
        forks.wait_for(lambda: list((tmp_path / "data" / "unfinished").glob(".*.partial")), "no worker writes")
    finally:
        process.kill()
        process.communicate(timeout=forks.TIMEOUT_S)  # a worker that is left holds the pipe
    forks.wait_for(lambda: not any(map(_runs, pool)), "a worker is left")
    _prepare(corpus_dir, tmp_path / "data")  # the lock ended with the process


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_few_files_held_out_trains_once_others_are_held_out(tmp_path: Path) -> None:
    for name in "jin":
        write_audio(tmp_path / "audio" / f"{name}.wav", duration_s=0.02)
    few = _prepare(tmp_path / "audio", tmp_path / "data")
    assert [few.open_split(split).names for split in SPLITS] == [["i.wav"], ["j.wav"], ["n.wav"]]
    for name in "qr":
        write_audio(tmp_path / "audio" / f"{name}.wav", duration_s=0.02)
    more = _prepare(tmp_path / "audio", tmp_path / "data")
    assert [more.open_split(split).names for split in SPLITS] == [["i.wav", "j.wav", "n.wav"], ["r.wav"], ["q.wav"]]
    fresh = _prepare(tmp_path / "audio", tmp_path / "fresh")
    assert all(more.open_split(split).checksum == fresh.open_split(split).checksum for split in SPLITS)


def test_other_split_settings_are_refused(tmp_path: Path) -> None:
    for index in range(30):
        write_audio(tmp_path / "audio" / f"{index % 5}" / f"{index}.wav", duration_s=0.02)
    config = DataConfig(split=SplitConfig(valid=0.3, test=0.3))
    _prepare(tmp_path / "audio", tmp_path / "data", config)
    before = content(tmp_path / "data")
    with pytest.raises(UserError, match=r"split.by was file and is folder, data.split.valid was 0.3 and is 0.4"):
        _prepare(tmp_path / "audio", tmp_path / "data", DataConfig(split=SplitConfig(by="folder", valid=0.4, test=0.3)))
    with pytest.raises(UserError, match=r"split.by was file and is order"):  # and not that a split would be empty
        _prepare(tmp_path / "audio", tmp_path / "data", DataConfig(split=SplitConfig(by="order", valid=0.01, test=0.3)))
    assert content(tmp_path / "data") == before


def test_another_corpus_does_not_replace_the_first(corpus_dir: Path, tmp_path: Path) -> None:
    _prepare(corpus_dir, tmp_path / "data")
    for split in SPLITS:
        write_audio(tmp_path / "other" / split / "x.wav")
    with pytest.raises(UserError, match="was prepared from different audio"):
        _prepare(tmp_path / "other", tmp_path / "data")
    moved = tmp_path / "moved"
    os.rename(corpus_dir, moved)
    assert len(_prepare(moved, tmp_path / "data").open_split("train")) == 8


def test_scan_finds_what_it_should(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "audio", tmp_path / "elsewhere"
    for name in ("b c/größe.WAV", "a.flac", ".hidden/h.wav", "._a.wav", "data/own.wav"):
        write_audio(folder / name)
    os.makedirs(os.fsencode(folder) + b"/caf\xe9")
    shutil.copy(folder / "a.flac", os.fsencode(folder) + b"/caf\xe9/x.flac")
    write_audio(elsewhere / "linked.wav")
    write_audio(tmp_path / "outside" / "other.wav")
    for name, target in (
        ("z", elsewhere),
        ("b c/loop", folder),
        ("b c/up", tmp_path),  # would pull in what is next to the corpus
        ("aaa", folder / "b c"),  # is reached by its real path
        ("self.wav", "self.wav"),
    ):
        (folder / name).symlink_to(target)
    (folder / "notes.txt").touch()
    (folder / "cover.JPG").touch()
    scan = scan_folder(folder, skip=folder / "data")
    expected = ["a.flac", "b c/größe.WAV", "caf\udce9/x.flac", "z/linked.wav"]
    assert [file.path for file in scan.files] == expected
    assert scan.refused == {"self.wav": "too many levels of symbolic links"}
    assert scan.other == {".txt": 1, ".jpg": 1}


_GOOD = None  # in place of a file's content


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no audio in .*: it holds nothing; audio is aif, "),
        (
            {"a.txt": b"", "b.txt": b""},
            r"no audio in .*: it holds 2 other files \(2 .txt\); .*; for text: python -m recipes",
        ),
        ({"a.m4a": b""}, r"it holds 1 other file \(1 .m4a\); audio is .*; ffmpeg -i FILE FILE.flac converts others"),
        (
            {"train/b.wav": b"", "valid/b.wav": b"", "test/b.wav": b"no audio"},
            r"no usable audio in .*: test/b.wav: not readable as audio .*; train/.*: it is empty",
        ),
        ({"a.wav": _GOOD}, r"would be empty: 1 file, .*; add files, or sort them into folders train/, valid/"),
        (
            {"train/b.wav": _GOOD, "valid/b.wav": _GOOD, "test/b.wav": b"no audio"},
            r"test would be empty: 2 files, divided by .*; add files, .*; "
            r"mend or remove the refused files: test/b.wav: not readable as audio",
        ),
        (
            {"test/a.wav": b"", "test/b.wav": _GOOD, "train/b.wav": _GOOD, "valid/b.wav": b"no audio"},
            "valid would be empty: 2 files, .*; mend or remove the refused files: valid/b.wav: not readable",
        ),
    ],
)
def test_files_that_make_no_data_set(files: dict[str, bytes | None], message: str, tmp_path: Path) -> None:
    (tmp_path / "audio").mkdir()
    for name, given in files.items():
        path = tmp_path / "audio" / name
        path.parent.mkdir(exist_ok=True)
        if given is _GOOD:
            write_audio(path, duration_s=0.1)
        else:
            path.write_bytes(given)
    with pytest.raises(UserError, match=message) as error:
        _prepare(tmp_path / "audio", tmp_path / "data")
    assert "\n" not in str(error.value)


def test_paths_that_cannot_be_used_are_explained(corpus_dir: Path, tmp_path: Path) -> None:
    file, foreign, sharded, links = (tmp_path / name for name in ("file", "foreign", "sharded", "links"))
    file.touch()
    foreign.mkdir()
    (foreign / "thesis.doc").touch()
    (sharded / "shards").mkdir(parents=True)
    (sharded / "shards" / "own.tar").touch()
    links.mkdir()
    (links / "a.wav").symlink_to("nowhere")
    for audio_dir, data_dir, message in (
        (tmp_path / "none", tmp_path / "data", "no such folder: .*none; give a folder of audio"),
        (file, tmp_path / "data", "file is a file; give a folder of audio"),
        (links, tmp_path / "data", r"no usable audio in .*: a.wav: no such file"),
        (corpus_dir, corpus_dir, "is the audio folder itself"),
        (corpus_dir, file, "file: a file has that name; choose another folder"),
        (corpus_dir, foreign, r"foreign is not empty \(thesis.doc\) and holds no prepared data"),
        (corpus_dir, sharded, r"sharded is not empty \(shards\) and holds no prepared data"),
    ):
        with pytest.raises(UserError, match=message) as error:
            _prepare(audio_dir, data_dir)
        assert "\n" not in str(error.value)
    assert os.listdir(foreign) == ["thesis.doc"] and os.listdir(sharded / "shards") == ["own.tar"]
    with pytest.raises(UserError, match=r"data.num_workers is 0; it must be a whole number of at least 1, or null"):
        _prepare(corpus_dir, tmp_path / "data", DataConfig(num_workers=0))


def test_a_full_disk_is_explained_and_survived(corpus_dir: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*: the file would exceed the size limit"):
            _prepare(corpus_dir, tmp_path / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _prepare(corpus_dir, tmp_path / "data")
    _prepare(corpus_dir, tmp_path / "fresh")
    assert content(tmp_path / "data") == content(tmp_path / "fresh")


def test_the_demo_speech_prepares(tmp_path: Path) -> None:
    dataset = _prepare(demo_speech_dir(), tmp_path / "data")
    seconds = {split: dataset.open_split(split).num_tokens / 24_000 for split in SPLITS}
    assert {split: len(dataset.open_split(split)) for split in SPLITS} == {"train": 29, "valid": 5, "test": 5}
    assert 110 < seconds["train"] < 140 and 14 < seconds["valid"] < 16 and 19 < seconds["test"] < 22
    assert sum(path.stat().st_size for path in demo_speech_dir().rglob("*.flac")) < 4e6
    needed = ("Allison Smith", "Digium", "https://creativecommons.org/licenses/by-sa/3.0/", "8 kHz")
    assert all(text in (demo_speech_dir().parent / "README.md").read_text() for text in needed)
    assert json.loads((tmp_path / "data" / "report.json").read_bytes())["files"] == 39


@pytest.fixture
def ramps(tmp_path: Path) -> Path:
    """Ten recordings at 16 kHz, of 1000, 1100, ... samples, each rising from -0.5 to 0.4."""
    folder = tmp_path / "audio"
    folder.mkdir()
    for i in range(10):
        samples = np.linspace(-0.5, 0.4, 1000 + 100 * i, dtype=np.float32)
        soundfile.write(folder / f"{i + 1}.wav", samples, 16_000, subtype="FLOAT")
    return folder


_IN_ORDER = SplitConfig("order", valid=0.2, test=0.2)


@pytest.mark.parametrize("drop_rest", [False, True])
def test_recordings_are_cut_into_pieces(ramps: Path, tmp_path: Path, drop_rest: bool) -> None:
    config = DataConfig(16_000, split=_IN_ORDER, normalise="clip", piece_samples=500, drop_rest=drop_rest)
    dataset = _prepare(ramps, tmp_path / "data", config)
    assert dataset.modality["pieces"] == {"samples": 500, "drop_rest": drop_rest}
    tokens = dataset.open_split("test")
    expected = {f"{name}.wav#{i:06d}": 500 for name, n in ((9, 3), (10, 3)) for i in range(n)}
    if not drop_rest:
        expected |= {"9.wav#000003": 300, "10.wav#000003": 400}
    assert dict(zip(tokens.names, tokens.lengths, strict=True)) == expected
    for index, length in enumerate(tokens.lengths):  # each piece by its own range
        piece = tokens.read(index, start=0, stop=length)
        assert piece[0] == 0 and piece[-1] == 255 and (np.diff(piece.astype(int)) >= 0).all()
    files = dataset.sources["files"]
    assert files["9.wav"]["duration_s"] == pytest.approx((1500 if drop_rest else 1800) / 16_000)
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    dropped = sum((1000 + 100 * i) % 500 for i in range(10))
    assert report.get("dropped_s") == (pytest.approx(dropped / 16_000) if drop_rest else None)
    before = content(tmp_path / "data")
    _prepare(ramps, tmp_path / "data", config)
    assert content(tmp_path / "data") == before


def test_a_recording_of_one_piece_keeps_its_name(ramps: Path, tmp_path: Path) -> None:
    dataset = _prepare(ramps, tmp_path / "data", DataConfig(16_000, split=_IN_ORDER, piece_samples=1900))
    whole = _prepare(ramps, tmp_path / "whole", DataConfig(16_000, split=_IN_ORDER))
    assert dataset.open_split("test").checksum == whole.open_split("test").checksum


def test_a_recording_shorter_than_a_piece_and_one_that_breaks_off_leave_no_piece(ramps: Path, tmp_path: Path) -> None:
    broken = bytearray((ramps / "2.wav").read_bytes())
    broken[-4:] = np.float32(np.nan).tobytes()  # its first pieces are sound
    (ramps / "2.wav").write_bytes(broken)
    config = DataConfig(16_000, split=_IN_ORDER, piece_samples=1050, drop_rest=True)
    dataset = _prepare(ramps, tmp_path / "data", config)
    files = dataset.sources["files"]
    assert files["1.wav"]["refused"] == "it is shorter than a piece of 1,050 samples" and "refused" in files["2.wav"]
    assert dataset.open_split("train").names == ["3.wav", "4.wav", "5.wav", "6.wav"]


def test_a_data_set_divided_in_order_takes_no_new_files(ramps: Path, tmp_path: Path) -> None:
    config = DataConfig(16_000, split=_IN_ORDER)
    _prepare(ramps, tmp_path / "data", config)
    shutil.copy(ramps / "1.wav", ramps / "0.wav")
    with pytest.raises(UserError, match="was prepared differently: files was 10 and is 11"):
        _prepare(ramps, tmp_path / "data", config)
    with pytest.raises(UserError, match=r"data.piece_samples was None and is 500"):
        _prepare(ramps, tmp_path / "data", DataConfig(16_000, split=_IN_ORDER, piece_samples=500))
    refusal = r"data.piece_samples is 10; it must be a whole number of at least 100, or null"
    with pytest.raises(UserError, match=refusal):
        _prepare(ramps, tmp_path / "data", DataConfig(piece_samples=10))
