"""A run, and a data set, made by an attacker who wants to run code, or to have files elsewhere read or written.

Every file that is read is replaced by one that runs code if it is loaded carelessly, or by one that says what it should
not but has the right checksums.
"""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
import yaml

from tests.content import content
from tests.faults.calling import forget_peak_memory, peak_memory_mb, process_memory_mb
from tests.faults.damaged_files import READERS, Reader, damageable, other_value
from tests.faults.fault import fault
from tests.faults.small_runs import restored
from waveform.system import ram
from waveform.system.checked_json import with_checksum

Attack: TypeAlias = Callable[[Path, Path], Any]  # changes the folder of a run, and what is in a folder outside it


def _watch() -> list[str]:
    """Return a list to which every file is added that this process opens, makes, renames or removes from now on."""
    opened: list[str] = []
    events = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
    events |= {"shutil.rmtree", "os.system", "subprocess.Popen", "socket.connect", "os.exec"}

    def hook(event: str, arguments: Any) -> None:
        if event in events and arguments:
            opened.append(f"{event}: {arguments[:2]!r}")

    sys.addaudithook(hook)
    return opened


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


def _sign(path: Path) -> None:
    """Make every checksum agree with a changed file, as the attacker would."""
    marker = path.with_name("complete.json")
    if path.parent.parent.name == "checkpoints" and path != marker:
        files = [file for file in sorted(path.parent.iterdir()) if file.is_file() and file != marker]
        marker.write_text(json.dumps({file.name: _digest(file.read_bytes()) for file in files}))
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
    change(content)
    path.write_text(json.dumps(content))
    _sign(path)


def edit_config(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change config.yaml, and what the checkpoints say about it."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for folder in (run / "checkpoints").iterdir():
        edit_json(folder / "progress.json", lambda progress: change(progress["run"]))


def _config(change: Callable[[Any], Any]) -> Attack:
    return lambda place, secret: edit_config(place / "run", change)


def _set(section: str, **values: Any) -> Attack:
    return _config(lambda config: config.setdefault(section, {}).update(values))


def _progress(change: Callable[[Any], Any]) -> Attack:
    return lambda place, secret: edit_json(place / "run/checkpoints/step_00000004/progress.json", change)


def _links(pattern: str, *, to: str = "file") -> Attack:
    """Replace what matches in a run by links to something in the folder outside it, or to an absolute path."""

    def attack(place: Path, secret: Path) -> None:
        for path in sorted((place / "run").glob(pattern)):
            remove = shutil.rmtree if path.is_dir() else os.unlink
            remove(path)
            path.symlink_to(secret / to)

    return attack


def _link_marker(place: Path, secret: Path) -> None:
    """Write a marker that names a file elsewhere, with its digest."""
    for folder in (place / "run" / "checkpoints").iterdir():
        digests = json.loads((folder / "complete.json").read_text())
        digests[os.path.relpath(secret / "file", folder)] = _digest((secret / "file").read_bytes())
        (folder / "complete.json").write_text(json.dumps(digests))


def _shards(name: Callable[[Path], Any]) -> Attack:
    def attack(place: Path, secret: Path) -> None:
        elsewhere = {split: [name(secret)] for split in ("train", "valid", "test")}
        edit_json(place / "data" / "dataset.json", lambda content: content["splits"].update(elsewhere))

    return attack


_EVIL_NAMES = [
    "os", "os.system", "antigravity", "tests.faults.evil:Model", "../../evil", "", "builtins:eval", "a" * 10_000,
]  # fmt: skip
_HUGE = [10**9, 2**31 - 1, 10**12, 2**63 - 1, 10**30]
# What a file says, with all checksums right.
_ATTACKS: dict[str, Attack] = {
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
    "wavenet of 10^9 stacks": _config(
        lambda config: config.update(model={"name": "wavenet", "num_stacks": 10**9, "layers_per_stack": 20})
    ),
    "wavenet of 10^9 channels": _config(lambda c: c.update(model={"name": "wavenet", "residual_channels": 10**9})),
    "1,000 cutoffs": _set("model", head="adaptive", cutoffs=list(range(1, 10**3))),
    "data of the system": _set("dataset", path="/dev"),
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
    "shards above": _shards(lambda secret: f"../../{secret.name}/file"),
    "shards by an absolute path": _shards(lambda secret: str(secret / "file")),
    "shards of the system": _shards(lambda secret: "/dev/zero"),
    "a shard of another type": _shards(lambda secret: {"a": 1}),
    "2^60 ranks": _progress(lambda progress: progress.update(num_ranks=2**60)),
    "step -1": _progress(lambda progress: progress.update(step=-1)),
    "a cursor of nowhere": _progress(lambda progress: progress["cursor"].update(start=[10**9] * 2)),
}


def _environment(env: Any, **fields: Any) -> Attack:
    return _config(lambda config: config.update(recipe="rl", env=env, **fields))


_AGENT_ATTACKS: dict[str, Attack] = {
    **{what: change for what, change in _ATTACKS.items() if "shard" not in what},
    **{f"imported: {name!r}": _environment(f"{name}:CartPole-v1") for name in ("antigravity", "run.payload", "")},
    "options": _environment("CartPole-v1", env_options={"file_name": "antigravity"}),
    "options that are a list": _environment("CartPole-v1", env_options=["antigravity"]),
    **{f"environment {env!r}": _environment(env) for env in (None, 3, ["a:b"], "a" * 10_000, "../../evil", "")},
    **{f"{n!r} actions": _environment("CartPole-v1", env_actions=n) for n in ("2", -1, 10**30)},
    **{f"seed {n!r}": _config(lambda config, n=n: config.update(seed=n)) for n in ("x", -1, 10**30)},
    **{f"a way of {n} steps": _set("task", delay=n) for n in _HUGE},
    "no learner": _config(lambda config: config.pop("learner")),
}

_RUNNING = ("os.system", "os.exec", "socket.connect")
_SMALL_MACHINE_MB = 700  # that the machine seems to have beyond what this process holds
_SWELLING_MEMORIES = {f"{field} 10^7": _set("model", **{field: 10**7}) for field in ("window", "memory", "compressed")}
_SWELLING_MODELS = {
    **_SWELLING_MEMORIES,
    "reference attention, window 20,000": _set("model", attention="reference", window=20_000),
    "reference attention, memory 10^6": _set("model", attention="reference", memory=10**6),
    "calls of 10^9": _set("train", window=10**9),
}
# What changes no parameter and takes RAM only once the model is running.
_SWELLING: dict[str, dict[str, Attack]] = {
    "speech": _SWELLING_MODELS,
    "text": _SWELLING_MODELS,
    "wavenet": {
        **{f"chunk {n}": _set("train", chunk=n) for n in (10**6, 10**9)},
        "calls of 10^6": _set("train", window=10**6),
    },
    "agent": _SWELLING_MEMORIES,
}


def _commands(kind: str) -> dict[str, Reader]:
    readers = {reader.command.split()[0]: reader for reader in READERS["speech" if kind == "wavenet" else kind]}
    return {verb: readers[verb] for verb in ("evaluate", "sample", "play", "train") if verb in readers}


@fault("hostile runs", short=50, long=3000)
def attack(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: no code runs, nothing elsewhere is touched; the run is refused in one line, or the attack has no
    effect.

    Try every attack before every command; in the long form, every content in every file and random signed values.
    """
    flag, secret, opened = folder / "RAN", folder / "secret", _watch()
    that_run = _files_that_run(flag)
    todo: list[tuple[str, str, str, Attack]] = []

    def put(path: Path, made: Callable[[Path], bytes]) -> Attack:
        def change(place: Path, secret: Path) -> None:
            (place / path).write_bytes(made(place / path))
            _sign(place / path)

        return change

    for kind in ("speech", "text", "agent"):
        place = restored(kind)
        files = [path.relative_to(place) for name in ("run", "data") for path in damageable(place / name)]
        for name in _commands(kind):
            attacks = list((_AGENT_ATTACKS if kind == "agent" else _ATTACKS).items())
            for path in files:
                attacks += [
                    (f"{path} is {what}", put(path, lambda _, held=held: held)) for what, held in that_run.items()
                ]
                if path.suffix in (".json", ".yaml"):
                    attacks += [(f"{path}, a value signed", put(path, lambda file: other_value(file, rng)))] * 6
            todo += [(kind, name, what, change) for what, change in attacks]
    rng.shuffle(todo)
    outcomes: Counter[str] = Counter()
    memory_before = forget_peak_memory()
    for kind, name, what, change in todo[:cases]:
        place, case = restored(kind), f"{kind} {name}: {what}"
        shutil.rmtree(secret, ignore_errors=True)
        secret.mkdir()
        (secret / "file").write_bytes(b"nobody's business")
        change(place, secret)
        before = content(secret)
        opened.clear()
        outcome = _commands(kind)[name].run(place)
        outcomes[f"{name}: {'refused' if outcome.refused(case) else 'not needed'}"] += 1
        context = f"{case}\n{outcome.err[-3000:]}"
        assert not flag.exists() and not Path("RAN").exists(), f"code ran: {context}"
        assert "antigravity" not in sys.modules, f"a module was imported: {context}"
        bad = [entry for entry in opened if str(secret) in entry or "/dev/zero" in entry or entry.startswith(_RUNNING)]
        assert not bad and content(secret) == before, f"what is elsewhere was touched, {bad[:3]}: {context}"
        assert peak_memory_mb() - memory_before < 2000, f"{peak_memory_mb()} MB: {case}"
    return {
        "attacks_and_commands": len(todo),
        "outcomes": dict(sorted(outcomes.items())),
        "memory_grown_mb": round(peak_memory_mb() - memory_before),
    }


@fault("runs that swell", short=8, long=100)
def swell(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: what takes more RAM than the machine has is refused in one line, before the system kills it."""
    todo = [
        (kind, name, what, change)
        for kind, attacks in _SWELLING.items()
        for name in ("evaluate", "play" if kind == "agent" else "sample")
        for what, change in attacks.items()
    ]
    rng.shuffle(todo)
    outcomes: Counter[str] = Counter()
    largest_mb = 0.0
    for kind, name, what, change in todo[:cases]:
        place, case = restored(kind), f"{kind} {name}: {what}"
        change(place, folder)
        memory_before = forget_peak_memory()
        present = (int(process_memory_mb("VmData")) + _SMALL_MACHINE_MB) << 20
        with mock.patch.object(ram, "machine_bytes", lambda present=present: present):
            outcome = _commands(kind)[name].run(place)
        outcomes[f"{name}: {'refused' if outcome.refused(case) else 'not needed'}"] += 1
        largest_mb = max(largest_mb, peak_memory_mb() - memory_before)
        assert largest_mb < 2 * _SMALL_MACHINE_MB, f"{largest_mb} MB: {case}"  # what was held may have been given back
    return {"outcomes": dict(sorted(outcomes.items())), "memory_grown_mb": round(largest_mb)}
