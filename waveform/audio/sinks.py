"""Where sound goes as it is drawn, the last step of sampling: a sink is a context manager that yields its `Write`."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from waveform.audio.wav import WavWriter
from waveform.system.atomic import explain_write_errors, is_held
from waveform.system.errors import UserError
from waveform.system.signals import Interrupted

Write = Callable[[np.ndarray], None]  # gets [num, n] samples at 24 kHz, fp32 in -1..1: the next n of each sound


def require_free(paths: Sequence[Path]) -> None:
    """Raises UserError if `wav_files` would replace one of the paths, or what another process is writing."""
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists; give another --out or --seed, or move it away")
    for path in map(_unfinished, paths):
        if path.exists() and is_held(path):
            raise UserError(f"another process is writing {path}; give another --out or --seed")


@contextmanager
def wav_files(paths: Sequence[Path]) -> Iterator[Write]:
    """Write each sound into its own of `paths`, all in one folder, which is made.

    The files grow as they are written, and until all is written they are named `.unfinished.wav`. Raises UserError for
    a full disk or a read-only folder.
    """
    folder = paths[0].parent
    growing = [_unfinished(path) for path in paths]
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = [stack.enter_context(WavWriter(path)) for path in growing]

        def write(block: np.ndarray) -> None:
            for writer, samples in zip(writers, block, strict=True):
                writer.append(samples)

        try:
            yield write
        except Interrupted as stopped:
            kept = f"what was generated is in {growing[0]}" + " and others" * (len(paths) > 1)
            raise Interrupted(stopped.number, kept) from None
    with explain_write_errors(folder):
        for unfinished, path in zip(growing, paths, strict=True):
            os.replace(unfinished, path)


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".unfinished.wav")
