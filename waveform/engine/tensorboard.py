"""A TensorBoard event file, written at once by the thread that has the events.

TensorBoard's own writer writes from a thread: a full disk there ends the thread with a traceback, comes to light some
events later, without the file's name, and what was queued is lost.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from waveform.system.atomic import explain_write_errors


class EventFile:
    """A new event file in `folder`. Raises UserError, naming the file, if the disk refuses."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
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
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115  # closed by close
        self._records = RecordWriter(self)
        try:
            self._add(file_version="brain.Event:2")
            if purge_step is not None:
                self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        except BaseException:
            self.close()
            raise

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write points of curves."""
        for name, value in values.items():
            self._add(summary=self._summary.scalar(name, value), step=step)

    def add_audio(self, name: str, samples: Tensor, step: int, *, sample_rate_hz: int) -> None:
        """Write samples [n] in [-1, 1]."""
        self._add(summary=self._summary.audio(name, samples, sample_rate=sample_rate_hz), step=step)

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write an image [height, width, channels]."""
        self._add(summary=self._summary.image(name, image, dataformats="HWC"), step=step)

    def _add(self, **fields: Any) -> None:
        with explain_write_errors(self._path):
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, content: bytes) -> None:
        """What RecordWriter calls."""
        view = memoryview(content)
        while view:  # a raw write may take a part only
            view = view[self._file.write(view) :]

    def close(self) -> None:
        self._file.close()
