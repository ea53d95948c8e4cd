"""`python -m recipes analyse`: where runs on text attend, how they compress, and how far back they look."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.text import load
from waveform.analyses.analyse import AnalysisConfig, check_files, common_tokens
from waveform.analyses.analyse import analyse as analyse_runs
from waveform.runs.scoring import own_tokens


def analyse(
    run_dirs: Sequence[Path],
    config: AnalysisConfig | None = None,
    *,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Analyse one run or a group: print the figures, return them, and write the JSON and PNG files that are named.

    Raises UserError as `evaluate` does, and if the runs' data differ.
    """
    config = config or AnalysisConfig()
    check_files(json_file=json_file, plot_file=plot_file)
    runs = [load(run_dir, device=device) for run_dir in run_dirs]
    return analyse_runs(
        runs,
        common_tokens(runs, [own_tokens(run, split=config.split) for run in runs], split=config.split),
        config,
        json_file=json_file,
        plot_file=plot_file,
        show_progress=show_progress,
    )
