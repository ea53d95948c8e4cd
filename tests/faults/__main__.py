"""Makes every fault in its long form: `python -m tests.faults [--only NAME ...] [--short] [--json FILE] [--seed N]`."""

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.faults.every import FAULTS
from waveform.engine.machine import describe_machine


def main() -> int:
    """Prints a line a fault; the exit code is 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME")
    parser.add_argument("--short", action="store_true", help="the number of cases of the test suite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for fault in FAULTS:
        if args.only and fault.name not in args.only:
            continue
        cases = fault.short if args.short else fault.long
        print(f"{fault.name}: {cases} cases; must hold: {fault.must_hold}", flush=True)
        began = time.perf_counter()
        held, figures = True, {}
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            try:
                figures = fault.run(Path(folder), cases, random.Random(args.seed))
            except AssertionError:
                held = False
                traceback.print_exc()
        seconds = round(time.perf_counter() - began, 1)
        results[fault.name] = {"must_hold": fault.must_hold, "held": held, "cases": cases}
        results[fault.name] |= {"seconds": seconds, **figures}
        print(f"  {'held' if held else 'DID NOT HOLD'} in {seconds} s {json.dumps(figures)}", flush=True)
    if args.json:
        command = f"python -m tests.faults {' '.join(sys.argv[1:])}"
        report = {"command": command, "machine": describe_machine(torch.device("cpu")), "faults": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(result["held"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
