"""Waiting for a core, as Linux counts it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from waveform.system.waiting import waited_s


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count it")
def test_four_that_share_a_core_wait_for_each_other() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]  # on the same core
    try:
        time.sleep(0.3)  # until they run
        before_s, until_s = waited_s(), time.perf_counter() + 1.0
        while time.perf_counter() < until_s:
            pass
        assert 0.55 < waited_s() - before_s < 1.5  # the loop may be late to see that its second is over
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)
