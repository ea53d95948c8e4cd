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

from waveform.system.errors import UserError

CLIPPED_AMPLITUDE = 0.999  # a decoded sample at or above it counts as clipped

HEADER, PIECE, END, REFUSED = "header", "piece", "end", "refused"  # kinds of messages
MAX_PIECE = 1 << 20  # samples x channels decoded at a time

_MIN_RATE_HZ, _MAX_RATE_HZ = 1_000, 768_000
_MAX_CHANNELS = 64
_MAX_AMPLITUDE = 1e30  # far above it, mixing and resampling would turn finite samples into infinity and NaN
_NO_LENGTH = 1 << 62  # frames: for a FLAC that was written to a pipe, libsndfile reports the largest int64
_UNKNOWN_LENGTH = 0x7FFF0000  # programs that write a WAV to a pipe declare this length or a greater one
_MPEG_SLACK = 2 * 1152 + 529  # samples: encoders disagree on whether delay and padding count
_MAX_ADDRESS_SPACE = 4 << 30  # bytes; decoding takes a tenth of it


class RefusedFile(UserError):
    """A file that cannot be used as audio; `reason` says why, without the file's name."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot use {path}: {reason}")
        self._path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[str | Path, str]]:  # so that it can be pickled
        return type(self), (self._path, self.reason)


def messages_of(path: str) -> Iterator[tuple[str, Any]]:
    """Decode an audio file: yield its rate and channels, pieces, and the numbers of frames and of clipped samples.

    A piece is mono float32 [n] at the file's own rate. A sample of any channel with |x| >= CLIPPED_AMPLITUDE, before
    mixing, is clipped. Raises RefusedFile for audio that cannot be trusted: damaged, cut short, empty, not finite, or
    of an absurd rate.
    """
    try:
        # Bytes, because soundfile cannot encode names that are not valid UTF-8.
        opened = soundfile.SoundFile(os.fsencode(path))
    except soundfile.LibsndfileError as error:
        # Some decoders report any trouble as a missing file (code 7); the parent has just checked that it exists.
        detail = error.error_string.strip().rstrip(".") if error.code != 7 else ""
        raise RefusedFile(path, "not readable as audio" + (f" ({detail})" if detail else "")) from error
    with opened as file:
        _judge_header(path, file)
        yield HEADER, [file.samplerate, file.channels]
        num_frames = num_clipped = 0
        piece = np.empty((max(1, MAX_PIECE // file.channels), file.channels), dtype=np.float32)
        while True:
            try:
                block = file.read(dtype="float32", out=piece)
            except soundfile.LibsndfileError as error:
                raise RefusedFile(path, f"damaged or cut short: {_where(file, num_frames)}") from error
            if len(block) == 0:
                break
            num_frames += len(block)
            low, high = block.min(), block.max()  # both propagate NaN
            if not max(-low, high) < _MAX_AMPLITUDE:
                raise RefusedFile(path, "it holds samples that are not finite (NaN or infinity) or above 1e30")
            if max(-low, high) >= CLIPPED_AMPLITUDE:
                num_clipped += int(np.count_nonzero(np.abs(block) >= CLIPPED_AMPLITUDE))
            yield PIECE, _mix(block)
        slack = _MPEG_SLACK if file.format in ("MP3", "MPEG") else 0
        if num_frames + slack < file.frames < _NO_LENGTH:
            raise RefusedFile(path, f"cut short: {_where(file, num_frames)}")
        if num_frames == 0:
            raise RefusedFile(path, "it holds no samples")
        yield END, [num_frames, num_clipped]


def _judge_header(path: str, file: soundfile.SoundFile) -> None:
    if not _MIN_RATE_HZ <= file.samplerate <= _MAX_RATE_HZ:
        raise RefusedFile(path, f"sample rate {file.samplerate} Hz is outside {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
    if file.channels > _MAX_CHANNELS:
        raise RefusedFile(path, f"it has {file.channels} channels, more than {_MAX_CHANNELS}")
    # libsndfile corrects the lengths of a WAV or AIFF that is cut short, and mentions it only in its log.
    corrected = re.search(r"^\s*(?:data|SSND)\s*:\s*(\d+) \(should be (\d+)\)", file.extra_info, re.MULTILINE)
    if corrected:
        declared, present = int(corrected[1]), int(corrected[2])
        if present < declared < _UNKNOWN_LENGTH:
            raise RefusedFile(path, f"cut short: it has {present} of its {declared} bytes of audio")
    if file.format == "OGG":
        _judge_ogg_end(path)


def _where(file: soundfile.SoundFile, num_frames: int) -> str:
    known = file.frames < _NO_LENGTH
    total = f"the {file.frames / file.samplerate:.2f} s that it declares" if known else "its length"
    return f"decoding stops after {num_frames / file.samplerate:.2f} s of {total}"


def _mix(block: np.ndarray) -> np.ndarray:
    """Average the channels: [n, channels] -> [n], always a new array."""
    channels = block.shape[1]
    if channels == 1:
        return block[:, 0].copy()
    if channels == 2:  # several times faster than a mean over an axis of two
        return (block[:, 0] + block[:, 1]) * np.float32(0.5)
    return block @ np.full(channels, 1 / channels, dtype=np.float32)


def _judge_ogg_end(path: str) -> None:
    """Refuse an Ogg file whose last page is cut or does not end its stream: libsndfile plays such a file silently.

    If several streams follow each other, it plays only the first.
    """
    longest_page = 27 + 255 + 255 * 255
    with open(path, "rb") as file:
        first = file.read(18)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * longest_page))
        tail = file.read()
    page = tail[max(tail.rfind(b"OggS"), 0) :]
    has_header = page.startswith(b"OggS") and len(page) >= 27
    is_whole = has_header and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
    if not (is_whole and page[5] & 4):
        raise RefusedFile(path, "cut short: its Ogg stream has no end")
    if page[14:18] != first[14:18]:  # serial numbers of the streams
        raise RefusedFile(path, "it holds several Ogg streams, of which only the first can be read; convert it to FLAC")


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
            for kind, content in messages_of(path):
                if kind == PIECE:
                    _send(channel, PIECE, len(content))
                    channel.sendall(content.data)
                else:
                    _send(channel, kind, content)
        except RefusedFile as refusal:
            _send(channel, REFUSED, refusal.reason)
        except MemoryError:
            _send(channel, REFUSED, "decoding it takes too much RAM")
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            _send(channel, REFUSED, f"not readable as audio ({' '.join(str(error).split())})")


def _send(channel: socket.socket, kind: str, content: Any) -> None:
    channel.sendall(json.dumps([kind, content]).encode() + b"\n")
