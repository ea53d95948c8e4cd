"""`compare --published`: figures of others beside those of runs trained and scored alike, and only of such."""

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from pytest import MonkeyPatch

import waveform
from tests.audio.corpus.test_catalogue import publish
from tests.calling import Capsys, cli, figures_of, mistake
from waveform.audio.corpus.published import find_published, published_rows
from waveform.engine.dataset import read_dataset
from waveform.engine.interface import shift_right
from waveform.speech.figures import note_of

SMALL = ["preset=demo", "model=wavenet", "train.device=cpu", "train.max_seconds=null", "train.max_steps=2"]
NAMES = [f"{word}/ab_nohash_{i}.wav" for word in ("one", "two") for i in range(3)]


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SC09, a data set of it as of the whole corpus, one as of a part, and a run on each."""
    place = tmp_path_factory.mktemp("published")
    for i, name in enumerate(NAMES):
        (place / "sc09" / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(place / "sc09" / name, np.random.default_rng(i).uniform(-0.2, 0.2, 1600 - 100 * i), 16_000)
    (place / "sc09" / "validation_list.txt").write_text(NAMES[0])
    (place / "sc09" / "testing_list.txt").write_text("\n".join(NAMES[1:3]))
    with pytest.MonkeyPatch.context() as patched:
        publish(patched, "sc09", files={"": 6})
        cli("prepare", place / "sc09", place / "whole", "--corpus", "sc09")
    cli("prepare", place / "sc09", place / "part", "--corpus", "sc09", "--partial")
    for name in ("whole", "part"):
        cli("train", place / name, place / f"on_{name}", "data.labels=none", *SMALL)
    return place


def test_figures_of_others_stand_beside(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    publish(monkeypatch, "sc09", files={"": 6})
    (entry,) = figures_of(tmp_path / "f.json", "compare", place / "on_whole", "--published", "sc09")
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("WaveNet (published)")]
    assert row.split()[2:7] == [f"{1.925 * math.log(2):.3f}", "1.925", "-", "-", "4.2"]
    assert [line.split()[0] for line in lines if "(published) " in line] == ["SampleRNN", "WaveNet", "SaShiMi", "Mamba"]
    of_others = "(published): measured by others, in bits; Goel et al. 2022, Table 6 (https://arxiv.org"
    assert lines[-1].startswith(of_others)
    assert any("state by clip" in line for line in lines)
    assert entry["protocol"] == "clip" and entry["num_tokens"] == 1500 + 1400
    assert "not better" not in note_of([entry])
    worse = {**entry, "nats_per_token": entry["linear_prediction_nats_per_token"]}
    assert note_of([worse]).endswith("; not better than linear prediction, which needs no training: wavenet")
    source = "Gu and Dao 2023, Table 4 (https://arxiv.org/abs/2312.00752)"
    assert entry["published"][3] == {"model": "Mamba", "parameters": 6.1e6, "bits": 1.852, "source": source}


def test_runs_of_other_chunks_are_scored_by_clip_too(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    publish(monkeypatch, "sc09", files={"": 6})
    cli("train", place / "whole", tmp_path / "run", *SMALL, "data.labels=none", "train.state=chunk")
    entries = figures_of(tmp_path / "f.json", "compare", place / "on_whole", tmp_path / "run", "--published", "sc09")
    assert [entry["protocol"] for entry in entries] == ["clip", "clip"]


def test_a_run_with_labels_is_refused(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    publish(monkeypatch, "sc09", files={"": 6})
    cli("train", place / "whole", tmp_path / "labelled", *SMALL)
    assert waveform.load(tmp_path / "labelled").labels == ["two"]  # the training split has no other
    line = mistake(["compare", tmp_path / "labelled", "--published", "sc09"])
    assert "it reads labels (train with data.labels=none); prepare all" in line


def test_clips_are_scored_whole_from_a_fresh_state(place: Path, tmp_path: Path) -> None:
    """The protocol, against each clip on its own in one pass; padding counts nowhere."""
    figures = figures_of(tmp_path / "f.json", "evaluate", place / "on_whole", "--protocol", "clip")
    run = waveform.load(place / "on_whole")
    tokens = read_dataset(place / "whole").open_split("test")
    assert tokens.lengths == [1500, 1400]
    total = 0.0
    for i, length in enumerate(tokens.lengths):
        targets = torch.from_numpy(np.array(tokens.read(i, start=0, stop=length), dtype=np.int64))[None]
        fresh = run.model.init_state(1, device="cpu", dtype=torch.float32)
        step = run.model.forward(shift_right(targets, vocab_size=256), fresh)
        total += float(run.model.head.nll(step.hidden, targets).double().sum())
    assert figures["nats_per_token"] == pytest.approx(total / 2900, rel=1e-6)


def test_other_figures_are_refused(place: Path) -> None:
    compare = ["compare", "--published", "sc09"]
    line = mistake([*compare, place / "on_part"])
    assert "cannot be compared with the figures published for SC09 (the digits of Speech Commands v0.02): " in line
    assert "it was trained on 6 of its 38,908 recordings; prepare all of the corpus with --corpus sc09" in line
    line = mistake([*compare, place / "on_whole", "--data", place / "part", "--protocol", "chunk"])
    assert "tested on 6 of its 38,908 recordings; protocol chunk is not clip;" in line
    assert ": split valid is not test;" in mistake([*compare, place / "on_whole", "--split", "valid"])
    for cut in ("--rows", "--stride"):
        assert "--published compares clips that are scored whole" in mistake([*compare, place / "on_whole", cut, 8])
    line = mistake(["compare", place / "on_whole", "--published", "youtubemix"])
    differs = "data.piece_samples is 16000, not 131072; data.drop_rest"
    assert f"it was trained on other data than YouTubeMix; {differs}" in line
    line = mistake(["compare", place / "on_whole", "--published", "vctk"])
    assert "--published vctk: there are figures for sc09, youtubemix, beethoven" in line


def test_a_run_that_began_with_other_weights_is_refused(place: Path, tmp_path: Path) -> None:
    as_sc09 = ["data.sample_rate_hz=16000", "data.quantiser=mu_law_floor", "data.normalise=clip"]
    divided = ["data.split.by=order", "data.split.valid=0.3", "data.split.test=0.3"]
    cli("prepare", place / "sc09", tmp_path / "own", *as_sc09, *divided)
    cli("train", tmp_path / "own", tmp_path / "before", *SMALL)
    more = [tmp_path / "run", "--from", tmp_path / "before", "data.labels=none", *SMALL]
    cli("train", place / "whole", *more)  # pieces and corpus may differ
    line = mistake(["compare", tmp_path / "run", "--published", "sc09"])
    assert f"began with the weights of {tmp_path / 'before'}" in line and "trained on" not in line
    line = mistake(["evaluate", tmp_path / "before", "--protocol", "clip"])
    assert "--protocol clip is for data that is cut into clips, and that of" in line


@pytest.mark.parametrize("name", ["sc09", "youtubemix", "beethoven"])
def test_rows_have_a_source(name: str) -> None:
    rows = published_rows(find_published(name))
    assert len(rows) >= 3 and all("https://arxiv.org/abs/" in row["source"] for row in rows)
    assert [row["bits"] for row in rows] == sorted((row["bits"] for row in rows), reverse=True)
