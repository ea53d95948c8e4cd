"""Requests for more RAM than the machine has."""

import mmap
import resource
from functools import partial

import numpy as np
import pytest
import torch

from tests.faults.calling import process_memory_mb
from waveform.system import ram


@pytest.mark.parametrize("grow", [partial(torch.empty, dtype=torch.uint8), partial(np.zeros, dtype=np.uint8)])
def test_more_than_the_machine_has_is_refused_until_the_end_of_the_block(monkeypatch, grow):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    present = (int(process_memory_mb("VmData")) + 200) << 20
    monkeypatch.setattr(ram, "machine_bytes", lambda: present)
    with ram.limited_to_ram():
        grow(50 << 20)
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            grow(4 << 30)
    assert ram.is_shortage(caught.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    # Not by `grow`: a process that keeps what it frees would have as much for the next test, whatever the limit.
    mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


def test_other_errors_are_not_a_shortage():
    assert not ram.is_shortage(RuntimeError("shapes do not fit"))
    assert not ram.is_shortage(ValueError("not enough memory"))
    assert ram.is_shortage(torch.OutOfMemoryError("CUDA out of memory"))


def test_the_machine_has_more_memory_than_this_process():
    assert ram.machine_bytes() > process_memory_mb("VmHWM") * 1e6


def test_a_container_may_have_less_than_the_machine(monkeypatch):
    monkeypatch.setattr(ram, "memory_limit_bytes", lambda: None)
    machine = ram.machine_bytes()
    monkeypatch.setattr(ram, "memory_limit_bytes", lambda: 1 << 62)
    assert ram.machine_bytes() == machine
    monkeypatch.setattr(ram, "memory_limit_bytes", lambda: 4 << 20)
    assert ram.machine_bytes() == 4 << 20
