"""The report of a corpus."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.audio.conftest import write_audio
from waveform.audio.corpus.prepare import DataConfig, prepare
from waveform.audio.corpus.report import build_report, format_report
from waveform.audio.corpus.scan import Scan
from waveform.engine.dataset import Dataset
from waveform.system.console import printable


def _report(audio_dir: Path, data_dir: Path, config: DataConfig | None = None) -> dict:
    prepare(audio_dir, data_dir, config=config)
    return json.loads((data_dir / "report.json").read_bytes())


def _report_of(folder: Path, samples: np.ndarray, *, rate: int = 24_000, subtype: str | None = None) -> dict:
    """The report on one recording that trains, and a second of silence in each of the other splits."""
    for split in ("train", "valid", "test"):
        (folder / "audio" / split).mkdir(parents=True)
        soundfile.write(folder / "audio" / split / "s.wav", np.zeros(24_000), 24_000)
    soundfile.write(folder / "audio" / "train" / "s.wav", samples, rate, subtype=subtype)
    return _report(folder / "audio", folder / "data")


def test_totals_rates_and_channels(corpus_dir: Path, tmp_path: Path) -> None:
    write_audio(corpus_dir / "train" / "stereo.flac", duration_s=36, channels=2)
    (corpus_dir / "notes.txt").touch()
    report = _report(corpus_dir, tmp_path / "data")
    assert report["files"] == 13 and report["hours"] == pytest.approx((12 * 0.3 + 36) / 3600, rel=1e-4)
    assert report["splits"]["train"] == {"files": 9, "hours": pytest.approx((8 * 0.3 + 36) / 3600, rel=1e-4)}
    assert report["splits"]["test"]["files"] == 2
    assert report["sample_rates_hz"] == {"16000": 4, "24000": 5, "44100": 4}
    assert report["channels"] == {"1": 12, "2": 1}
    assert report["below_sample_rate"] == {
        f"{split}/clip{index}.wav": 16_000 for split, index in (("train", 2), ("train", 5), ("valid", 8), ("test", 11))
    }
    assert report["other_files"] == {".txt": 1} and report["refused"] == {}
    assert report["duration_s"]["min"] == 0.3 and report["duration_s"]["max"] == 36.0
    assert report["duration_s"]["50%"] == 0.3


def test_clipped_share_is_of_the_samples_as_decoded(tmp_path: Path) -> None:
    """They are counted before mixing: a clipped left channel counts even if the right one lowers the mean."""
    samples = np.zeros((48_000, 2))
    samples[:3000, 0], samples[3000:4000, 0], samples[4000:5000, 1] = 1.0, -1.0, 0.99
    report = _report_of(tmp_path, samples, rate=48_000)
    assert report["clipped_share"] == pytest.approx(4000 / (96_000 + 2 * 24_000))


def test_silent_share_is_of_20_ms_frames(tmp_path: Path) -> None:
    samples = np.full(6 * 24_000 + 100, 0.5)  # the 100 samples fill no frame
    samples[480 * 10 : 480 * 60] = 0.0009  # 50 frames below -60 dBFS
    samples[480 * 60 : 480 * 70] = 0.0011  # 10 above
    report = _report_of(tmp_path, samples, subtype="FLOAT")
    assert report["silent_share"] == pytest.approx((50 + 2 * 50) / (300 + 2 * 50))
    scaled = _report(tmp_path / "audio", tmp_path / "clips", DataConfig(normalise="clip"))
    assert scaled["silent_share"] == report["silent_share"]  # as recorded, not as scaled


def test_every_refusal_is_listed(corpus_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(25):
        (corpus_dir / "train" / f"bad{index:02}.wav").write_bytes(b"no audio")
    (corpus_dir / "stray.wav").write_bytes(b"")
    (corpus_dir / "test" / "link.wav").symlink_to("nowhere")
    report = _report(corpus_dir, tmp_path / "data")
    out = capsys.readouterr().out
    assert len(report["refused"]) == 27
    assert report["refused"]["stray.wav"] == "it lies outside the folders train, valid, test"
    assert report["refused"]["test/link.wav"] == "no such file or directory"
    assert "27 refused" in out and "and 7 more (report.json lists them all)" in out
    assert "    stray.wav: it lies outside" in out and out.count("bad") == 18
    assert "below 24,000 Hz: 4 files; an empty upper band lowers the NLL" in out and "train/clip2.wav (16000 Hz)" in out


def test_copies_in_two_splits_are_named(corpus_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(corpus_dir / "train" / "clip0.wav", corpus_dir / "test" / "copy.wav")
    shutil.copy(corpus_dir / "train" / "clip1.wav", corpus_dir / "train" / "copy.wav")  # within a split: no leak
    report = _report(corpus_dir, tmp_path / "data")
    assert report["shared_by_splits"] == [["test/copy.wav", "train/clip0.wav"]]
    out = capsys.readouterr().out
    assert "copies: 1 recording in more than one split" in out and "test/copy.wav = train/clip0.wav" in out


def test_odd_names_are_printed_escaped() -> None:
    assert printable("größe 日本.wav") == "größe 日本.wav"
    assert printable("a\nb\x1b[31m\udce9.wav") == "a\\nb\\x1b[31m\\udce9.wav"
    record = {
        "split": "train", "duration_s": 1.0, "sample_rate_hz": 8000, "channels": 1,
        "samples": 8000, "clipped": 0, "frames": 50, "silent": 0, "digest": "00",
    }  # fmt: skip
    sources, modality = {"files": {"\udce9\n.wav": record}}, {"sample_rate_hz": 24_000}
    dataset = Dataset(Path("data"), 256, modality, splits={}, sources=sources)
    report = build_report(dataset, scan=Scan(), split="by hash")
    text = format_report(report, title="data")
    text.encode("utf-8")
    assert "\\udce9\\n.wav (8000 Hz)" in text
    json.dumps(report).encode("ascii")
