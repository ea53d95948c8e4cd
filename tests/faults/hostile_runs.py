"""A run, and a data set, made by an attacker who wants to run code, or to have files elsewhere read or written.

Every file that is read is replaced by one that runs code if it is loaded carelessly, or by one that says what it should
not but has the right checksums. What must hold: no code runs, nothing outside is opened or changed, and the command
refuses in one line, or does the same as without the attack.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml

from tests.content import content
from tests.faults.calling import Outcome, forget_peak_memory, peak_memory_mb, process_memory_mb
from tests.faults.damaged_files import READERS, Reader, damageable, other_value
from tests.faults.fault import fault
from tests.faults.small_runs import restored
from waveform.system import ram
from waveform.system.checked_json import with_checksum

_opened: list[str] = []  # what this process has opened since the list was last cleared, after a call of `_watch`
_watching = False


def _watch() -> None:
    """Start recording every file that this process opens, makes, renames or removes."""
    global _watching
    if _watching:
        return
    _watching = True
    events = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
    events |= {"shutil.rmtree", "os.system", "subprocess.Popen", "socket.connect", "os.exec"}

    def hook(event: str, arguments: Any) -> None:
        if event in events and arguments:
            _opened.append(f"{event}: {arguments[:2]!r}")

    sys.addaudithook(hook)


class _Bomb:
    """Makes the file RAN when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = str(flag)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.flag, "w")


def _header(header: bytes, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file, with the length of its header or another one."""
    return struct.pack("<Q", len(header) if length is None else length) + header + payload


def _files_that_run(flag: Path) -> dict[str, bytes]:
    """Return content of every kind that some loader would run, or that would grow without bound in it."""
    bomb, code = _Bomb(flag), f"open({str(flag)!r}, 'w')"
    objects, archives = np.array([bomb], dtype=object), [io.BytesIO() for _ in range(4)]
    torch.save({"weights": bomb}, archives[0])
    np.save(archives[1], objects, allow_pickle=True)
    np.savez(archives[2], weights=objects)
    with zipfile.ZipFile(archives[3], "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
        archive.writestr("../../../../tmp/escaped", b"x")
    tags = {
        "apply": f"!!python/object/apply:builtins.exec [{json.dumps(code)}]",
        "new": f"!!python/object/new:builtins.open [{json.dumps(str(flag))}, w]",
        "module": "!!python/module:antigravity",
        "name": "!!python/name:os.system",
    }
    return {
        "pickle": pickle.dumps(bomb),
        "old pickle": pickle.dumps(bomb, protocol=0),
        "torch file": archives[0].getvalue(),
        "npy of objects": archives[1].getvalue(),
        "npz of objects": archives[2].getvalue(),
        "zip of a pickle": archives[3].getvalue(),
        "python source": f"{code}\n".encode(),
        **{f"YAML tag {name}": f"model: {tag}\ntrain: {tag}\n".encode() for name, tag in tags.items()},
        "YAML aliases": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n".encode() for a, b in pairwise("abcdefghij")),
        "deep YAML": b"[" * 50_000,
        "deep JSON": b"[" * 500_000 + b"]" * 500_000,
        "deep JSON objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        "a long number": b"1" * 1_000_000,
        "header of 2^63 bytes": _header(b"{}", length=2**63 - 1),
        "header of 90 MB": _header(b"{}", length=90_000_000),
        "header without end": _header(b'{"a":{"a'),
        "tensor of 2^60 numbers": _header(
            b'{"x":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4]}}', bytes(4)
        ),
        "overlapping tensors": _header(
            b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            b'"y":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}',
            bytes(8),
        ),
        "negative offsets": _header(b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}}', bytes(4)),
        "nothing": b"",
    }  # fmt: skip


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _sign_checkpoint(folder: Path) -> None:
    """Make the marker agree with the files, as the attacker would."""
    digests = {
        p.name: _digest(p.read_bytes()) for p in sorted(folder.iterdir()) if p.is_file() and p.name != "complete.json"
    }
    (folder / "complete.json").write_text(json.dumps(digests))


def _sign(path: Path) -> None:
    """Make every checksum agree with a changed file."""
    if path.parent.parent.name == "checkpoints" and path.name != "complete.json":
        _sign_checkpoint(path.parent)
    elif path.name in ("dataset.json", "tokenizer.json"):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return
        if isinstance(content, dict):
            content.pop("checksum", None)
            path.write_text(json.dumps(with_checksum(content)))


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file, and every checksum of it."""
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(change(content) or content))
    _sign(path)


def edit_config(run: Path, change: Callable[[dict[str, Any]], None], *, recorded: bool = True) -> None:
    """Change config.yaml, and what the checkpoints say about it."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for folder in (run / "checkpoints").iterdir() if recorded else ():
        progress = json.loads((folder / "progress.json").read_text())
        change(progress["run"])
        (folder / "progress.json").write_text(json.dumps(progress))
        _sign_checkpoint(folder)


def _set(section: str, **values: Any) -> Callable[[Path, Path], None]:
    return lambda place, secret: edit_config(
        place / "run", lambda config: config.setdefault(section, {}).update(values)
    )


def _newest(place: Path) -> Path:
    return place / "run" / "checkpoints" / "step_00000004"


def _links(pattern: str, *, to: str = "file") -> Callable[[Path, Path], None]:
    """Replace what matches in a run by links to something in the folder outside it, or to an absolute path."""

    def attack(place: Path, secret: Path) -> None:
        for path in sorted((place / "run").glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            path.symlink_to(secret / to)

    return attack


def _link_marker(place: Path, secret: Path) -> None:
    """Write a marker that names a file elsewhere, with its digest."""
    for folder in (place / "run" / "checkpoints").iterdir():
        digests = json.loads((folder / "complete.json").read_text())
        digests[os.path.relpath(secret / "file", folder)] = _digest((secret / "file").read_bytes())
        (folder / "complete.json").write_text(json.dumps(digests))


def _shards_elsewhere(name: Callable[[Path], str]) -> Callable[[Path, Path], None]:
    def attack(place: Path, secret: Path) -> None:
        def change(content: Any) -> None:
            for split in content["splits"]:
                content["splits"][split] = [name(secret)]

        edit_json(place / "data" / "dataset.json", change)

    return attack


_EVIL_NAMES = [
    "os", "os.system", "antigravity", "tests.faults.evil:Model", "../../evil", "", "builtins:eval", "a" * 10_000,
]  # fmt: skip
_HUGE = [10**9, 2**31 - 1, 10**12, 2**63 - 1, 10**30]
# What a file says, with all checksums right. Each takes the place of the run, and a folder outside it.
_ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    **{f"model {name[:30]!r}": _set("model", name=name) for name in _EVIL_NAMES},
    "_target_": _set("model", _target_="os.system", _args_=["touch RAN"]),
    "_target_ as name": _set("model", name={"_target_": "os.system"}),
    "interpolated name": _set("model", name="${oc.env:HOME}"),
    "interpolated data": _set("data", split={"by": "${oc.env:HOME}", "valid": 0.1, "test": 0.1}),
    **{f"{field} {n}": _set("model", **{field: n}) for field in ("d_model", "num_layers", "memory") for n in _HUGE},
    **{f"compressed {n}": _set("model", compressed=n) for n in _HUGE[:2]},
    **{f"window {n}": _set("model", window=n) for n in _HUGE},
    **{f"chunk {n}": _set("train", chunk=n) for n in _HUGE},
    **{f"vocabulary {n}": _set("dataset", vocab_size=n) for n in _HUGE},
    "wavenet of 10^9 stacks": lambda p, s: edit_config(
        p / "run", lambda c: c.update(model={"name": "wavenet", "num_stacks": 10**9, "layers_per_stack": 20})
    ),
    "wavenet of 10^9 channels": lambda p, s: edit_config(
        p / "run", lambda c: c.update(model={"name": "wavenet", "residual_channels": 10**9})
    ),
    "1,000 cutoffs": _set("model", head="adaptive", cutoffs=list(range(1, 10**3))),
    "data of the system": lambda p, s: edit_config(p / "run", lambda c: c["dataset"].update(path="/dev")),
    "data is a file": lambda p, s: edit_config(p / "run", lambda c: c["dataset"].update(path=str(s / "file"))),
    "marker names a file elsewhere": _link_marker,
    "checkpoint files are links": _links("checkpoints/*/*.safetensors"),
    "markers are links": _links("checkpoints/*/complete.json"),
    "progress is a link to /dev/zero": _links("checkpoints/*/progress.json", to="/dev/zero"),
    "weights are a link to /dev/zero": _links("checkpoints/*/model.safetensors", to="/dev/zero"),
    "config is a link": _links("config.yaml"),
    "metrics are a link": _links("metrics.jsonl"),
    "metrics are a link to nothing": _links("metrics.jsonl", to="new"),
    "the lock is a link": _links(".train.lock"),
    "checkpoints are a link": _links("checkpoints", to="."),
    "tensorboard is a link": _links("tensorboard", to="."),
    "shards above": _shards_elsewhere(lambda secret: f"../../{secret.name}/file"),
    "shards by an absolute path": _shards_elsewhere(lambda secret: str(secret / "file")),
    "shards of the system": _shards_elsewhere(lambda secret: "/dev/zero"),
    "a shard of another type": _shards_elsewhere(lambda secret: {"a": 1}),
    "2^60 ranks": lambda p, s: edit_json(_newest(p) / "progress.json", lambda c: c.update(num_ranks=2**60)),
    "step -1": lambda p, s: edit_json(_newest(p) / "progress.json", lambda c: c.update(step=-1)),
    "a cursor of nowhere": lambda p, s: edit_json(
        _newest(p) / "progress.json", lambda c: c["cursor"].update(start=[10**9] * 2)
    ),
}


def _environment(**fields: Any) -> Callable[[Path, Path], None]:
    return lambda place, secret: edit_config(place / "run", lambda config: config.update(recipe="rl", **fields))


_AGENT_ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    **{what: change for what, change in _ATTACKS.items() if "shard" not in what},
    **{f"imported: {name!r}": _environment(env=f"{name}:CartPole-v1") for name in ("antigravity", "run.payload", "")},
    "options": _environment(env="CartPole-v1", env_options={"file_name": "antigravity"}),
    "options that are a list": _environment(env="CartPole-v1", env_options=["antigravity"]),
    **{f"environment {env!r}": _environment(env=env) for env in (None, 3, ["a:b"], "a" * 10_000, "../../evil", "")},
    **{f"{n!r} actions": _environment(env="CartPole-v1", env_actions=n) for n in ("2", -1, 10**30)},
    **{f"seed {n!r}": lambda p, s, n=n: edit_config(p / "run", lambda c: c.update(seed=n)) for n in ("x", -1, 10**30)},
    **{f"a way of {n} steps": _set("task", delay=n) for n in _HUGE},
    "no learner": lambda p, s: edit_config(p / "run", lambda c: c.pop("learner")),
}

_SMALL_MACHINE_MB = 700  # that commands may take beyond what this process holds
_SWELLING_MODELS: dict[str, Callable[[Path, Path], None]] = {
    **{f"{field} 10^7": _set("model", **{field: 10**7}) for field in ("window", "memory", "compressed")},
    "reference attention, window 20,000": _set("model", attention="reference", window=20_000),
    "reference attention, memory 10^6": _set("model", attention="reference", memory=10**6),
    "calls of 10^9": _set("train", window=10**9),
}
# What changes no parameter and takes RAM only once the model is running.
_SWELLING: dict[str, dict[str, Callable[[Path, Path], None]]] = {
    "speech": _SWELLING_MODELS,
    "text": _SWELLING_MODELS,
    "wavenet": {
        **{f"chunk {n}": _set("train", chunk=n) for n in (10**6, 10**9)},
        "calls of 10^6": _set("train", window=10**6),
    },
    "agent": {f"{field} 10^7": _set("model", **{field: 10**7}) for field in ("window", "memory", "compressed")},
}


def _commands(kind: str) -> dict[str, Reader]:
    readers = {reader.command.split()[0]: reader for reader in READERS["speech" if kind == "wavenet" else kind]}
    return {verb: readers[verb] for verb in ("evaluate", "sample", "play", "train") if verb in readers}


def _judge(outcome: Outcome, case: str, secret: Path, before: dict[str, bytes | None], flag: Path) -> str:
    context = f"{case}\n{outcome.err[-3000:]}"
    assert not flag.exists() and not Path("RAN").exists(), f"code ran: {context}"
    touched = [entry for entry in _opened if str(secret) in entry]
    assert not touched and content(secret) == before, f"a file elsewhere was touched, {touched[:3]}: {context}"
    assert "antigravity" not in sys.modules, f"a module was imported: {context}"
    assert not any("/dev/zero" in entry for entry in _opened), f"/dev/zero was opened: {context}"
    assert not any(entry.startswith(("os.system", "os.exec", "socket.connect")) for entry in _opened), context
    assert outcome.code is not None, f"traceback: {context}"
    assert outcome.code == 0 or outcome.is_one_line_error, f"no single line of code 2: {context}"
    return "refused" if outcome.code else "not needed"


@fault("hostile runs", short=50, long=3000)
def attack(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: no code runs, nothing elsewhere is touched; the run is refused in one line, or the attack has no
    effect.

    Try every attack before every command; in the long form, every content in every file and random signed values.
    """
    _watch()
    flag, secret = folder / "RAN", folder / "secret"
    that_run = _files_that_run(flag)
    todo: list[tuple[str, str, Callable[[Path], None], str]] = []

    def put(path: Path, content: Callable[[Path], bytes]) -> Callable[[Path], None]:
        def change(place: Path) -> None:
            (place / path).write_bytes(content(place / path))
            _sign(place / path)

        return change

    for kind in ("speech", "text", "agent"):
        place = restored(kind)
        files = [path.relative_to(place) for name in ("run", "data") for path in damageable(place / name)]
        for name in _commands(kind):
            todo += [
                (kind, name, lambda place, change=change: change(place, secret), what)
                for what, change in (_AGENT_ATTACKS if kind == "agent" else _ATTACKS).items()
            ]
            for path in files:
                for what, held in that_run.items():
                    todo.append((kind, name, put(path, lambda _, held=held: held), f"{path} is {what}"))
                if path.suffix in (".json", ".yaml"):
                    change = put(path, lambda file: other_value(file, rng))
                    todo += [(kind, name, change, f"{path}, a value signed")] * 6
    num_all = len(todo)
    rng.shuffle(todo)
    outcomes: Counter[str] = Counter()
    slowest, memory_before = 0.0, forget_peak_memory()
    for kind, name, change, what in todo[:cases]:
        place = restored(kind)
        shutil.rmtree(secret, ignore_errors=True)
        secret.mkdir()
        (secret / "file").write_bytes(b"nobody's business")
        change(place)
        before = content(secret)
        _opened.clear()
        began = time.perf_counter()
        outcome = _commands(kind)[name].run(place)
        slowest = max(slowest, time.perf_counter() - began)
        outcomes[f"{name}: {_judge(outcome, f'{kind} {name}: {what}', secret, before, flag)}"] += 1
        assert peak_memory_mb() - memory_before < 2000, f"{peak_memory_mb()} MB: {kind} {name}: {what}"
    return {
        "attacks_and_commands": num_all,
        "outcomes": dict(sorted(outcomes.items())),
        "slowest_s": round(slowest, 2),
        "memory_grown_mb": round(peak_memory_mb() - memory_before),
    }


@contextlib.contextmanager
def _small_machine() -> Iterator[None]:
    """Pretend that the machine has _SMALL_MACHINE_MB more RAM than this process has been given."""
    present = (int(process_memory_mb("VmData")) + _SMALL_MACHINE_MB) << 20
    with mock.patch.object(ram, "machine_bytes", lambda: present):
        yield


@fault("runs that swell", short=8, long=100)
def swell(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: what takes more RAM than the machine has is refused in one line, before the system kills it.

    Try sizes that take more RAM than the machine has, before the commands that open a run.
    """
    todo = [
        (kind, name, change, what)
        for kind, attacks in _SWELLING.items()
        for name in ("evaluate", "play" if kind == "agent" else "sample")
        for what, change in attacks.items()
    ]
    rng.shuffle(todo)
    outcomes: Counter[str] = Counter()
    slowest = largest = 0.0
    for kind, name, change, what in todo[:cases]:
        place = restored(kind)
        change(place, folder)
        began, memory_before = time.perf_counter(), forget_peak_memory()
        with _small_machine():
            outcome = _commands(kind)[name].run(place)
        slowest = max(slowest, time.perf_counter() - began)
        case = f"{kind} {name}: {what}"
        assert outcome.code == 0 or outcome.is_one_line_error, (
            f"no single line of code 2: {case}\n{outcome.err[-3000:]}"
        )
        outcomes[f"{name}: {'refused' if outcome.code else 'not needed'}"] += 1
        grown = peak_memory_mb() - memory_before
        largest = max(largest, grown)
        assert grown < 2 * _SMALL_MACHINE_MB, f"{grown} MB: {case}"  # RAM that it held before may have been given back
    return {
        "outcomes": dict(sorted(outcomes.items())),
        "slowest_s": round(slowest, 2),
        "memory_grown_mb": round(largest),
    }
