"""`python -m recipes analyse`: where runs on text attend, how they compress, and how far back they look."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.corpora.episodes import is_recall, read_distances
from recipes.text import load
from waveform.analyses.analyse import AnalysisConfig, common_tokens
from waveform.analyses.analyse import analyse as analyse_runs
from waveform.engine.dataset import read_dataset
from waveform.runs.scoring import own_tokens
from waveform.system.output import check_files


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
    runs = [load(run_dir, device=device, **config.model_fields) for run_dir in run_dirs]
    tokens = common_tokens(runs, [own_tokens(run, split=config.split) for run in runs], split=config.split)
    data = read_dataset(Path(runs[0].config["dataset"]["path"]))
    return analyse_runs(
        runs,
        tokens,
        config,
        distances=read_distances(data, config.split) if is_recall(runs[0]) else None,
        json_file=json_file,
        plot_file=plot_file,
        show_progress=show_progress,
    )
