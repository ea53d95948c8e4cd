"""The parent's end of decoding: starts a process (`decoding_child`) when needed and keeps it for the next file."""

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from waveform.audio.decoding_child import FRAME, LENGTH, PIECE
from waveform.audio.refusal import RefusedFile

PATIENCE_S = 60.0  # to wait for the next message, which holds a second or so of audio
_START = "import sys; sys.path[:] = {path!r}; from waveform.audio.decoding_child import serve; serve()"
_PIPE_BYTES = 1 << 20
_idle: list["DecodingProcess"] = []  # those of this process that are ready for the next file


class DecodingProcessDied(RefusedFile):
    """A file on which the decoding process ended or hung. Try it once more: the process may have been killed."""


class DecodingProcess:
    """One decoding process."""

    def __init__(self) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # for averaging channels; threads would take RAM
        command = [sys.executable, "-c", _START.format(path=sys.path)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, bufsize=0
        )
        self.owner = os.getpid()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # above the user's limit: only slower
                fcntl.fcntl(self._from, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._ready = select.poll()
        self._ready.register(self._from, select.POLLIN)

    def open(self, path: str | Path) -> None:
        """Ask for a file; `receive` returns the answer."""
        name = os.fsencode(os.path.abspath(path))
        try:
            self._to.write(LENGTH.pack(len(name)) + name)
        except BrokenPipeError as error:  # it died while idle, so this file is not the cause
            raise DecodingProcessDied(path, "the decoding process had ended") from error

    def receive(self, path: str | Path) -> tuple[bytes, Any]:
        """Wait for the next message: its kind, and a piece [n] float32 or what JSON holds.

        Raises DecodingProcessDied if the process ends or hangs.
        """
        header = self._read(bytearray(FRAME.size), path)
        kind, size = FRAME.unpack(header)
        if kind == PIECE:
            piece = np.empty(size // 4, dtype=np.float32)
            self._read(piece.view(np.uint8).data, path)
            return kind, piece
        return kind, json.loads(bytes(self._read(bytearray(size), path)))

    def _read(self, into: Any, path: str | Path) -> Any:
        view = memoryview(into)
        while view:
            if not self._ready.poll(1000 * PATIENCE_S):
                self.kill()
                raise DecodingProcessDied(path, f"decoding it made no progress for {PATIENCE_S:g} s")
            num = os.readv(self._from.fileno(), [view])
            if num == 0:
                raise DecodingProcessDied(path, f"decoding it ended the decoding process ({self._how_it_ended()})")
            view = view[num:]
        return into

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}, perhaps because RAM ran out" if name == "SIGKILL" else name

    def give_back(self) -> None:
        """Keep this process for the next file."""
        _idle.append(self)

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()
            self._to.close()
            self._from.close()


def take_decoding_process() -> DecodingProcess:
    """Return an idle decoding process of this process if there is one, otherwise a new one."""
    with contextlib.suppress(IndexError):  # there is none, or another thread took it
        while True:
            idle = _idle.pop()
            if idle.owner == os.getpid() and idle._process.poll() is None:
                return idle
            idle.kill()
    return DecodingProcess()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().kill()
