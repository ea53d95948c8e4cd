"""The short form of every fault."""

import random

import pytest

from tests.faults.every import FAULTS


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.short], ids=lambda fault: fault.name)
def test_fault(fault, tmp_path):
    fault.run(tmp_path, fault.short, random.Random(0))
