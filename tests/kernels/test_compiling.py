"""Where the code of kernels is compiled and kept."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from pytest import MonkeyPatch

from tests.calling import before
from waveform.kernels import vectors
from waveform.kernels.compiling import keep_apart, kernel


@kernel
def _next(x):
    return 2 * x + 1


@kernel
def _after_next(x):
    return _next(_next(x))


def test_what_only_kernels_call_is_compiled_only_within_them(monkeypatch: MonkeyPatch) -> None:
    compiled: list[str] = []
    before(monkeypatch, JITCodeLibrary, "_optimize_final_module", lambda library: compiled.append(library.name))
    entry = numba.njit(lambda x: _after_next(x) + _next(x))
    assert entry(3) == 15 + 7
    assert compiled and not {"_next", "_after_next"} & set(compiled)


def test_no_folder_for_compiled_code_is_needed(monkeypatch: MonkeyPatch) -> None:
    """If numba cannot keep compiled code (here: of a module without a file), it compiles again, without a warning."""
    typed = ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", typed)
    exec("from waveform.kernels.compiling import kernel\n@kernel(entry=True)\ndef plus(a): return a + 1", vars(typed))
    assert typed.plus(1) == 2


@pytest.mark.parametrize("changed", ["kernel", "constant", "instruction"])
def test_what_a_kernel_is_made_of_is_compiled_again(changed: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """What was compiled before is kept under another name: numba would find it by the file of the entry alone."""
    monkeypatch.syspath_prepend(tmp_path)
    package, entry = tmp_path / "some_kernels", tmp_path / "some_entry.py"
    package.mkdir()
    entry.write_text(
        "from some_kernels.numbers import number\nfrom waveform.kernels.compiling import kernel\n"
        "@kernel\ndef between(): return number()\n"
        "@kernel(entry=True)\ndef call(): return between()\n"
    )
    names = set()
    for number in (1, 22, 1):
        if changed == "instruction":
            monkeypatch.setattr(vectors, "LANES", number)
        (package / "constants.py").write_text(f"SIZE = {number if changed == 'constant' else 0}\n")
        (package / "numbers.py").write_text(
            "from some_kernels.constants import SIZE\nfrom waveform.kernels.compiling import kernel\n"
            "from waveform.kernels.vectors import load\n"
            f"@kernel\ndef number(): return SIZE + {number if changed == 'kernel' else 0}\n"
        )
        for module in ("some_kernels", "some_kernels.numbers", "some_kernels.constants", "some_entry"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        names.add(importlib.import_module("some_entry").call.py_func.__qualname__)
    assert len(names) == 2


@pytest.mark.parametrize("apart", [True, False])
def test_variants_that_two_processes_compile_at_once_are_kept_apart(
    apart: bool, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    ours, theirs = (IndexDataCacheFile(str(tmp_path), "kernel.py311", "stamp") for _ in range(2))
    for cache_file in (ours, theirs) if apart else ():
        keep_apart(cache_file)
    before(monkeypatch, ours, "_save_data", lambda *_: theirs.save("int8", "their code"))
    monkeypatch.setattr(theirs, "_load_index", dict)  # it was read before ours was written
    ours.save("float32", "our code")
    found = IndexDataCacheFile(str(tmp_path), "kernel.py311", "stamp").load("int8")
    assert found == ("their code" if apart else "our code"), "numba no longer needs `keep_apart`"


def test_kernels_are_compiled_before_the_first_step_and_leave_torch_its_threads() -> None:
    """Of small models all layers, of the others attention; and those of linear prediction.

    In a new process, for this one has compiled them.

    numba and torch share OpenMP; a sample drawn during training must not change how training continues.
    """
    program = """
import numba, torch
torch.set_num_threads(1)
assert torch.get_num_threads() == 1  # torch sets it when it first needs it
from waveform.engine.interface import decoder
from waveform.engine.sound_classes import classes_of
from waveform.kernels import attention, density, layers, prediction
from waveform.models.registry import build
classes, tokens = classes_of({"kind": "audio", "quantiser": "mu-law"}), torch.zeros(2, 512, dtype=torch.int64)
sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_feedforward": 32, "num_position_features": 8}
channels = {"residual_channels": 8, "gate_channels": 8, "skip_channels": 8}
for entries, model, fields in (
    ([layers.run], "transformer_xl", {**sizes, "window": 16, "memory": 16}),
    ([attention._run], "transformer_xl", {**sizes, "window": 512, "memory": 512}),
    ([density._nll, prediction._read], "wavenet", {**channels, "num_stacks": 1, "prediction": "linear"}),
):
    model = build(model, vocab_size=256, classes=classes, **fields)
    assert not any(entry.signatures for entry in entries), entries
    model.prepare_kernels()
    before = [list(entry.signatures) for entry in entries]
    assert all(len(signatures) == 1 for signatures in before), entries
    model.head.nll(model(tokens, model.init_state(2)).hidden, tokens).sum().backward()
    assert [entry.signatures for entry in entries] == before, entries
    with torch.no_grad():
        decoder(model, model.init_state(2)).step(tokens[:, 0])
    assert (torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS) == (1, 2)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "NUMBA_NUM_THREADS": "2"})
