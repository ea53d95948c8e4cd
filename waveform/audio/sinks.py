"""Where sound goes as it is drawn, the last step of sampling: a sink is a context manager that yields a `Write`."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from waveform.audio.speaker import speaker
from waveform.audio.wav import UNKNOWN_BYTES, pcm_bytes, require_wav_length, wav_header, wav_writer
from waveform.engine.dataset import is_dataset
from waveform.system.atomic import explain_write_errors, is_held, write_all
from waveform.system.errors import UserError
from waveform.system.signals import Interrupted

STDOUT = "-"  # in place of a folder

Write = Callable[[np.ndarray], None]  # gets [num, n] samples, fp32 in -1..1: the next n of each sound


@dataclass(frozen=True)
class Output:
    """The sinks that a user asks for. Raises UserError if there is none, and for `raw` without stdout."""

    out: Path | str | None = None  # folder for WAV files, or the name of one file, *.wav; "-": stdout
    raw: bool = False  # on stdout, the samples without a WAV header
    play: bool = False  # through the sound device, besides `out`

    def __post_init__(self) -> None:
        if self.out is None and not self.play:
            raise UserError(
                "give --out DIR or FILE.wav for WAV files, --out - to write sound to stdout, or --play to hear it"
            )
        if self.raw and not self.is_piped:
            raise UserError("--raw is for --out -; WAV files have a header")

    @property
    def is_piped(self) -> bool:
        """Whether the sound goes to stdout, to which nothing else may then be written."""
        return self.out == STDOUT

    @property
    def is_live(self) -> bool:
        """Whether someone can listen, and stop it, before it is all drawn."""
        return self.is_piped or self.play

    @property
    def folder(self) -> Path | None:
        """The folder for WAV files; None: there is none."""
        return None if self.out is None or self.is_piped or self.file is not None else Path(self.out)

    @property
    def file(self) -> Path | None:
        """The single WAV file; None: there is a folder, or no file."""
        path = Path(self.out or "")
        return path if path.suffix.lower() == ".wav" and not path.is_dir() else None

    def require_possible(self, *, num: int) -> None:
        """Raises UserError, before any work is done, if `num` sounds cannot be written there."""
        if self.folder is not None and is_dataset(self.folder):
            raise UserError(f"--out {self.folder} is a prepared data set; give another folder")
        if (self.is_live or self.file is not None) and num > 1:
            raise UserError(f"--play, --out - and --out FILE.wav take one sound, not {num}; give --out DIR for several")
        if self.is_piped and sys.stdout.isatty():
            raise UserError("--out - would print sound on the terminal; pipe it to a player, such as `| aplay`")

    @contextmanager
    def open(
        self, paths: Sequence[Path], *, sample_rate_hz: int, seconds: float, tell: Callable[[str], None]
    ) -> Iterator[Write]:
        """Open all sinks, as one.

        paths: of the WAV files. seconds: length of the sound, which may be inf. tell: shows the user a line.
        Raises UserError for a folder that cannot be written, a sound too long for a file, and a sound device that does
        not play that rate.
        """
        if paths and math.isfinite(seconds):
            require_wav_length(seconds, sample_rate_hz=sample_rate_hz)
        with ExitStack() as stack:
            sinks = []
            if self.play:  # first, so that it is closed last: files are finished while the rest is played
                sinks.append(stack.enter_context(speaker(sample_rate_hz=sample_rate_hz, seconds=seconds, tell=tell)))
            if self.is_piped:
                sinks.append(stack.enter_context(piped(raw=self.raw, sample_rate_hz=sample_rate_hz)))
            if paths:
                sinks.append(stack.enter_context(wav_files(paths, sample_rate_hz=sample_rate_hz)))

            def write(block: np.ndarray) -> None:
                for sink in sinks:
                    sink(block)

            yield write


def require_free(paths: Sequence[Path]) -> None:
    """Raises UserError if `wav_files` would replace one of the paths, or a file that another process is writing."""
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists; give another --out or --seed, or move it away")
        if (growing := _unfinished(path)).exists() and is_held(growing):
            raise UserError(f"another process is writing {growing}; give another --out or --seed")


@contextmanager
def wav_files(paths: Sequence[Path], *, sample_rate_hz: int) -> Iterator[Write]:
    """Write each sound into its own file of `paths`; all are in one folder, which is made.

    The files grow as sound is drawn; until all of it is written, their names end in `.unfinished.wav`. Raises UserError
    for a full disk or a read-only folder.
    """
    growing = [_unfinished(path) for path in paths]
    with ExitStack() as stack:
        appends = [stack.enter_context(wav_writer(path, sample_rate_hz=sample_rate_hz)) for path in growing]

        def write(block: np.ndarray) -> None:
            for append, samples in zip(appends, block, strict=True):
                append(samples)

        try:
            yield write
        except Interrupted as stopped:
            kept = f"what was generated is in {growing[0]}" + " and others" * (len(paths) > 1)
            raise Interrupted(stopped.number, kept) from None
    with explain_write_errors(paths[0].parent):
        for unfinished, path in zip(growing, paths, strict=True):
            os.replace(unfinished, path)


@contextmanager
def piped(*, raw: bool, sample_rate_hz: int) -> Iterator[Write]:
    """Write a single sound to stdout, unbuffered, as a WAV of unknown length; if `raw`, without its header.

    Raises BrokenPipeError if its reader goes away, and UserError for a full disk.
    """
    with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as stdout:

        def put(content: bytes) -> None:
            with explain_write_errors(Path("stdout")):
                write_all(stdout, content)

        if not raw:
            put(wav_header(UNKNOWN_BYTES, sample_rate_hz))
        yield lambda block: put(pcm_bytes(block[0]))


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".unfinished.wav")
