"""Preparation killed at any moment, or one of its workers; the next run ends with the same bytes and nothing else."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.verbs.prepare import prepare as prepare_text
from tests.calling import write_splits
from tests.content import content
from tests.faults import forks
from tests.faults.fault import fault
from tests.faults.forks import Points
from tests.recipes.corpus_files import write_folder
from waveform.audio.corpus import groups
from waveform.audio.corpus.prepare import prepare as prepare_audio

Prepare = Callable[[Path], Any]


def make_sources(folder: Path) -> dict[str, Prepare]:
    """Make a folder of audio and one of text; return the functions that prepare each into a given folder."""
    groups._MIN_GROUP_BYTES = 15_000  # several shards of a few files
    write_splits(folder / "audio", train=8, valid=2, test=2, seconds=0.1)
    (folder / "audio" / "train" / "bad.wav").write_bytes(b"no audio")
    write_folder(folder / "text", {f"{i}.txt": f"some words of file {i}, and more of them\n" * 200 for i in range(12)})
    subwords = ["corpus.tokens=subwords", "corpus.vocab_size=300"]
    return {
        "audio": lambda data_dir: prepare_audio(folder / "audio", data_dir, show_progress=False),
        "text": lambda data_dir: prepare_text("folder", folder / "text", data_dir, show_progress=False),
        "subwords": lambda data_dir: prepare_text("folder", folder / "text", data_dir, subwords, show_progress=False),
    }


@fault("killed while preparing", short=9, long=150, in_server=True)
def _kill(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: the next run ends with the same shards, manifest and splits; nothing is left over.

    Kill at points of a preparation and at any time; audio at many more, and at any time three times in a row.
    """
    sources, log, figures = make_sources(folder), folder / "command.log", {}
    for number, (kind, prepare) in enumerate(sources.items()):
        place = folder / kind / "runs"
        place.mkdir(parents=True)
        prepare(place / "whole")  # here, so that forks find imports and kernels
        expected = content(place)
        shutil.rmtree(place)
        place.mkdir()

        def work(_: Points, prepare: Prepare = prepare, data_dir: Path = place / "whole") -> None:
            prepare(data_dir)

        began = time.monotonic()
        points = forks.undisturbed(work, log)
        took_s = time.monotonic() - began
        num_cases = (cases + number) // len(sources)
        is_audio = kind == "audio"
        chosen = forks.spread(points, (10 if is_audio else 1) * (num_cases - num_cases // 2), rng)
        kills: list[list[int] | list[float]] = [[index] for index in chosen]
        kills += [[rng.uniform(0, took_s) for _ in range(3 if is_audio else 1)] for _ in range(num_cases // 2)]
        for moments in kills:
            shutil.rmtree(place)
            place.mkdir()
            at = [points[moment] if isinstance(moment, int) else f"{moment:.3f} s" for moment in moments]
            print(f"{kind}: killed at {at}")
            for moment in moments:
                at_point = isinstance(moment, int)
                child = forks.disturbed(work, log, Points({moment: signal.SIGKILL} if at_point else {}))
                if not at_point:
                    time.sleep(moment)
                    os.kill(child, signal.SIGKILL)
                assert forks.wait(child) in (-signal.SIGKILL, 0), log.read_text()
            if is_audio or not (place / "whole").exists():  # text that is there must be whole without a second run
                forks.undisturbed(work, log)
            found = content(place)
            differ = {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}
            assert not differ, f"left over, missing or different: {sorted(differ)}"
        figures[kind] = {"kills": sum(map(len, kills)), "points": len(points)}
    return figures


_POOL = """
import sys
from waveform import cli
from waveform.audio.corpus import groups, workers
groups._MIN_GROUP_BYTES, workers._MIN_POOL_BYTES = 15_000, 0
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
"""


@fault("a worker killed while preparing", short=1, long=10, in_server=True)
def _kill_workers(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: one line, no hang; the next run continues."""
    sources = make_sources(folder)
    sources["audio"](folder / "whole")
    expected = content(folder / "whole")
    (folder / "pool.py").write_text(_POOL)
    num_reported = 0
    for case in range(cases):
        data_dir = folder / f"data_{case}"
        print(f"worker killed, case {case}")
        process = forks.start([folder / "pool.py", "prepare", folder / "audio", data_dir, "data.num_workers=2"])
        workers = forks.wait_for(lambda p=process: forks.children(p.pid, of="spawn_main"), "no worker came")
        time.sleep(rng.uniform(0, 3))
        forks.kill_if_there(workers[0])
        printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
        assert process.returncode in (0, 2) and "Traceback" not in printed, (process.returncode, printed)
        if process.returncode == 2:
            num_reported += 1
            assert "waveform prepare: a process that decodes audio died" in printed.splitlines()[-1], printed
        sources["audio"](data_dir)
        assert content(data_dir) == expected, "a different data set"
    return {"kills": cases, "told": num_reported}
