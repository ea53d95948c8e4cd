"""Runs a measurement in a separate process.

Peak memory belongs to a process, and a model that fails or runs out of RAM must not spoil the other measurements.
"""

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

_CHILD = (
    "import sys; from waveform.system.cpu import set_defaults; set_defaults(); "
    "from waveform.benchmarks.child import run_job; run_job(*sys.argv[1:])"
)


@dataclass(frozen=True)
class Job:
    """One measurement."""

    title: str
    name: dict[str, Any]  # what identifies it in the figures if it fails
    function: str  # `module:function`; returns the figures, and gets an empty folder as `scratch`
    arguments: dict[str, Any]  # its other arguments, as in JSON


def run_in_child(job: Job) -> dict[str, Any]:
    """Return the figures of a job, or its name and `error`."""
    with tempfile.TemporaryDirectory(prefix="waveform-bench-") as scratch:
        job_file, result_file = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job_file.write_text(json.dumps(asdict(job)))
        # -P: a file in the current folder must not replace a module.
        command = [sys.executable, "-P", "-c", _CHILD, str(job_file), str(result_file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0 and result_file.exists():
            return json.loads(result_file.read_text())
        if done.returncode < 0:
            by = signal.Signals(-done.returncode).name
            return {**job.name, "error": f"killed by {by}" + (" (out of memory?)" if by == "SIGKILL" else "")}
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {**job.name, "error": last[0]}


def run_job(job_file: str, result_file: str) -> None:
    """Run one measurement in the child: from one JSON file to another."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback; the parent reports it
    job = Job(**json.loads(Path(job_file).read_text()))
    module, _, function = job.function.partition(":")
    scratch = Path(job_file).with_name("scratch")
    scratch.mkdir()
    figures = getattr(import_module(module), function)(**job.arguments, scratch=scratch)
    Path(result_file).write_text(json.dumps(figures))
