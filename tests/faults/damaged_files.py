"""Damage to every file of a run and of its data set, before every command that reads them.

If a command succeeds, it must give exactly what it gives without the damage, or from the previous checkpoint.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipes.cli import main as recipes
from tests.content import content
from tests.faults.calling import Outcome, call, forget_peak_memory, peak_memory_mb
from tests.faults.fault import fault
from tests.faults.small_runs import AGENT_SETTINGS, SETTINGS, TEXT_SETTINGS, restored, whole
from waveform.cli import main as waveform


class Reader(NamedTuple):
    """A command that reads files of a run or its data, and what to compare of what it made."""

    main: Callable[[Sequence[str]], int]
    command: str  # P/ stands for the place
    made: Callable[[Path, Outcome], Any]
    reads: tuple[str, ...]  # names of the folders whose files it reads
    share: float = 1.0  # of its cases that are made; below 1 if it is slow and reads as another command does

    def run(self, place: Path) -> Outcome:
        words = [place / word[2:] if word.startswith("P/") else word for word in self.command.split()]
        return call(self.main, words)


_SPEEDS = ("train_seconds", "train_tokens_per_second", "sampling_tokens_per_second", "state_reuse")
_LOGGED = ("learning_curve",)  # from metrics.jsonl, a log without checksums: damage may go unnoticed


def _figures(place: Path, outcome: Outcome) -> Any:
    def without_speeds(figures: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in figures.items() if name not in _SPEEDS + _LOGGED}

    return json.loads((place / "figures.json").read_text(), object_hook=without_speeds)


def _printed(place: Path, outcome: Outcome) -> str:
    return outcome.out


def _out(place: Path, outcome: Outcome) -> dict[str, bytes | None]:
    return content(place / "out")


def _data_bytes(place: Path, outcome: Outcome) -> dict[str, bytes | None]:
    return {name: held for name, held in content(place / "data").items() if not name.startswith(".")}


def _last_weights(place: Path, outcome: Outcome) -> dict[str, bytes]:
    folder = place / "run" / "checkpoints" / "step_00000006"
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimiser", "rank_0")}


_TO_6 = "train.max_steps=6"
_BOTH = ("run", "data")
READERS = {
    "speech": [
        Reader(waveform, "evaluate P/run --json P/figures.json", _figures, _BOTH),
        Reader(waveform, "sample P/run --out P/out --seconds 0.002", _out, ("run",)),
        Reader(waveform, "analyse P/run --tokens 400 --json P/figures.json", _figures, _BOTH, 0.15),
        Reader(waveform, "compare P/run --json P/figures.json", _figures, _BOTH, 0.1),
        Reader(waveform, f"train P/data P/run {' '.join(SETTINGS)} {_TO_6}", _last_weights, _BOTH),
        Reader(waveform, "prepare P/audio P/data", _data_bytes, ("data",)),
    ],
    "text": [
        Reader(recipes, "evaluate P/run --json P/figures.json", _figures, _BOTH),
        Reader(recipes, "sample P/run --prompt kaka --tokens 20", _printed, _BOTH),
        Reader(recipes, f"train P/data P/run preset=smoke {' '.join(TEXT_SETTINGS)} {_TO_6}", _last_weights, _BOTH),
    ],
    "agent": [
        Reader(recipes, "evaluate P/run --episodes 2 --json P/figures.json", _figures, ("run",)),
        Reader(recipes, "play P/run --gif P/out/e.gif --steps 5", _out, ("run",), 0.5),
        Reader(recipes, f"train object_matching P/run {' '.join(AGENT_SETTINGS)} {_TO_6}", _last_weights, ("run",)),
    ],
}


def _flip(content: bytes, rng: random.Random) -> bytes:
    start, length, changed = rng.randrange(len(content)), rng.choice([1, 1, 1, 2, 8, 64]), bytearray(content)
    for i in range(start, min(start + length, len(content))):
        changed[i] ^= rng.randrange(1, 256)
    return bytes(changed)


def _flip_bit(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


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
        replaced = _replace_value(yaml.safe_load(content), rng)
        return yaml.safe_dump(replaced, allow_unicode=True).encode(errors="surrogatepass")
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


def _judge(reader: Reader, kind: str, target: Path, outcome: Outcome, what: str) -> str:
    """Return how it went; raise AssertionError if it went wrong."""
    context = f"{reader.command}: {what}\n{outcome.err}"
    is_named = str(target) in outcome.err or (not target.is_file() and str(target.parent) in outcome.err)
    if outcome.refused(context):
        assert is_named, f"the file is not named\n{context}"
        return "refused"
    got = reader.made(whole(kind), outcome)
    if got == _expected(reader, kind):
        # From the previous checkpoint, training comes to the same weights.
        return "warned, same result" if is_named else "no difference"
    before = _expected(reader, kind, newest=False)
    assert got == before, f"silent use of changed bytes\n{context}\n{outcome.out[-2000:]}"
    assert "warning: " in outcome.err and is_named, f"no warning\n{context}"
    return "checkpoint before"


@cache
def _expected(reader: Reader, kind: str, *, newest: bool = True) -> Any:
    """Return what the command makes of whole files, or of the checkpoint before the newest."""
    work = restored(kind)
    if not newest:
        (work / "run" / "checkpoints" / "step_00000004" / "complete.json").write_bytes(b"")
    outcome = reader.run(work)
    assert outcome.code == 0, outcome.err
    return reader.made(work, outcome)


@fault("damaged files", short=40, long=1000)
def damage(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: an error names the file, or a warning does and the previous checkpoint is used; no traceback, no
    silent use.
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
    memory_before = forget_peak_memory()
    for case, (kind, reader, path) in enumerate(chosen[:cases]):
        work = restored(kind)
        what = f"case {case}, {path}: {_damage(work / path, damageable(work), rng)}"
        outcomes[_judge(reader, kind, work / path, reader.run(work), what)] += 1
        assert peak_memory_mb() - memory_before < 1500, f"{peak_memory_mb()} MB\n{what}"
    return {
        "files_and_commands": len(pairs),
        "outcomes": dict(sorted(outcomes.items())),
        "memory_grown_mb": round(peak_memory_mb() - memory_before),
    }
