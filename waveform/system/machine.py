"""What a figure was measured on: processor, RAM, accelerator and versions; and how much RAM this process took."""

import os
import platform
import re
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from waveform.system.cpu import num_cores

_PACKAGES = ("waveform", "torch", "numba", "numpy")
_NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware and software as plain JSON values; None for what this system does not report."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_allowed": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "gpu_driver": _first_line([*_NVIDIA_SMI, "--query-gpu=driver_version"]) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        **_commit(),
    }


def resident_bytes() -> int:
    """How much RAM this process holds now."""
    return _kilobytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most RAM that this program has held since it started.

    From /proc if there is one: `ru_maxrss` starts at the size of the process that started this one.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return _kilobytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _kilobytes(field: str) -> int:
    return 1024 * int((_said("/proc/self/status", field) or "0 kB").split()[0])


def cpu_name() -> str:
    """The processor's model name."""
    return _said("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _said(file: str, field: str) -> str | None:
    """The first value of `field` in a file of /proc; None if the field or the file does not exist."""
    with suppress(OSError):
        found = re.search(rf"^{field}\s*: *(.*)$", Path(file).read_text(), re.MULTILINE)
        return found and found[1].strip()
    return None


def _commit() -> dict[str, Any]:
    """The commit of this checkout, and whether files have changed since; None outside a checkout."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    commit = _first_line([*git, "rev-parse", "HEAD"]) if (root / ".git").exists() else None
    changed = bool(_first_line([*git, "status", "--porcelain", "--untracked-files=no"])) if commit else None
    return {"commit": commit, "changed_since_commit": changed}


def _first_line(command: list[str]) -> str | None:
    """The first line that a program prints; None if it prints nothing, fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None
