"""`waveform race`: trains models in turn on the same audio and budget, with several seeds, and compares them."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waveform.engine.dataset import is_dataset
from waveform.engine.trainer import TrainResult
from waveform.runs.folder import read_config
from waveform.runs.race import Entrants, Scored, figures_of_race, race_table, save_race, train_rounds
from waveform.speech import cache_of, compose_config
from waveform.system.output import check_files, write_json
from waveform.verbs.compare import BASELINE, figures_of, open_runs, scope_of, score_runs
from waveform.verbs.train import train_all

MODELS = ("compressive_transformer", "transformer_xl", "wavenet")


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
    data, out_dir, entrants = Path(source), Path(out_dir), entrants or Entrants()
    models = list(dict.fromkeys(entrants.models or MODELS))
    check_files(json_file=json_file, plot_file=plot_file)

    def train(runs: Mapping[Path, Sequence[str]]) -> list[TrainResult]:
        nonlocal data
        results = train_all(data, runs, config_dir=config_dir, show_progress=show_progress)
        if not is_dataset(data):  # what the first seed has prepared serves for the others
            data = cache_of(data, run_dir=next(iter(runs)))
        return results

    rounds = train_rounds(
        out_dir,
        overrides,
        models,
        num_seeds=entrants.seeds,
        compose=partial(compose_config, config_dir=config_dir),
        train=train,
    )
    if os.environ.get("RANK", "0") != "0":
        return None
    run_dirs = [run_dir for run_dirs in rounds.values() for run_dir in run_dirs]
    device = read_config(run_dirs[0])["train"]["device"]
    runs = score_runs(*open_runs(run_dirs, device=device, show_progress=show_progress), show_progress=show_progress)
    by_model = {model: [one for one in runs if one.run.name == model] for model in models}
    of_runs = [figures_of(one, split="test") for one in runs]
    rate = of_runs[0]["sample_rate_hz"]
    scored = Scored(by_model, list(rounds), unit="sample", baseline=BASELINE, tokens_per_second=rate)
    figures = {**figures_of_race(scored), "runs": of_runs}
    if show_progress:
        first = figures["runs"][0]
        print("\n".join(race_table(figures, scored)))
        print(
            f"{scope_of(first)}; linear prediction alone {first['linear_prediction_nats_per_sample']:.4f} nats, "
            f"unigram {first['unigram_nats_per_sample']:.4f} nats; {first['device']}, "
            f"{first['num_threads']} thread"
            f"{'s' * (first['num_threads'] > 1)}"
        )
    write_json(json_file, figures)
    if plot_file is not None:
        save_race(plot_file, scored)
    return figures
