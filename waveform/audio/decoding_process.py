"""The parent's end of decoding: starts a process (`decoding_child`) when needed and keeps it for the next file."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from waveform.audio.decoding_child import END, MAX_PIECE, PIECE, REFUSED, RefusedFile

PATIENCE_S = 60.0  # to wait for more of a message; one holds a second or so of audio
_MAX_LINE = 1 << 16  # bytes of a message other than audio
_START = "import sys; sys.path[:] = {path!r}; from waveform.audio.decoding_child import serve; serve()"
_idle: list["DecodingProcess"] = []  # started by this process, and ready for the next file


class DecodingProcessDied(RefusedFile):
    """A file on which the decoding process ended or hung. Try it once more: the process may have been killed."""


class DecodingProcess:
    """A child process that decodes, and the channel to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(PATIENCE_S)
        self._messages = self._channel.makefile("rb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # some codecs print remarks
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # for averaging channels; threads would take RAM
        )
        theirs.close()

    def open(self, path: str | Path) -> None:
        """Ask for a file; `receive` returns the answer."""
        try:
            self._channel.sendall(json.dumps(os.path.abspath(path)).encode() + b"\n")
        except OSError as error:  # it died while idle, so this file is not the cause
            raise DecodingProcessDied(path, "the decoding process had ended") from error

    def receive(self, path: str | Path) -> tuple[str, Any]:
        """Wait for the next message, and return its kind and its content: a piece [n] float32, or what the JSON holds.

        Raises DecodingProcessDied if the process ends or hangs.
        """
        try:
            kind, content = json.loads(self._messages.readline(_MAX_LINE))
            if kind != PIECE:
                return kind, content
            piece = np.empty(min(int(content), MAX_PIECE), dtype=np.float32)
            if self._messages.readinto(piece.view(np.uint8).data) == piece.nbytes:
                return kind, piece
        except TimeoutError as error:
            self.kill()
            raise DecodingProcessDied(path, f"decoding it made no progress for {PATIENCE_S:g} s") from error
        except (ValueError, OSError):  # half a message
            pass
        raise DecodingProcessDied(path, f"decoding it ended the decoding process ({self._how_it_ended()})")

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}, perhaps because RAM ran out" if name == "SIGKILL" else name

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()
            self._messages.close()
            self._channel.close()


def decode(path: str | Path) -> Generator[Any, None, None]:
    """Yield what a decoding process finds in a file, as `decoding_child.messages_of`: header, pieces [n] and counts.

    If the caller stops before the end, the process is killed; otherwise it is kept for the next file. Raises
    RefusedFile, and DecodingProcessDied if the process ends or hangs.
    """
    process = _take()
    kind = ""
    try:
        process.open(path)
        while kind != END:
            kind, content = process.receive(path)
            if kind == REFUSED:
                raise RefusedFile(path, content)
            yield content
    finally:
        if kind in (END, REFUSED):
            _idle.append(process)
        else:
            process.kill()


def _take() -> DecodingProcess:
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
