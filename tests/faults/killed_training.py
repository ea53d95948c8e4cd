"""Training killed at any moment: at every write of a checkpoint, every step, every evaluation; one process and two."""

import json
import math
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from recipes.cli import main as recipes
from tests.content import content
from tests.faults import forks
from tests.faults.fault import fault
from tests.faults.forks import Points
from waveform.cli import main
from waveform.engine import checkpoint, single_pass, token_learner
from waveform.engine.dataset import Dataset, write_dataset
from waveform.engine.learner import Learner
from waveform.engine.shards import ShardWriter
from waveform.engine.token_learner import TokenLearner

_STEPS = 7
SETTINGS = [
    *("model=compressive_transformer", "model.num_layers=1", "model.d_model=16", "model.num_heads=2"),
    *("model.d_feedforward=16", "model.window=8", "model.memory=8", "model.compressed=4", "model.dropout=0.1"),
    *(f"train.max_steps={_STEPS}", "train.batch_size=4", "train.chunk=16", "train.log_every=2", "train.device=cpu"),
    *("train.checkpoint_every=3", "train.evaluate_every=3", "train.sample_seconds=0", "train.evaluate_tokens=null"),
    *("train.decay_steps=100", "train.warmup_steps=2", "train.timeout_s=60"),
]
_TIMES = {"seconds", "tokens_per_second", "waited_s"}
_FEWEST_POINTS = 30  # of the second rank, which writes little


class Place:
    """A data set and, once asked for, what an undisturbed run makes of it with SETTINGS."""

    def __init__(self, folder: Path, *, num_ranks: int = 1) -> None:
        self.folder, self.num_ranks, self.data = folder, num_ranks, folder / "data"
        self.data.mkdir()
        random_numbers, splits = np.random.default_rng(0), {}
        # An evaluation has eight windows: 16 pieces of 63.
        for split, lengths in (("train", [150, 90, 210, 60, 170]), ("valid", [600, 400]), ("test", [20])):
            splits[split] = [f"{split}.shard"]
            with ShardWriter(self.data / f"{split}.shard", vocab_size=256) as writer:
                for i, length in enumerate(lengths):
                    writer.write(f"utterance_{i}", [random_numbers.integers(0, 256, length)])
        write_dataset(Dataset(self.data, 256, {"kind": "audio", "sample_rate_hz": 24_000}, splits, {}))

    @cached_property
    def whole(self) -> Path:
        """A run with a checkpoint of each step."""
        run_dir = self.folder / f"whole_{self.num_ranks}"
        self.train(run_dir, more=(f"train.keep_checkpoints={_STEPS}", "train.checkpoint_every=1"))
        return run_dir

    @cached_property
    def expected(self) -> dict[str, Any]:
        return final(self.whole)

    @cached_property
    def points(self) -> list[str]:
        """Of the first rank."""
        return self.train(self.folder / f"counted_{self.num_ranks}")

    def train(self, run_dir: Path, *, kill: Mapping[int, int] | None = None, more: Sequence[str] = ()) -> list[str]:
        """Train into `run_dir`; kill: rank -> point. Returns the first rank's points if nothing was killed.

        Raises AssertionError if an exit code is not as it must be, or something hangs.
        """
        logs = [run_dir.with_name(f"{run_dir.name}_{rank}.log") for rank in range(self.num_ranks)]
        work, port = command(["train", self.data, run_dir, *SETTINGS, *more]), forks.free_port()
        children = []
        for rank, log in enumerate(logs):

            def as_rank(points: Points, rank: int = rank) -> int | None:
                if self.num_ranks > 1:
                    forks.become_rank(rank, of=self.num_ranks, port=port)
                return work(points)

            points = Points({kill[rank]: signal.SIGKILL} if kill and rank in kill else {})
            children.append(forks.disturbed(as_rank, log, points))
        ended = [forks.wait(child) for child in children]
        text = "".join(log.read_text() for log in logs)
        # A rank that was not killed ends because another one was.
        assert set(ended) <= ({-signal.SIGKILL, 1} if kill else {0}), f"ended with {ended}: {text[-3000:]}"
        assert not kill or -signal.SIGKILL in ended, f"nothing was killed: {ended}"
        for log in logs:
            log.unlink()
        return [] if kill else forks.points_in(logs[0])

    def check_resumes(self, run_dir: Path) -> int:
        """Check that, whatever is in `run_dir`, the same call ends as usual; return the step that it resumed from."""
        step = self.check_checkpoints(run_dir)
        self.train(run_dir)
        check_same(final(run_dir), self.expected)
        return step

    def check_checkpoints(self, run_dir: Path) -> int:
        """Check that what counts as the newest checkpoint is whole and equals an undisturbed run's; return its step."""
        found = checkpoint.newest(run_dir)
        if found is None:
            return 0
        like = self.whole / "checkpoints" / found.folder.name
        assert content(found.folder).keys() == content(like).keys()
        for path in found.folder.glob("*.safetensors"):
            assert same(load_file(path), load_file(like / path.name)), path
        return found.step


def command(arguments: Sequence[str | Path], *, also: Callable[[Points], None] = lambda points: None) -> forks.Work:
    """Return what runs a command line, for `forks.disturbed`. also: makes more points."""
    words = [str(argument) for argument in arguments]

    def work(points: Points) -> int:
        surround(Learner, "update", points)
        surround(TokenLearner, "reduce_gradients", points)
        surround(token_learner, "evaluate", points)
        surround(single_pass, "score_window", points)
        also(points)
        return recipes(words[1:]) if words[0] == "recipes" else main(words)

    return work


def surround(owner: Any, name: str, points: Points) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        points.point(f"before {name}")
        result = real(*args, **kwargs)
        points.point(f"after {name}")
        return result

    setattr(owner, name, surrounded)


def final(run_dir: Path) -> dict[str, Any]:
    """Return everything of a finished run that must not depend on interruptions."""
    last = max((run_dir / "checkpoints").iterdir())
    progress = json.loads((last / "progress.json").read_bytes())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        **{path.name: load_file(path) for path in sorted(last.glob("*.safetensors"))},
        "progress": {key: value for key, value in progress.items() if key not in _TIMES},
        "metrics": [{key: value for key, value in record.items() if key not in _TIMES} for record in records],
        "files": [name for name in content(run_dir) if not name.startswith(("tensorboard", "checkpoints"))],
        "checkpoints": sorted(path.name for path in (run_dir / "checkpoints").iterdir())[-2:],
    }


def same(a: Any, b: Any) -> bool:
    """Compare bit by bit, except for logged sums over ranks, which a resumed run adds in a different order."""
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=1e-12) if isinstance(a, float) else bool(a == b)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check what two runs came to, and quote the first entries that differ."""
    for what, b in expected.items():
        a = found[what]
        if isinstance(a, list) and isinstance(b, list):
            a, b = next(((x, y) for x, y in zip(a, b, strict=False) if not same(x, y)), (a, b))
        assert same(a, b), f"different {what}: {a}, not {b}"


@fault("killed while training, at every step of it", short=14, long=1000, in_server=True)
def _kill_everywhere(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: resumes; the weights, random numbers and metrics are those of an undisturbed run; no other files."""
    place = Place(folder)
    chosen = forks.spread(place.points, cases, rng)
    resumed_from: Counter[int] = Counter()
    for index in chosen:
        run_dir = folder / f"run_{index}"
        print(f"killed at {index}, {place.points[index]!r}")
        place.train(run_dir, kill={0: index})
        resumed_from[place.check_resumes(run_dir)] += 1
        assert {path.name for path in (run_dir / "checkpoints").iterdir()} == set(place.expected["checkpoints"])
        shutil.rmtree(run_dir)
    return {"kills": len(chosen), "points": len(place.points), "resumed_from_step": dict(sorted(resumed_from.items()))}


@fault("a rank of two killed while training", short=2, long=60, in_server=True)
def _kill_a_rank(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: resumes; the weights, random numbers and metrics are those of an undisturbed run; no other files.

    Kill one of two ranks, or both, at any of its points; the other must end by itself, with a line.
    """
    place = Place(folder, num_ranks=2)
    for case in range(cases):
        run_dir = folder / f"run_{case}"
        victims = [(0,), (1,), (0, 1)][case % 3]
        kill = {rank: rng.randrange(len(place.points) if rank == 0 else _FEWEST_POINTS) for rank in victims}
        print(f"ranks killed at {kill}")
        place.train(run_dir, kill=kill)
        place.check_resumes(run_dir)
        shutil.rmtree(run_dir, ignore_errors=True)
    return {"kills": cases}


_LONGER = ["train.max_steps=24", "train.checkpoint_every=3", "train.evaluate_every=10", "train.log_every=3"]


def start_command(data_dir: Path, run_dir: Path, *, num_ranks: int, settings: Sequence[str]) -> forks.Process:
    """Start `waveform train` as a user does, alone or under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = ["-m", "waveform", "train", data_dir, run_dir, *SETTINGS, *settings]
    return forks.start([*(torchrun if num_ranks > 1 else []), *command])


# Points of forked processes stand for it in the short form.
@fault("processes killed while training, at any time", short=0, long=100, in_server=True)
def _kill_processes(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: resumes; the weights, random numbers and metrics are those of an undisturbed run; no other files.

    Kill real commands at random times, again and again until they end by themselves; one process and two.
    """
    place = Place(folder)
    kills, runs, expected, took_s = 0, 0, {}, {}
    for num_ranks in (1, 2):
        whole, began = folder / f"undisturbed_{num_ranks}", time.monotonic()
        process = start_command(place.data, whole, num_ranks=num_ranks, settings=_LONGER)
        printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
        assert process.returncode == 0, printed
        expected[num_ranks], took_s[num_ranks] = final(whole), time.monotonic() - began
    while kills < cases:
        num_ranks, run_dir = 1 + runs % 2, folder / f"processes_{runs}"
        runs += 1
        print(f"run {runs} on {num_ranks} processes")
        ended = False
        while not ended:
            process = start_command(place.data, run_dir, num_ranks=num_ranks, settings=_LONGER)
            if kills < cases:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(rng.uniform(0, took_s[num_ranks]))
            if process.poll() is None and kills < cases:
                kills += 1
                workers = forks.children(process.pid, of="waveform")
                one_alone = num_ranks > 1 and workers and rng.random() < 0.5
                for pid in [rng.choice(workers)] if one_alone else [process.pid, *workers]:
                    forks.kill_if_there(pid)
            printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
            ended = process.returncode == 0
            assert ended or kills, printed
        check_same(final(run_dir), expected[num_ranks])
        shutil.rmtree(run_dir)
    return {"kills": kills, "runs": runs}
