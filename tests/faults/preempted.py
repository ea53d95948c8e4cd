"""Training asked to stop at any moment, by a signal or by a terminal that closes; it saves once."""

import json
import os
import random
import re
import select
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults import forks, killed_training
from tests.faults.fault import fault
from tests.faults.forks import Points
from waveform.cli import main

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def check_last_line(text: str, code: int, number: int, *, verb: str) -> None:
    """Check that one line says what stopped the command, and that the exit code does."""
    assert code == 128 + number and "Traceback" not in text, f"{verb}, exit code {code}: {text[-3000:]}"
    assert text.count(f"stopped by {signal.Signals(number).name}") == 1, f"{verb}: {text}"


@fault("training asked to stop, once or twice", short=6, long=300, in_server=True)
def _training(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: saves once; one line, exit code 128 + the signal's number; a second signal ends it at once; resumes as
    if undisturbed.
    """
    place, log = killed_training.Place(folder), folder / "command.log"
    saved = ended_at_once = 0

    def training(run_dir: Path) -> forks.Work:
        return killed_training.command(["train", place.data, run_dir, *killed_training.SETTINGS])

    points = forks.undisturbed(training(folder / "counted"), log)
    between = ("after score_window", "before score_window")
    evaluating = [i for i, pair in enumerate(pairwise(points[:-1])) if pair == between]
    chosen = [*forks.spread(points, cases, rng), *rng.sample(evaluating, 2)]
    for index in chosen:
        run_dir, number = folder / f"run_{index}", rng.choice(SIGNALS)
        twice = index not in evaluating and rng.random() < 0.25
        signals = {index: number, **({index + 1: rng.choice(SIGNALS)} if twice else {})}
        print(f"{[each.name for each in signals.values()]} at {index}, {points[index]!r}")
        code = forks.wait(forks.disturbed(training(run_dir), log, Points(signals)))
        text = log.read_text()
        if twice and code < 0:
            assert -code == list(signals.values())[1] and "Traceback" not in text, (code, text)
            ended_at_once += 1
        elif code or not re.search(r"^finished: ", text, re.MULTILINE):  # it came too late, in the last line of its log
            check_last_line(text, code, number, verb="train")
            saved += _check_saved_once(run_dir, text)
        if index in evaluating:
            seen = forks.points_in(log)[index + 1 :]
            assert seen.count("before score_window") <= 1, f"the evaluation continued: {seen}"
        place.check_checkpoints(run_dir)
        forks.undisturbed(training(run_dir), log)
        killed_training.check_same(killed_training.final(run_dir), place.expected)
        shutil.rmtree(run_dir, ignore_errors=True)
    assert saved > len(chosen) // 4 and (ended_at_once or cases < 30), (saved, ended_at_once)
    return {"signals": len(chosen), "points": len(points), "saved": saved, "second_ended_at_once": ended_at_once}


def _check_saved_once(run_dir: Path, text: str) -> bool:
    """Return whether training was stopped; check that the step it reports is saved and nothing is half-written."""
    said = re.search(r"the same command resumes: step (\d+),", text)
    if said and (step := int(said[1])):
        checkpoints = [path.name for path in (run_dir / "checkpoints").iterdir()]
        assert f"step_{step:08d}" in checkpoints, (step, checkpoints)
        assert len(checkpoints) <= 2 and not any(name.startswith(".") for name in checkpoints), checkpoints
    return said is not None


@fault("training processes asked to stop, at any time", short=1, long=40, in_server=True)
def _processes(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: ends within 30 s with exit code 128 + the signal's number; saved if it had made a step.

    Real commands are stopped at any time, imports included, alone and under torchrun.
    """
    place = killed_training.Place(folder)
    settings = ["train.max_steps=100000", "train.checkpoint_every=100000", "train.evaluate_every=7"]
    settings += ["train.sample_seconds=2", "train.log_every=100000"]
    saved, longest_s = 0, 0.0
    for case in range(cases):
        num_ranks = 1 if cases == 1 else 1 + case % 2
        number, run_dir = rng.choice(SIGNALS), folder / f"run_{case}"
        process = killed_training.start_command(place.data, run_dir, num_ranks=num_ranks, settings=settings)
        print(f"{number.name} on {num_ranks} processes, case {case}")
        if case % 3:  # starting the interpreter takes some tenths of a second
            time.sleep(rng.uniform(0.5, 6 * num_ranks))
        else:
            forks.wait_for((run_dir / "metrics.jsonl").exists, "no training began")
            time.sleep(rng.uniform(0, 2))
        workers = forks.children(process.pid, of="waveform")
        began = time.monotonic()
        # A terminal and some schedulers signal every process; others signal the first, and torchrun passes it on.
        for pid in [process.pid, *(workers if case % 4 < 2 else [])]:
            forks.kill_if_there(pid, number)
        printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
        longest_s = max(longest_s, time.monotonic() - began)
        assert longest_s < 30 and process.returncode, printed
        if num_ranks == 1:
            check_last_line(printed, process.returncode, number, verb="train")
        step = re.search(r"the same command resumes: step (\d+),", printed)
        assert step or not (run_dir / "metrics.jsonl").exists(), f"training began and nothing was saved: {printed}"
        if step and int(step[1]):
            saved += 1
            kept = [path.name for path in (run_dir / "checkpoints").iterdir()]
            assert kept == [f"step_{int(step[1]):08d}"], (kept, printed)
        shutil.rmtree(run_dir, ignore_errors=True)
    return {"signals": cases, "saved": saved, "longest_s": round(longest_s, 1)}


_LISTENERS = ("terminal", "terminal, nohup", "pipe", "full disk")


def _said_to(listener: str, arguments: list[str]) -> tuple[int, int]:
    """Run a command in a child whose output goes to `listener`; return its id and the end that listens."""
    reader, writer = os.openpty() if "terminal" in listener else os.pipe()

    def work() -> int:
        os.close(reader)
        if "terminal" in listener:
            os.login_tty(writer)
        else:
            output = writer if listener == "pipe" else os.open("/dev/full", os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(writer)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in listener else signal.SIG_DFL)
        return main(arguments)

    child = forks.fork(work)
    os.close(writer)
    return child, reader


@fault("nobody hears what training says", short=4, long=40, in_server=True)
def _listeners(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: if the terminal closes, it saves and exits with 129; under nohup, or if a log's reader or disk fails,
    it continues and obeys signals as usual; it resumes.
    """
    place, log = killed_training.Place(folder), folder / "command.log"
    endless = ["train.max_steps=1000000", "train.evaluate_every=1000000", "train.checkpoint_every=1000000"]
    for case in range(cases):
        listener, run_dir = _LISTENERS[case % len(_LISTENERS)], folder / f"run_{case}"
        arguments = ["train", str(place.data), str(run_dir), *killed_training.SETTINGS]
        print(f"{listener}, case {case}")
        child, reader = _said_to(listener, [*arguments, *endless, "train.log_every=1"])
        metrics = run_dir / "metrics.jsonl"
        forks.wait_for(metrics.exists, "no training began")
        stop = time.monotonic() + rng.uniform(0, 0.5)
        while time.monotonic() < stop:
            time.sleep(0.01)
            _ = select.select([reader], [], [], 0)[0] and os.read(reader, 1 << 16)
        os.close(reader)
        number = signal.SIGHUP
        if listener != "terminal":
            before = metrics.read_bytes()
            forks.wait_for(lambda m=metrics, b=before: m.read_bytes() != b, "training stopped when nobody listened")
            number = rng.choice((signal.SIGTERM, signal.SIGINT))
            os.kill(child, number)
        code = forks.wait(child)
        assert code == 128 + number, code
        (kept,) = (run_dir / "checkpoints").iterdir()
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert kept.name == f"step_{max(steps):08d}", (kept.name, max(steps))
        forks.undisturbed(killed_training.command([*arguments, f"train.max_steps={max(steps) + 2}"]), log)
        shutil.rmtree(run_dir, ignore_errors=True)
    return {"listeners": cases}
