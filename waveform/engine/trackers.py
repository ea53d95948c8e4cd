"""Where curves, sounds and pictures of a training are shown, besides metrics.jsonl: TensorBoard, Trackio or wandb.

waveform itself reads only `metrics.jsonl`, so training goes on if a service fails.
"""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from importlib import import_module
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from waveform.system.atomic import explain_write_errors, write_all
from waveform.system.errors import UserError

SERVICES = ("trackio", "wandb")
TRACKERS = ("tensorboard", *SERVICES, "none")


class Tracker:
    """Shows how a training goes. This base class shows nothing, as `train.log=none` asks."""

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show points of curves, by name."""

    def add_audio(self, name: str, samples: Tensor, step: int, *, sample_rate_hz: int) -> None:
        """Show samples [n] in [-1, 1]."""

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Show an image [height, width, channels]."""

    def close(self) -> None:
        """Finish."""


class EventFile(Tracker):
    """A new TensorBoard event file in `folder`, with each event written at once. Raises UserError if the disk refuses.

    TensorBoard's own writer writes from a thread: a full disk there ends the thread with a traceback, comes to light
    some events later, without the file's name, and what was queued is lost.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        """purge_step: TensorBoard is to forget what earlier files hold of that step and later ones."""
        # Seconds to import, needed in training only.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._summary = Event, summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / name
        with explain_write_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._path, "w")
        self._records = RecordWriter(self)
        try:
            self._add(file_version="brain.Event:2")
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        except BaseException:
            self.close()
            raise

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._add(summary=self._summary.scalar(name, value), step=step)

    def add_audio(self, name: str, samples: Tensor, step: int, *, sample_rate_hz: int) -> None:
        self._add(summary=self._summary.audio(name, samples, sample_rate=sample_rate_hz), step=step)

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        self._add(summary=self._summary.image(name, image, dataformats="HWC"), step=step)

    def _add(self, **fields: Any) -> None:
        with explain_write_errors(self._path):
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, content: bytes) -> None:
        """What RecordWriter calls."""
        write_all(self._file, content)

    def close(self) -> None:
        self._file.close()


class Service(Tracker):
    """Trackio or wandb, which share one interface. Project and run are named after the folders.

    Trainings that take turns have a run each, so the one current run that these packages keep is not used.

    wandb works offline, into the run folder, unless WANDB_MODE says otherwise; Trackio keeps all on this machine.
    """

    _module: Any  # the package
    _run: Any  # what its `init` returned

    def __init__(self, name: str, run_dir: Path) -> None:
        self._name, self._failed = name, False
        run_dir = run_dir.resolve()
        given: dict[str, Any] = {"project": run_dir.parent.name or "waveform", "name": run_dir.name, "resume": "allow"}
        if name == "wandb":
            given |= {
                "id": hashlib.blake2b(os.fsencode(run_dir), digest_size=8).hexdigest(),  # the same when a run resumes
                "dir": str(run_dir),
                "mode": os.environ.get("WANDB_MODE", "offline"),
                "reinit": "create_new",
            }
        self._try(lambda: self._begin(given))

    def _begin(self, given: dict[str, Any]) -> None:
        self._module = import_module(self._name)
        # In a context of its own, in which Trackio knows of no other run: it would end that
        self._run = Context().run(self._module.init, **given)

    def _try(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # whatever a service raises
            self._failed = True
            print(
                f"warning: logging to {self._name} has stopped ({' '.join(str(error).split())[:200]}); "
                "metrics.jsonl has everything",
                file=sys.stderr,
            )

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        self._try(lambda: self._run.log(dict(values), step=step))

    def add_audio(self, name: str, samples: Tensor, step: int, *, sample_rate_hz: int) -> None:
        self._try(
            lambda: self._run.log({name: self._module.Audio(samples.numpy(), sample_rate=sample_rate_hz)}, step=step)
        )

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        self._try(lambda: self._run.log({name: self._module.Image(image)}, step=step))

    def close(self) -> None:
        self._try(lambda: self._run.finish())


def require_installed(name: str) -> None:
    """Raises UserError for a service whose package is not installed."""
    if name in SERVICES and find_spec(name) is None:
        raise UserError(f'train.log={name}: {name} is not installed; install it with pip install "waveform[{name}]"')


def open_tracker(name: str, run_dir: Path, *, purge_step: int) -> Tracker:
    """Open the one of `TRACKERS` that has this name; purge_step: as in `EventFile`."""
    if name == "tensorboard":
        return EventFile(run_dir / "tensorboard", purge_step=purge_step)
    return Service(name, run_dir) if name in SERVICES else Tracker()
