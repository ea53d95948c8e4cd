"""`compare`: several runs on the same held-out tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waveform.domain import TokenDomain, domain_of_runs
from waveform.quality.config import QualityConfig
from waveform.ranks.distributed import SCORING_TIMEOUT_S, World, job
from waveform.runs.scoring import EvaluateOptions, Opened, ScoredRun, common_tokens
from waveform.runs.statistics import paired_interval
from waveform.system.output import check_files, write_json


def compare(
    run_dirs: Sequence[Path | str] | Path | str,
    options: EvaluateOptions | None = None,
    quality_config: QualityConfig | None = None,
    *,
    data: Path | str | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Score runs on the same tokens; print a table, return (and write) a list of figures.

    Each entry has what `evaluate` gives, `difference_nats` to the `baseline` (the first WaveNet among runs on audio,
    otherwise the first run) with its `interval_95` by the paired bootstrap over utterances (None for fewer than five),
    how fast it was trained, and its `learning_curve`, which `plot_file` shows (for recall: bits by distance). On audio,
    it also has `sampling_tokens_per_second`; with quality_config.quality, `quality`, the same figures of all runs'
    samples in each entry; and with options.published, the figures of others. Under torchrun every process calls this.
    Raises UserError as `evaluate` does, if the runs' tokens differ, and if published figures were measured in another
    way than those of the runs would be.
    """
    run_dirs = [run_dirs] if isinstance(run_dirs, str | Path) else list(dict.fromkeys(run_dirs))
    check_files(json_file=json_file, plot_file=plot_file)
    options, domain = options or EvaluateOptions(), domain_of_runs(run_dirs)
    with job(device=device, timeout_s=SCORING_TIMEOUT_S, show_progress=show_progress) as world:
        opened = open_runs(domain, run_dirs, options, data=data, world=world)
        published = {} if options.published is None else {"published": domain.published(opened, options)}
        quality, below = domain.quality(opened, quality_config)
        scored = [domain.measure(run, opened.tokens, options, world=world) for run in opened.runs]
        entries = [{**entry, **published, **quality} for entry in entries_of(domain, scored)] if world.is_first else []
        if world.shows:
            print("\n".join([domain.format_table(entries), *below]))
        if world.is_first:
            write_json(json_file, entries)
            if plot_file is not None:
                domain.save_plot(plot_file, scored, entries)
        return entries


def open_runs(
    domain: TokenDomain,
    run_dirs: Sequence[Path | str],
    options: EvaluateOptions,
    *,
    data: Path | str | None = None,
    world: World,
) -> Opened:
    """Open runs, and the tokens that all are scored on. Raises UserError if these differ."""
    runs = [domain.load_to_score(run_dir, options, world=world) for run_dir in run_dirs]
    domain.refuse_unlike(runs, options)
    token_sets = [
        # Data that is named is the same for all runs, so only the first run reports on it.
        domain.open_split(run, data=data, split=options.split, show_progress=world.shows and (i == 0 or data is None))
        for i, run in enumerate(runs)
    ]
    return Opened(runs, common_tokens(runs, token_sets, split=options.split), data, world)


def entries_of(domain: TokenDomain, scored: Sequence[ScoredRun]) -> list[dict[str, Any]]:
    """The figures of runs that were scored on the same tokens, as `compare` returns them."""
    baseline = next((one for one in scored if one.run.name == domain.baseline_model), scored[0])
    entries = [
        {
            **one.all_figures,
            "baseline": str(baseline.run.given),
            "difference_nats": one.result.nats_per_token - baseline.result.nats_per_token,
            "interval_95": None if one is baseline else paired_interval(one.result, baseline.result),
        }
        for one in scored
    ]
    return domain.compared(entries, scored)
