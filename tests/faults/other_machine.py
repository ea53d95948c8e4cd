"""A run resumed elsewhere: it continues and says what will differ; checkpoints of other formats are refused."""

import contextlib
import io
import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.conftest import write_tokens
from tests.engine.training import small_trainer
from tests.faults.fault import fault
from tests.faults.hostile_runs import edit_json
from waveform.engine import checkpoint, resume_notes
from waveform.system.errors import UserError


@fault("resumed elsewhere", short=8, long=200)
def _elsewhere(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: continues and says what will no longer be bit-identical; a different checkpoint format is refused,
    never replaced.
    """
    tokens = write_tokens(folder / "shard", [60, 45, 33, 80, 21, 52, 70])
    changes = {
        "torch": mock.patch.object(torch, "__version__", "9.9.9"),
        "num_threads": mock.patch.object(torch, "get_num_threads", lambda: 77),
        "processor": mock.patch.object(resume_notes, "cpu_name", lambda: "another processor"),
        "instructions": mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "NONE"),
        "precision": contextlib.nullcontext(),
    }
    for case in range(cases):
        run = folder / f"run_{case}"
        name = source.choice(["compressive_transformer", "transformer_xl", "wavenet"])
        small_trainer(name, tokens, run, max_steps=source.randrange(1, 6)).run()
        what = source.sample(sorted(changes), source.randrange(len(changes) + 1))
        precision = "bf16" if "precision" in what else "fp32"
        edit_json(checkpoint.newest(run).folder / "progress.json", lambda progress: progress.update(from_the_future=1))
        with contextlib.ExitStack() as changed, contextlib.redirect_stderr(io.StringIO()) as printed:
            for each in what:
                changed.enter_context(changes[each])
            resumed = small_trainer(name, tokens, run, precision=precision)
            resumed.shows_progress = True
            resumed._resume()
        notes = [line for line in printed.getvalue().splitlines() if line.startswith("note: saved with")]
        assert sorted(line.split()[3].partition("=")[0] for line in notes) == sorted(what), (what, notes)
        resumed.shows_progress = False
        resumed.run()
        assert resumed.learner.step == 8
        other = {"format": source.choice([0, 2, "3", None])}
        edit_json(checkpoint.newest(run).folder / "progress.json", lambda progress, other=other: progress.update(other))
        for attempt in (partial(checkpoint.newest, run), partial(small_trainer, name, tokens, run)):
            with pytest.raises(UserError, match=r"format .*use the version of waveform"):
                attempt()
        assert len(list((run / "checkpoints").iterdir())) == 2  # the older one was not used, the newer not removed
    return {}
