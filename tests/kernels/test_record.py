"""Records of addresses and sizes, and the names that compiled functions get from them."""

import subprocess
import sys
from pathlib import Path

from waveform.kernels.record import make_record

_TWO_ENTRIES = """
import sys
import numpy as np
from waveform.kernels.record import make_record
from waveform.kernels.compiling import kernel

@kernel
def shared(values, p):  # long enough not to be inlined
    total = 0
    for i in range(len(values)):
        total += values[i] * p.first
        for j in range(p.first):
            total += (values[j] ^ values[i] ^ total) % 7 if j else 0
        for j in range(p.first):
            total += (values[j] ^ values[i] ^ total) % 13 if j else 0
    return total

@kernel(entry=True)
def one(values, plan):
    p = plan[0]
    return shared(values, p) + shared(values[1:], p) * shared(values[2:], p) - shared(values[3:], p)

@kernel(entry=True)
def other(values, plan):
    p = plan[0]
    return shared(values, p) + shared(values[1:], p) * shared(values[2:], p) - shared(values[3:], p)

results = {
    "one": lambda: one(np.arange(5), make_record({"first": 1, "second": 100})),
    "other": lambda: other(np.arange(5), make_record({"second": 100, "first": 1})),
}
print({results[name]() for name in sys.argv[1:]})
"""


def test_compiled_functions_of_different_records_have_different_names(tmp_path: Path) -> None:
    """The second process compiles `one`, then links `other` from the disk: numba would give it `shared` of `one`."""
    script = tmp_path / "two_entries.py"
    script.write_text(_TWO_ENTRIES)
    alone, together = (
        subprocess.run([sys.executable, script, *names], capture_output=True, text=True, check=True).stdout
        for names in (["other"], ["one", "other"])
    )
    assert together == alone


def test_records_of_the_same_fields_have_one_type() -> None:
    """numba would compare equal types field by field at every call."""
    assert make_record({"num_rows": 1}).dtype is make_record({"num_rows": 2}).dtype
