"""`python -m recipes analyse`: where runs on text attend, how they compress, and how far back they look."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.verbs.evaluate import open_text_run
from waveform.analyses import report
from waveform.ranks.distributed import World, choose_device
from waveform.runs.evaluation import own_tokens


def analyse(
    run_dirs: Sequence[Path],
    *,
    split: str = "test",
    tokens: int = report.DEFAULT_TOKENS,
    context_step: int | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Analyse one run or a group; prints the figures, returns them, and writes JSON and a PNG where named.

    The rest is as in `report.analyse`. Raises UserError as `evaluate` does, and where the runs' data differ.
    """
    report.check_files(json_file=json_file, plot_file=plot_file)
    world = World(device=torch.device(choose_device(device)))
    runs = [open_text_run(run_dir, world=world) for run_dir in run_dirs]
    return report.analyse(
        runs,
        report.common_tokens(runs, [own_tokens(run, split=split) for run in runs], split=split),
        split=split,
        max_tokens=tokens,
        context_step=context_step,
        json_file=json_file,
        plot_file=plot_file,
        show_progress=show_progress,
    )
