"""TensorBoard events, written at once by the thread that has them.

TensorBoard's own writer writes from a thread: a full disk there ends the thread with a traceback, comes to light some
events later, without the file's name, and what was queued is lost.
"""

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waveform.system.atomic import explain_write_errors
from waveform.system.errors import UserError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class _EventFile:
    """What torch's FileWriter asks of `event_writer`: takes events, each on the disk when `add_event` returns."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = folder
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / name
        with explain_write_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115  # closed by close
        self._records = RecordWriter(self)

    def add_event(self, event: Any) -> None:
        with explain_write_errors(self._path):
            self._records.write(event.SerializeToString())

    def write(self, content: bytes) -> None:
        """What RecordWriter calls."""
        view = memoryview(content)
        while view:  # a raw write may take a part only
            view = view[self._file.write(view) :]

    def get_logdir(self) -> str:
        return str(self._folder)

    def flush(self) -> None:
        pass  # nothing is held back

    def close(self) -> None:
        self._file.close()


def event_writer(folder: Path, *, purge_step: int | None = None) -> "SummaryWriter":
    """A SummaryWriter into a new file in `folder`, which raises UserError, naming the file, where the disk refuses.

    purge_step: TensorBoard is to forget what earlier files hold of that step and later ones.
    """
    # Seconds to import, of use in training only.
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from torch.utils.tensorboard import FileWriter, SummaryWriter

    class Files(FileWriter):
        def __init__(self) -> None:
            self.event_writer: Any = _EventFile(folder)

    class Writer(SummaryWriter):
        def _get_file_writer(self) -> Any:
            if self.file_writer is None:
                files = Files()
                vars(self).update(file_writer=files, all_writers={str(folder): files})  # torch types both as None
                try:
                    files.add_event(Event(file_version="brain.Event:2"))
                    if purge_step is not None:
                        files.add_event(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
                except UserError:
                    files.close()
                    raise
            return self.file_writer

    return Writer(str(folder))
