"""`evaluate`: NLL of a run on held-out data, with the metrics of its domain."""

from pathlib import Path
from typing import Any

from waveform.domain import domain_of_runs
from waveform.quality.config import QualityConfig
from waveform.ranks.distributed import SCORING_TIMEOUT_S, job
from waveform.runs.scoring import EvaluateOptions
from waveform.system.output import check_files, write_json
from waveform.verbs.compare import open_runs


def evaluate(
    run_dir: Path | str,
    options: EvaluateOptions | None = None,
    quality_config: QualityConfig | None = None,
    *,
    data: Path | str | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Score a run on a split; print the figures, return (and write) them.

    options.protocol: `utterance` (state is carried from the start of each utterance, or document), `chunk` (reset every
    train.chunk tokens), `carry` or `clip` (waveform/engine/evaluator); options.rows: number of pieces that the split is
    cut into, to score them side by side. A dynamic evaluation is reported separately as `dynamic`; the run on disk does
    not change. With quality_config.quality, `quality` compares samples of the run with real clips and noise. plot_file:
    as in `compare`. Under torchrun every process calls this and scores a share. Raises UserError if there is no
    complete checkpoint, if its data is gone, and for options that do not fit.
    """
    check_files(json_file=json_file, plot_file=plot_file)
    options, domain = options or EvaluateOptions(), domain_of_runs([run_dir])
    with job(device=device, timeout_s=SCORING_TIMEOUT_S, show_progress=show_progress) as world:
        opened = open_runs(domain, [run_dir], options, data=data, world=world)
        quality, below = domain.quality(opened, quality_config)
        scored = domain.measure(opened.runs[0], opened.tokens, options, world=world)
        figures = scored.figures | quality
        if world.shows:
            print("\n".join([domain.describe(figures), *below]))
        if world.is_first:
            write_json(json_file, figures)
            if plot_file is not None:
                domain.save_plot(plot_file, [scored], [figures])
        return figures
