"""Reads audio files of any common format as mono blocks at one rate: in `prepare`, between the scan and the quantiser.

A separate process decodes the file piece by piece, checks it and averages its channels (`decoding_child`); `resample`
turns the pieces into blocks of whole seconds. The RAM taken does not depend on the length of the file.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from waveform.audio.decoding_child import RefusedFile
from waveform.audio.decoding_process import decode
from waveform.audio.resample import resample_blocks

AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif"})


def check_regular(path: str | Path) -> os.stat_result:
    """Return the status of a file that can be read. Raises RefusedFile for others, such as pipes and broken links."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise RefusedFile(path, (error.strerror or str(error)).lower()) from error
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFile(path, "it is not a regular file")
    if not os.access(path, os.R_OK):
        raise RefusedFile(path, "no permission to read it")
    return status


class AudioFile:
    """One audio file, opened for a single pass of reading.

    `blocks()` yields mono float32 [n]; the counters are valid once it has ended. Another process decodes (see
    `decoding_child`), so that no file can crash this one.

    Raises RefusedFile, on opening or while reading, for audio that cannot be trusted (damaged, cut short, empty, not
    finite, or of an absurd rate), and DecodingProcessDied if the decoding process ends or hangs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._before = check_regular(path)
        if self._before.st_size == 0:
            raise RefusedFile(path, "it is empty (0 bytes)")
        self.num_frames = 0  # at the file's own rate
        self.num_clipped = 0  # samples of all channels, before mixing, with |x| >= CLIPPED_AMPLITUDE
        self._messages = decode(path)
        self.sample_rate_hz, self.num_channels = next(self._messages)  # of the file itself

    def close(self) -> None:
        """Release the file; a process that is still decoding it is killed."""
        self._messages.close()

    def blocks(self, *, sample_rate_hz: int) -> Iterator[np.ndarray]:
        """Yield mono float32 blocks [n] at `sample_rate_hz`; all but the last are a whole number of seconds."""
        yield from resample_blocks(self._pieces(), from_hz=self.sample_rate_hz, to_hz=sample_rate_hz)

    def _pieces(self) -> Iterator[np.ndarray]:
        """Yield mono float32 pieces [n] at the file's own rate."""
        for message in self._messages:
            if isinstance(message, np.ndarray):
                yield message
            else:
                self.num_frames, self.num_clipped = message
        after = check_regular(self.path)
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise RefusedFile(self.path, "it changed while it was being read; prepare again when it is complete")


def read_blocks(path: str | Path, *, sample_rate_hz: int) -> Iterator[np.ndarray]:
    """Yield a file as mono float32 blocks [n] at `sample_rate_hz`, in constant RAM. Raises RefusedFile."""
    with closing(AudioFile(path)) as file:
        yield from file.blocks(sample_rate_hz=sample_rate_hz)


def read_audio(path: str | Path, *, sample_rate_hz: int) -> np.ndarray:
    """Read a whole file as mono float32 [n] at `sample_rate_hz`. Raises RefusedFile."""
    return np.concatenate(list(read_blocks(path, sample_rate_hz=sample_rate_hz)))
