"""Runs every fault: its short form in the test suite, its long form with `pytest tests/faults --faults=long`."""

import importlib
import json
import pkgutil
import random
import re
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.faults
from tests.faults.fault import FAULTS, Fault
from waveform.system.atomic import write_file
from waveform.system.locks import locked
from waveform.system.machine import describe_machine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the faults are caused by means of Linux (/proc, tmpfs)"
)
for _module in pkgutil.iter_modules(tests.faults.__path__, "tests.faults."):
    importlib.import_module(_module.name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each fault that has cases in the form asked for; a long form may take hours."""
    long = metafunc.config.getoption("faults") == "long"
    marks = [pytest.mark.slow, *([pytest.mark.timeout(0)] if long else [])]
    cases = {fault: fault.long if long else fault.short for fault in FAULTS}
    parameters = [pytest.param(fault, num, id=_id(fault), marks=marks) for fault, num in cases.items() if num]
    metafunc.parametrize(("fault", "cases"), parameters)


def test_fault(fault: Fault, cases: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    print(f"{fault.name}: {cases} cases; must hold: {fault.must_hold}")  # pytest shows it if something does not
    form, seed, json_file = (pytestconfig.getoption(name) for name in ("faults", "faults_seed", "faults_json"))
    command = f"pytest tests/faults --faults={form} --faults-seed={seed} -k '[{_id(fault)}]'"
    result = {"must_hold": fault.must_hold, "held": False, "cases": cases, "seed": seed, "command": command}
    began = time.perf_counter()
    try:
        result |= fault.make(tmp_path, cases, random.Random(seed)) | {"held": True}
    finally:
        if json_file:
            _add_result(json_file, fault.name, result | {"seconds": round(time.perf_counter() - began, 1)})


def _id(fault: Fault) -> str:
    return re.sub(r"\W+", "-", fault.name)


def _add_result(path: Path, name: str, result: dict[str, Any]) -> None:
    """Write a fault's figures beside those of other faults, at once: a long run may be killed too."""
    machine = describe_machine(torch.device("cpu"))
    result |= {field: machine.pop(field) for field in ("commit", "changed_since_commit")} | {"torch": machine["torch"]}
    with locked(path.absolute().parent, refusal=f"another process is writing {path}"):  # another worker of pytest-xdist
        content = json.loads(path.read_text()) if path.exists() else {"faults": {}}
        content |= {"date": date.today().isoformat(), "machine": machine}
        content["faults"][name] = result
        write_file(path, (json.dumps(content, indent=1) + "\n").encode())
