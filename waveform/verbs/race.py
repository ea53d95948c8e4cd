"""`race`: trains models in turn on the same data and budget, with several seeds, and compares them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from waveform.domain import TrainRequest, token_domain_of
from waveform.engine.trainer import TrainResult
from waveform.runs.folder import read_config
from waveform.runs.race import Entrants, Scored, figures_of_race, race_table, save_race, train_rounds
from waveform.runs.scoring import EvaluateOptions
from waveform.runs.statistics import mean_and_interval
from waveform.system.output import check_files, write_json
from waveform.verbs.compare import open_runs
from waveform.verbs.train import train_all


def race(
    source: Path | str,
    out_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    entrants: Entrants | None = None,
    config_dir: Path | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any] | None:
    """Train models for the same budget, in turn, into `out_dir`/MODEL-SEED; score them on the test split.

    One seed after the other; within a seed, slices of seconds of each model. After an interruption the same call
    continues. overrides: settings for all models; `seed` is the first of the seeds. Prints a table and returns (and
    writes) its figures, `models`, those of every run, `runs`, and the `warnings` of uneven speed; under torchrun, on
    the first process only (the others return None). Raises UserError as `train` and `compare` do.
    """
    out_dir, entrants, domain = Path(out_dir), entrants or Entrants(), token_domain_of(source)
    data = Path(source)
    models = list(dict.fromkeys(entrants.models or domain.race_models))
    check_files(json_file=json_file, plot_file=plot_file)

    def train(runs: Mapping[Path, Sequence[str]]) -> list[TrainResult]:
        nonlocal data
        results = train_all(data, runs, config_dir=config_dir, show_progress=show_progress)
        data = Path(read_config(next(iter(runs)))["dataset"]["path"])  # what was prepared serves for the next seed
        return results

    rounds = train_rounds(
        out_dir,
        overrides,
        models,
        num_seeds=entrants.seeds,
        compose=lambda given: domain.compose(TrainRequest(data, overrides=given, config_dir=config_dir)),
        train=train,
    )
    if os.environ.get("RANK", "0") != "0":
        return None
    run_dirs = [run_dir for run_dirs in rounds.values() for run_dir in run_dirs]
    device, options = read_config(run_dirs[0])["train"]["device"], EvaluateOptions(rows=entrants.rows)
    runs, tokens = open_runs(domain, run_dirs, options, device=device, show_progress=show_progress)
    of_runs = [domain.measure(run, tokens, options, show_progress=show_progress) for run in runs]
    by_model = {model: [one for one in of_runs if one.run.name == model] for model in models}
    scored = Scored(
        by_model,
        list(rounds),
        unit=domain.unit,
        baseline=domain.race_baseline,
        tokens_per_second=of_runs[0].figures.get("sample_rate_hz"),
    )
    figures = {**figures_of_race(scored), "runs": [one.all_figures for one in of_runs]}
    columns = domain.race_columns(of_runs[0].figures)
    for of_model in figures["models"]:
        for name in columns:
            of_model[name] = mean_and_interval([one.figures[name] for one in by_model[of_model["model"]]])
    if show_progress:
        cells = {
            heading: {each["model"]: f"{each[name]['mean']:.5g}" for each in figures["models"]}
            for name, heading in columns.items()
        }
        print("\n".join([*race_table(figures, scored, extra=cells), domain.scope(figures["runs"][0])]))
    write_json(json_file, figures)
    if plot_file is not None:
        save_race(plot_file, scored)
    return figures
