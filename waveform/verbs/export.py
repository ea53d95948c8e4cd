"""`waveform export`: a trained run as one file, which every verb takes in place of its folder."""

from pathlib import Path

from waveform.runs.archive import write_archive
from waveform.runs.opened import use_saved
from waveform.speech import load


def export(run_dir: Path | str, file: Path | str, *, optimiser: bool = False, show_progress: bool = True) -> Path:
    """Write a run to `file`: settings, log and newest weights, without its data; returns the path.

    optimiser: also what only training needs. Raises UserError as `load` does, if `file` exists, and if the run itself
    was exported without its optimiser.
    """
    file = Path(file)
    load(run_dir, device="cpu")  # what cannot be opened should not be handed on
    use_saved(run_dir, lambda saved: write_archive(*saved, file, optimiser=optimiser))
    if show_progress:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return file
