"""Settings of all tests: one thread, because threads cost tiny models more than they save; the same examples."""

import gc
import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.audio.sound_device import SoundDevice
from waveform.benchmarks import sampling
from waveform.speech import figures
from waveform.system.cpu import num_cores

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the commands that tests start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of those commands would compile our files again
os.environ["WAVEFORM_TIMED_WAYS"] = "0"  # or results would depend on what was the fastest when it was timed
figures._SPEED_SECONDS = sampling._STEPS_S = 0.01  # of measuring how fast a run samples
# If a test fails, a change must be the cause, not chance; deadlines would fail on a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

_LONGEST = {f"test_{name}.py" for name in ("laws", "faults", "failing_ranks", "ranks", "tune", "training")}


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for many tests wait for others that they start; each takes 20 s to import all."""
    return min(num_cores(), 7) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that none is left to one process at the end."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_collection_finish() -> None:
    """Collect garbage more rarely, and not among all that is imported by now: it took 8% of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of tests/faults."""
    group = parser.getgroup("faults")
    group.addoption("--faults", choices=("short", "long"), default="short", help="how many cases; long: C++ too")
    group.addoption("--faults-seed", type=int, default=0, metavar="N", help="seed of the cases' random numbers")
    group.addoption("--faults-json", type=Path, metavar="FILE", help="write the figures to this file")


@pytest.fixture
def sound_device(monkeypatch: pytest.MonkeyPatch) -> SoundDevice:
    """The one device that there is, in place of the module sounddevice and of the speaker's clock."""
    device = SoundDevice()
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    monkeypatch.setattr("waveform.audio.speaker.time", device)
    return device
