"""Runs a measurement in a separate process.

Peak memory belongs to a process, and a model that fails or runs out of RAM must not spoil the other measurements.
"""

import json
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHILD = (
    "import sys; from waveform.system.cpu import set_defaults; set_defaults(); "
    "from waveform.benchmarks.child import run_job; run_job(sys.argv[1])"
)
_RESULT = "result.json"


@dataclass(frozen=True)
class Job:
    """One measurement."""

    title: str
    name: dict[str, Any]  # what identifies it in the figures if it fails
    measure: Callable[..., dict[str, Any]]  # a function of a module; gets an empty folder as `scratch`
    arguments: dict[str, Any]


def run_in_child(job: Job) -> dict[str, Any]:
    """Return the figures of a job, or its name and `error`."""
    with tempfile.TemporaryDirectory(prefix="waveform-bench-") as scratch:
        # -P: a file in the current folder must not replace a module.
        command = [sys.executable, "-P", "-c", _CHILD, scratch]
        done = subprocess.run(command, input=pickle.dumps(job), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        result = Path(scratch) / _RESULT
        if done.returncode == 0 and result.exists():
            return json.loads(result.read_text())
    if done.returncode < 0:
        by = signal.Signals(-done.returncode).name
        return {**job.name, "error": f"killed by {by}" + (" (out of memory?)" if by == "SIGKILL" else "")}
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return {**job.name, "error": said[-1] if said else f"exit code {done.returncode}"}


def run_job(scratch: str) -> None:
    """Run the measurement that stdin describes, in the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback; the parent reports it
    job: Job = pickle.load(sys.stdin.buffer)
    figures = job.measure(**job.arguments, scratch=Path(scratch))
    (Path(scratch) / _RESULT).write_text(json.dumps(figures))
