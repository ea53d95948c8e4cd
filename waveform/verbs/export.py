"""`export`: a trained run as one file, which every verb takes in place of its folder."""

from pathlib import Path

from waveform.domain import domain_of_runs
from waveform.runs.archive import write_archive
from waveform.runs.opened import use_saved


def export(run_dir: Path | str, file: Path | str, *, optimiser: bool = False, show_progress: bool = True) -> Path:
    """Write a run to `file`: settings, log, newest weights and its vocabulary, without its data; returns the path.

    optimiser: also what only training needs. Raises UserError as `load` does, if the vocabulary is gone, if `file`
    exists, and if the run itself was exported without its optimiser.
    """
    file, domain = Path(file), domain_of_runs([run_dir])
    run = domain.load(run_dir, device="cpu")  # what cannot be opened should not be handed on
    with domain.exported(run) as files:
        use_saved(run_dir, lambda saved: write_archive(*saved, file, optimiser=optimiser, data_files=files))
    if show_progress:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return file
