"""The child's end of decoding: reads audio files with libsndfile in a separate process, and sends them to the parent.

libsndfile and the codecs beneath it are written in C: a malicious file can crash the process that reads it, make it
hang or fill its RAM. `serve` therefore runs in a child, which starts in 0.1 s and is kept for many files
(`decoding_process`). It checks what it decodes, averages the channels and sends the result back:

    parent -> child   path
    child -> parent   header | piece | piece | ... | end        or a refusal with its reason

A message is a line of JSON; that of a piece says how many samples follow, in float32.

If the child dies, only the file that it was reading is lost.
"""

import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from waveform.audio.refusal import RefusedFile

CLIPPED_AMPLITUDE = 0.999  # a decoded sample at or above it counts as clipped

HEADER, PIECE, END, REFUSED = "header", "piece", "end", "refused"  # kinds of messages
MAX_PIECE = 1 << 20  # samples x channels decoded at a time

_MIN_RATE_HZ, _MAX_RATE_HZ = 1_000, 768_000
_MAX_CHANNELS = 64
_UNKNOWN_LENGTH = 0x7FFF0000  # programs that write a WAV to a pipe declare this length or a greater one
_MPEG_SLACK = 2 * 1152 + 529  # samples: encoders disagree on whether delay and padding count
_MAX_ADDRESS_SPACE = 4 << 30  # bytes; decoding takes a tenth of it


class Source:
    """One audio file, opened for a single pass of decoding in this process.

    The counters hold what has been read so far. Raises RefusedFile, on opening or while reading, for audio that cannot
    be trusted: damaged, cut short, empty, not finite, or of an absurd rate.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            # Bytes, because soundfile cannot encode names that are not valid UTF-8.
            self._file = soundfile.SoundFile(os.fsencode(path))
        except soundfile.LibsndfileError as error:
            # Some decoders report any trouble as a missing file (code 7); the parent has just seen this one.
            detail = error.error_string.strip().rstrip(".") if error.code != 7 else ""
            raise RefusedFile(path, "not readable as audio" + (f" ({detail})" if detail else "")) from error
        try:
            self.sample_rate_hz: int = self._file.samplerate
            self.num_channels: int = self._file.channels
            self._judge_header()
        except BaseException:
            self._file.close()
            raise
        self.num_frames = 0  # decoded so far, at the file's own rate
        self.num_clipped = 0  # samples of all channels, before mixing, with |x| >= CLIPPED_AMPLITUDE

    def close(self) -> None:
        self._file.close()

    def _judge_header(self) -> None:
        rate = self.sample_rate_hz
        if not _MIN_RATE_HZ <= rate <= _MAX_RATE_HZ:
            raise RefusedFile(self.path, f"sample rate {rate} Hz is outside {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
        if self.num_channels > _MAX_CHANNELS:
            raise RefusedFile(self.path, f"it has {self.num_channels} channels, more than {_MAX_CHANNELS}")
        if self._file.frames == 0:
            raise RefusedFile(self.path, "it holds no samples")
        # libsndfile corrects the lengths of a WAV or AIFF that is cut short, and mentions it only in its log.
        corrected = re.search(r"^\s*(?:data|SSND)\s*:\s*(\d+) \(should be (\d+)\)", self._file.extra_info, re.MULTILINE)
        if corrected:
            declared, present = int(corrected[1]), int(corrected[2])
            if present < declared < _UNKNOWN_LENGTH:
                raise RefusedFile(self.path, f"cut short: it has {present} of its {declared} bytes of audio")
        if self._file.format == "OGG":
            _judge_ogg_end(self.path)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield mono float32 pieces [n] at the file's own rate; count and check the samples on the way."""
        declared: int = self._file.frames
        piece = np.empty((max(1, MAX_PIECE // self.num_channels), self.num_channels), dtype=np.float32)
        while True:
            try:
                block = self._file.read(dtype="float32", out=piece)
            except soundfile.LibsndfileError as error:
                raise RefusedFile(self.path, f"damaged or cut short: {self._where(declared)}") from error
            if len(block) == 0:
                break
            self.num_frames += len(block)
            low, high = block.min(), block.max()  # both propagate NaN
            if not (np.isfinite(low) and np.isfinite(high)):
                raise RefusedFile(self.path, "it holds samples that are not finite (NaN or infinity)")
            if max(-low, high) >= CLIPPED_AMPLITUDE:
                self.num_clipped += int(np.count_nonzero(np.abs(block) >= CLIPPED_AMPLITUDE))
            yield _mix(block)
        slack = _MPEG_SLACK if self._file.format in ("MP3", "MPEG") else 0
        # A FLAC that was written to a pipe does not know its length; libsndfile then declares the largest int64.
        if self.num_frames + slack < declared < 1 << 62:
            raise RefusedFile(self.path, f"cut short: {self._where(declared)}")
        if self.num_frames == 0:
            raise RefusedFile(self.path, "it holds no samples")

    def _where(self, declared: int) -> str:
        total = f"the {declared / self.sample_rate_hz:.2f} s that it declares" if declared < 1 << 62 else "its length"
        return f"decoding stops after {self.num_frames / self.sample_rate_hz:.2f} s of {total}"


def _mix(block: np.ndarray) -> np.ndarray:
    """Average the channels: [n, channels] -> [n], always a new array."""
    channels = block.shape[1]
    if channels == 1:
        return block[:, 0].copy()
    if channels == 2:  # several times faster than a mean over an axis of two
        return (block[:, 0] + block[:, 1]) * np.float32(0.5)
    return block @ np.full(channels, 1 / channels, dtype=np.float32)


def _judge_ogg_end(path: str | Path) -> None:
    """Refuse an Ogg file whose last page is cut or does not end its stream: libsndfile plays such a file silently."""
    longest_page = 27 + 255 + 255 * 255
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * longest_page))
        tail = file.read()
    start = tail.rfind(b"OggS")
    page = tail[start:]
    if start >= 0 and len(page) >= 27 and len(page) >= 27 + page[26]:
        whole = len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
        if whole and page[5] & 4:
            return
    raise RefusedFile(path, "cut short: its Ogg stream has no end")


def serve() -> None:
    """Decode the files that the parent names until it closes the channel: all that the child does."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent answers Ctrl-C and a closed terminal
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE, _MAX_ADDRESS_SPACE))
    for request in channel.makefile("rb"):
        path = json.loads(request)
        try:
            _send_file(channel, path)
        except RefusedFile as refusal:
            _send(channel, REFUSED, refusal.reason)
        except MemoryError:
            _send(channel, REFUSED, "decoding it takes too much RAM")
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            _send(channel, REFUSED, f"not readable as audio ({' '.join(str(error).split())})")


def _send_file(channel: socket.socket, path: str) -> None:
    source = Source(path)
    try:
        _send(channel, HEADER, [source.sample_rate_hz, source.num_channels])
        for piece in source.pieces():
            _send(channel, PIECE, len(piece))
            channel.sendall(piece.data)
        _send(channel, END, [source.num_frames, source.num_clipped])
    finally:
        source.close()


def _send(channel: socket.socket, kind: str, content: Any) -> None:
    channel.sendall(json.dumps([kind, content]).encode() + b"\n")
