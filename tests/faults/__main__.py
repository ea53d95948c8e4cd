"""Makes every fault in its long form: `python -m tests.faults [--only NAME ...] [--short] [--json FILE] [--seed N]`."""

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.faults.every import FAULTS
from tests.faults.fault import Fault
from waveform.system.atomic import write_file
from waveform.system.machine import describe_machine


def main() -> int:
    """Prints a line a fault; the exit code is 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME")
    parser.add_argument("--short", action="store_true", help="the number of cases of the test suite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to that file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    all_held = True
    for fault in FAULTS:
        if (not args.only or fault.name in args.only) and (fault.short or not args.short):
            result = make(fault, fault.short if args.short else fault.long, seed=args.seed)
            all_held &= result["held"]
            if args.json:
                add_result(args.json, fault.name, result)
    return 0 if all_held else 1


def make(fault: Fault, cases: int, *, seed: int) -> dict[str, Any]:
    """Make one fault so many times; prints and returns what came of it."""
    print(f"{fault.name}: {cases} cases; must hold: {fault.must_hold}", flush=True)
    began = time.perf_counter()
    held, figures = True, {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        try:
            figures = fault.run(Path(folder), cases, random.Random(seed))
        except AssertionError:
            held = False
            traceback.print_exc()
    seconds = round(time.perf_counter() - began, 1)
    print(f"  {'held' if held else 'DID NOT HOLD'} in {seconds} s {json.dumps(figures)}", flush=True)
    command = f"python -m tests.faults {shlex.join(sys.argv[1:])}"
    return {"must_hold": fault.must_hold, "held": held, "cases": cases, "seconds": seconds, "seed": seed,
            "command": command, "machine": describe_machine(torch.device("cpu")), **figures}  # fmt: skip


def add_result(path: Path, name: str, result: dict[str, Any]) -> None:
    """Write a fault's figures into a JSON file beside those of other faults, at once: a long run may be killed too."""
    results = json.loads(path.read_text()) if path.exists() else {}
    write_file(path, (json.dumps(results | {name: result}, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
