"""Damage to every file of a run and of its data set, before every command that reads them.

What must hold: one line names the file, or a warning names it and the previous checkpoint is used. If the command
succeeds, it gives exactly what it gives without the damage. No traceback, no figures from changed bytes.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from recipes.cli import main as recipes
from tests.content import content
from tests.faults.calling import Outcome, call, forget_peak_memory, peak_memory_mb
from tests.faults.fault import fault
from tests.faults.small_runs import AGENT_SETTINGS, SETTINGS, TEXT_SETTINGS, restored, whole
from waveform.cli import main as waveform

_SLOW_S = 60.0  # for a command that takes tenths of a second on whole files
_MAX_MB = 1500.0


@dataclass(frozen=True)
class Reader:
    """A command that reads files of a run or its data, and what to compare of what it made."""

    main: Callable[[Sequence[str]], int]
    command: str  # P/ stands for the place
    made: Callable[[Path], Any] | None  # None: it prints
    reads: tuple[str, ...]  # names of the folders whose files it reads
    share: float = 1.0  # of its cases that are made; below 1 if it is slow and reads as another command does

    def run(self, place: Path) -> Outcome:
        words = [place / word[2:] if word.startswith("P/") else word for word in self.command.split()]
        return call(self.main, words, seconds=_SLOW_S)

    def result(self, place: Path, outcome: Outcome) -> Any:
        return outcome.out if self.made is None else self.made(place)


_SPEEDS = ("train_seconds", "train_tokens_per_second", "sampling_tokens_per_second", "state_reuse")


def _figures(place: Path) -> Any:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key not in _SPEEDS}
        return [without(item) for item in value] if isinstance(value, list) else value

    return without(json.loads((place / "figures.json").read_text()))


def _sounds(place: Path) -> dict[str, bytes | None]:
    return content(place / "out")


def _picture(place: Path) -> bytes:
    return (place / "e.gif").read_bytes()


def _data_bytes(place: Path) -> dict[str, bytes | None]:
    return {name: held for name, held in content(place / "data").items() if not name.startswith(".")}


def _last_weights(place: Path) -> dict[str, bytes]:
    folder = place / "run" / "checkpoints" / "step_00000006"
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimiser", "rank_0")}


_TO_6 = "train.max_steps=6"
_BOTH = ("run", "data")
READERS = {
    "speech": [
        Reader(waveform, "evaluate P/run --json P/figures.json", _figures, _BOTH),
        Reader(waveform, "sample P/run --out P/out --seconds 0.002", _sounds, ("run",)),
        Reader(waveform, "analyse P/run --tokens 400 --json P/figures.json", _figures, _BOTH, 0.15),
        Reader(waveform, "compare P/run --json P/figures.json", _figures, _BOTH, 0.1),
        Reader(waveform, f"train P/data P/run {' '.join(SETTINGS)} {_TO_6}", _last_weights, _BOTH),
        Reader(waveform, "prepare P/audio P/data", _data_bytes, ("data",)),
    ],
    "text": [
        Reader(recipes, "evaluate P/run --json P/figures.json", _figures, _BOTH),
        Reader(recipes, "sample P/run --prompt kaka --tokens 20", None, _BOTH),
        Reader(recipes, f"train P/data P/run preset=smoke {' '.join(TEXT_SETTINGS)} {_TO_6}", _last_weights, _BOTH),
    ],
    "agent": [
        Reader(recipes, "evaluate P/run --episodes 2 --json P/figures.json", _figures, ("run",)),
        Reader(recipes, "play P/run --gif P/e.gif --steps 5", _picture, ("run",), 0.5),
        Reader(recipes, f"train object_matching P/run {' '.join(AGENT_SETTINGS)} {_TO_6}", _last_weights, ("run",)),
    ],
}


def _flip(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    length = rng.choice([1, 1, 1, 2, 8, 64])
    changed = bytearray(content)
    for i in range(start, min(start + length, len(content))):
        changed[i] ^= rng.randrange(1, 256)
    return bytes(changed)


def _flip_bit(content: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(content))
    return content[:position] + bytes([content[position] ^ 1 << rng.randrange(8)]) + content[position + 1 :]


def _zero(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    length = min(rng.choice([1, 16, 512, 4096]), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": _flip,
    "flip a bit": _flip_bit,
    "zeros": _zero,
    "cut": lambda content, rng: content[: rng.randrange(len(content))],
    "cut the head": lambda content, rng: content[rng.randrange(len(content)) + 1 :],
    "cut out": lambda content, rng: content[: (start := rng.randrange(len(content)))] + content[start + 8 :],
    "empty": lambda content, rng: b"",
    "grow": lambda content, rng: content + rng.randbytes(rng.choice([1, 100, 5000])),
    "double": lambda content, rng: content + content,
    "noise": lambda content, rng: rng.randbytes(len(content)),
}
_STRANGE: list[Any] = [
    None, True, -1, 0, 10**6, 2**63, 10**30, 10**400, 0.5, -1e308, float("inf"), float("nan"), "", "text", "../../x",
    "/dev/zero", [], [[]], {}, {"a": 1}, "\ud800", "${oc.env:HOME}", "1" * 5000,
]  # fmt: skip


def _leaves(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(leaf for key, value in items for leaf in _leaves(value, (*path, key)))]


def _replace_value(content: Any, rng: random.Random) -> Any:
    """Return parsed JSON or YAML in which one value is replaced by a strange one, or left out."""
    path = rng.choice(_leaves(content))
    strange = rng.choice(_STRANGE)
    if not path:
        return strange
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.2:
        del parent[path[-1]]
    else:
        parent[path[-1]] = strange
    return content


def other_value(path: Path, rng: random.Random) -> bytes:
    """Return a file's content with one value replaced, or, if its format is none of these, with bytes flipped."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return json.dumps(_replace_value(json.loads(content), rng)).encode()
    if path.suffix == ".yaml":
        return yaml.safe_dump(_replace_value(yaml.safe_load(content), rng), allow_unicode=True).encode(
            errors="surrogatepass"
        )
    if path.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        where = rng.randrange(len(lines))
        lines[where] = json.dumps(_replace_value(json.loads(lines[where]), rng)).encode() + b"\n"
        return b"".join(lines)
    if path.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(_replace_value(json.loads(content[8 : 8 + length]), rng)).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    return _flip(content, rng)


def _damage(path: Path, others: list[Path], rng: random.Random) -> str:
    """Damage one file; return what was done."""
    kind = rng.choice([*_BYTES, "other value", "other value", "other value", "remove", "folder", "swap", "deep"])
    if kind == "remove":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "swap":
        alike = [other for other in others if other.suffix == path.suffix and other != path] or others
        other = rng.choice(alike)
        kind += f" for {'/'.join(other.parts[-3:])}"
        path.write_bytes(other.read_bytes())
    elif kind == "deep":
        path.write_bytes(b"[" * 200_000 if rng.random() < 0.5 else b'{"a":' * 100_000)
    elif kind == "other value":
        path.write_bytes(other_value(path, rng))
    else:
        path.write_bytes(_BYTES[kind](path.read_bytes(), rng))
    return kind


def damageable(folder: Path) -> list[Path]:
    """Return every file that is read: not TensorBoard's event files, and not locks, which are empty."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size and "tensorboard" not in path.parts and path.name != "report.json"
    )


def _names(text: str, path: Path) -> bool:
    """Whether a message tells the user which file is meant."""
    return str(path) in text or (not path.is_file() and str(path.parent) in text)


def _judge(reader: Reader, kind: str, target: Path, outcome: Outcome, what: str) -> str:
    """Return how it went; raise AssertionError if it went wrong."""
    context, is_named = f"{reader.command}: {what}\n{outcome.err}", _names(outcome.err, target)
    assert outcome.code is not None, f"traceback\n{context}"
    if outcome.code != 0:
        assert outcome.is_one_line_error, f"no single line of code 2\n{context}"
        assert is_named, f"the file is not named\n{context}"
        return "refused"
    got = reader.result(whole(kind), outcome)
    if got == _expected(reader, kind):
        # From the previous checkpoint, training comes to the same weights.
        return "warned, same result" if is_named else "no difference"
    before = _expected(reader, kind, newest=False)
    assert got == before, f"silent use of changed bytes\n{context}\n{outcome.out[-2000:]}"
    assert "warning: " in outcome.err and is_named, f"no warning\n{context}"
    return "checkpoint before"


@cache
def _expected(reader: Reader, kind: str, *, newest: bool = True) -> Any:
    """Return what the command makes of whole files, or of the checkpoint before the newest; it may be slow."""
    work = restored(kind)
    if not newest:
        (work / "run" / "checkpoints" / "step_00000004" / "complete.json").write_bytes(b"")
    torch.set_num_threads(1)
    outcome = reader.run(work)
    assert outcome.code == 0, outcome.err
    return reader.result(work, outcome)


@fault("damaged files", short=40, long=1000)
def damage(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: an error names the file, or a warning does and the previous checkpoint is used; no traceback, no
    silent use.

    Try every command on every file in turn, each damaged in a different way.
    """
    pairs = [
        (kind, reader, path.relative_to(place))
        for kind, readers in READERS.items() for place in [restored(kind)] for reader in readers
        for name in reader.reads for path in damageable(place / name)
    ]  # fmt: skip
    chosen: list[tuple[str, Reader, Path]] = []
    while len(chosen) < cases:
        taken = [pair for pair in pairs if rng.random() < pair[1].share]
        chosen += rng.sample(taken, len(taken))
    outcomes: Counter[str] = Counter()
    slowest, memory_before = 0.0, forget_peak_memory()
    for case in range(cases):
        kind, reader, path = chosen[case]
        work = restored(kind)
        what = f"case {case}, {path}: {_damage(work / path, damageable(work), rng)}"
        torch.set_num_threads(1)  # results depend on it, and the previous command may have changed it
        began = time.perf_counter()
        outcome = reader.run(work)
        slowest = max(slowest, time.perf_counter() - began)
        outcomes[_judge(reader, kind, work / path, outcome, what)] += 1
        assert peak_memory_mb() - memory_before < _MAX_MB, f"{peak_memory_mb()} MB\n{what}"
    return {
        "files_and_commands": len(pairs),
        "outcomes": dict(sorted(outcomes.items())),
        "slowest_s": round(slowest, 2),
        "memory_grown_mb": round(peak_memory_mb() - memory_before),
    }
