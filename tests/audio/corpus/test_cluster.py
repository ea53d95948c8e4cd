"""Preparing on a Dask cluster of two processes of this machine, one of which is killed."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pytest import MonkeyPatch

import waveform
from tests.audio.conftest import interrupt
from tests.content import content
from waveform.audio.corpus import cluster, groups, workers
from waveform.system.errors import UserError

_DIES_ONCE = """
import os, signal
from waveform.audio.corpus import groups
from waveform.audio.files import AudioFile

def dies_once(path):
    try:
        os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return AudioFile(path)
    os.kill(os.getpid(), signal.SIGKILL)

groups.AudioFile = dies_once
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Dask
def test_a_cluster_that_loses_a_worker_continues(corpus_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    waveform.prepare(corpus_dir, tmp_path / "here", show_progress=False)
    interrupt(monkeypatch, lambda: waveform.prepare(corpus_dir, tmp_path / "there", show_progress=False), after=2)
    assert len(list((tmp_path / "there" / "shards").iterdir())) == 2
    (tmp_path / "dies_once.py").write_text(_DIES_ONCE.format(marker=str(tmp_path / "died")))
    worker = ["-m", "distributed.cli.dask_worker", "--no-nanny", "--no-dashboard", "--preload", "dies_once.py"]
    monkeypatch.setattr(cluster, "_PATIENCE_S", 120)  # while other tests run
    local = {"processes": False, "protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": None}
    with distributed.LocalCluster(n_workers=0, **local) as scheduler:
        address = scheduler.scheduler_address.removeprefix("tcp://")
        processes = [subprocess.Popen([sys.executable, *worker, address], cwd=tmp_path) for _ in range(2)]
        try:
            waveform.prepare(corpus_dir, tmp_path / "there", executor=f"dask://{address}", show_progress=False)
            assert sorted(process.poll() or 0 for process in processes) == [-9, 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_any_executor_will_do(corpus_dir: Path, tmp_path: Path) -> None:
    waveform.prepare(corpus_dir, tmp_path / "here", show_progress=False)
    with ThreadPoolExecutor(3) as threads:
        waveform.prepare(corpus_dir, tmp_path / "threads", executor=threads, show_progress=False)
    assert content(tmp_path / "threads") == content(tmp_path / "here")


def test_a_worker_must_see_the_folders(corpus_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    elsewhere = {"audio_dir": tmp_path / "a", "data_dir": tmp_path}
    monkeypatch.setattr(workers, "prepare_group", lambda group, **_: groups.prepare_group(group, **elsewhere))
    with pytest.raises(UserError, match=r"does not see .*/a; all workers need the same folders"):
        waveform.prepare(corpus_dir, tmp_path / "data", show_progress=False)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("spark://host:1", "--executor spark://host:1 is not dask://HOST:PORT"),
        ("dask://host", "--executor dask://host is not dask://HOST:PORT"),
        ("dask://127.0.0.1:1", "no scheduler answers at 127.0.0.1:1"),
    ],
)
def test_mistakes(corpus_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch, address: str, message: str) -> None:
    if "127" in address:
        pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "_PATIENCE_S", 1)
    with pytest.raises(UserError, match=message):
        waveform.prepare(corpus_dir, tmp_path / "data", executor=address)


def test_distributed_is_not_installed(corpus_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r'--executor needs distributed: pip install "waveform\[cluster\]"'):
        waveform.prepare(corpus_dir, tmp_path / "data", executor="dask://127.0.0.1:1")
