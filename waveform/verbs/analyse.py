"""`analyse`: where runs attend, how they compress, and how far back they look."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waveform.analyses.analyse import AnalysisConfig
from waveform.analyses.analyse import analyse as analyse_runs
from waveform.domain import domain_of_runs
from waveform.runs.scoring import common_tokens
from waveform.system.output import check_files


def analyse(
    run_dirs: Sequence[Path | str] | Path | str,
    config: AnalysisConfig | None = None,
    *,
    data: Path | str | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Analyse one run or a group: print the figures, return them, and write the JSON and PNG files that are named.

    Raises UserError as `load` does, and if the runs' data differ.
    """
    json_path, plot_path = (None if path is None else Path(path) for path in (json_file, plot_file))
    config = config or AnalysisConfig()
    check_files(json_file=json_path, plot_file=plot_path)
    run_dirs = [run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs)
    domain = domain_of_runs(run_dirs)
    sizes = {"memory": config.memory, "compressed": config.compressed}
    runs = [domain.load(run_dir, device=device, **sizes) for run_dir in run_dirs]
    token_sets = [domain.open_split(run, data=data, split=config.split, show_progress=show_progress) for run in runs]
    return analyse_runs(
        runs,
        common_tokens(runs, token_sets, split=config.split),
        config,
        distances=domain.distances(runs[0], config.split),
        json_file=json_path,
        plot_file=plot_path,
        show_progress=show_progress,
    )
