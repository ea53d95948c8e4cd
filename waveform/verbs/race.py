"""`waveform race`: trains models in turn on the same audio and budget, with several seeds, and compares them."""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from waveform.audio import SAMPLE_RATE_HZ
from waveform.engine.dataset import is_dataset
from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import bits
from waveform.runs.configured_model import num_parameters
from waveform.runs.learning_curves import save_learning_curves
from waveform.runs.scoring import interval_over_utterances
from waveform.runs.seeds import mean_and_interval
from waveform.runs.speeds import warnings_of
from waveform.speech import cache_of, compose_config
from waveform.system.console import table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.signals import Interrupted
from waveform.verbs.compare import BASELINE, ScoredRun, figures_of, score_runs
from waveform.verbs.train import train_all

MODELS = ("compressive_transformer", "transformer_xl", "wavenet")
_MOST_SEEDS = 100
_NUM_LOOKS = 10  # evaluations in training, evenly over the budget
_LOOK_TOKENS = 64_000  # of each, in 16 pieces of 4,000: longer than what the models of `demo` can look back


@dataclass(frozen=True)
class Entrants:
    """What takes part in a race. Raises UserError for a number of seeds out of range."""

    models: Sequence[str] | None = None  # registered names; None: the three of `demo`
    seeds: int = 1  # trainings of each model

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= _MOST_SEEDS:
            raise UserError(f"--seeds is {self.seeds}; it must be from 1 to {_MOST_SEEDS}")


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
    out_dir, entrants = Path(out_dir), entrants or Entrants()
    models = list(dict.fromkeys(entrants.models or MODELS))
    check_files(json_file=json_file, plot_file=plot_file)
    for override in overrides:
        if override.startswith("model="):
            raise UserError(f"{override}: a race has several models; name them with --models")
    settings = {model: _with_looks(model, overrides, config_dir) for model in models}
    first_seed = compose_config(settings[models[0]], config_dir=config_dir)["seed"]
    rounds = {
        seed: {out_dir / f"{model}-{seed}": [*settings[model], f"seed={seed}"] for model in models}
        for seed in range(first_seed, first_seed + entrants.seeds)
    }
    for runs in rounds.values():
        results = train_all(source, runs, config_dir=config_dir, show_progress=show_progress)
        asked_by = next((result.asked_by for result in results if result.asked_by), 0)
        if not is_dataset(Path(source)):  # what the first seed has prepared serves for the others
            source = cache_of(Path(source), run_dir=next(iter(runs)))
        if asked_by:
            raise Interrupted(asked_by, "all runs are saved; the same command continues")
    if os.environ.get("RANK", "0") != "0":
        return None
    run_dirs = [run_dir for runs in rounds.values() for run_dir in runs]
    scored = score_runs(run_dirs, show_progress=show_progress)
    by_model = {model: [one for one in scored if one.run.name == model] for model in models}
    figures: dict[str, Any] = {
        "models": [
            {"model": model, **_summary(runs, by_model.get(BASELINE)), "seeds": list(rounds)}
            for model, runs in by_model.items()
        ],
        "runs": [figures_of(one, split="test") for one in scored],
        "warnings": [
            line for seed in rounds for line in _warnings([one for one in scored if one.run.config["seed"] == seed])
        ],
    }
    if show_progress:
        print(_format(figures))
    write_json(json_file, figures)
    if plot_file is not None:
        save_learning_curves(
            plot_file,
            [(one.run.name, one.curve) for one in scored],
            unit="sample",
            scores=[(run["model"], run["num_parameters"], run["nll_nats_per_sample"]) for run in figures["runs"]],
        )
    return figures


def _warnings(scored: Sequence[ScoredRun]) -> list[str]:
    """What to warn of runs that were trained in turn."""
    return warnings_of(
        {one.run.folder.name: one.speeds for one in scored}, {one.run.folder.name: one.waited_share for one in scored}
    )


def _with_looks(model: str, overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Settings of a model: short evaluations, evenly over its budget, unless `overrides` say otherwise."""
    train = compose_config([f"model={model}", *overrides], config_dir=config_dir)["train"]
    if train["max_seconds"] is not None:
        looks = f"train.evaluate_every_seconds={train['max_seconds'] / _NUM_LOOKS}"
    else:
        looks = f"train.evaluate_every={math.ceil(train['max_steps'] / _NUM_LOOKS)}"
    return [f"model={model}", looks, f"train.evaluate_tokens={_LOOK_TOKENS}", *overrides]


def _summary(runs: Sequence[ScoredRun], baseline: Sequence[ScoredRun] | None) -> dict[str, Any]:
    """Figures of one model over its seeds; baseline: WaveNet's runs of the same seeds, if it takes part."""
    speeds = [speed for one in runs for speed in one.speeds]
    return {
        "num_parameters": num_parameters(runs[0].run.model),
        "nll_nats_per_sample": _over_seeds_and_utterances([one.result for one in runs]),
        "difference_to_wavenet_nats": None
        if baseline is None or baseline[0] is runs[0]
        else _over_seeds_and_utterances([_difference(a.result, b.result) for a, b in zip(runs, baseline, strict=True)]),
        "train_samples_seen": mean_and_interval([one.run.tokens_seen for one in runs]),
        "train_seconds": mean_and_interval([one.run.train_seconds for one in runs]),
        "train_samples_per_second": statistics.median(speeds) if speeds else None,  # of slices
    }


def _difference(a: Evaluation, b: Evaluation) -> Evaluation:
    return replace(a, nats=a.nats - b.nats)


def _over_seeds_and_utterances(results: Sequence[Evaluation]) -> dict[str, Any]:
    """The mean over seeds, with an interval over seeds (Student's t) and one over utterances (bootstrap)."""
    over_seeds = mean_and_interval([result.nats_per_token for result in results])
    nats = np.mean([result.nats for result in results], axis=0)
    return {
        "mean": over_seeds["mean"],
        "interval_95_over_utterances": list(interval_over_utterances(nats, results[0].counts)),
        "interval_95_over_seeds": over_seeds["interval_95"],
        "seeds": over_seeds["seeds"],
    }


def _format(figures: dict[str, Any]) -> str:
    """The race as text, best NLL first."""
    several = len(figures["models"][0]["seeds"]) > 1
    brackets = "[utterances] [seeds]" if several else "[utterances]"
    header = ["model", f"nats/sample {brackets}", "bits/sample", f"vs WaveNet, nats {brackets}", "parameters",
              "samples seen", "training"]  # fmt: skip
    rows = []
    for entry in sorted(figures["models"], key=lambda entry: entry["nll_nats_per_sample"]["mean"]):
        nll, difference = entry["nll_nats_per_sample"], entry["difference_to_wavenet_nats"]
        rate = entry["train_samples_per_second"]
        rows.append(
            [
                entry["model"],
                _with_intervals(nll, sign=""),
                f"{bits(nll['mean']):.4f}",
                "-" if difference is None else _with_intervals(difference, sign="+"),
                f"{entry['num_parameters'] / 1e6:.2f} M",
                f"{entry['train_samples_seen']['mean'] / 1e6:.2f} M in {entry['train_seconds']['mean']:.0f} s",
                "-" if rate is None else f"{rate:,.0f}/s ({rate / SAMPLE_RATE_HZ:.2f} x real time)",
            ]
        )
    run, num_seeds = figures["runs"][0], len(figures["models"][0]["seeds"])
    seeds = f", and over {num_seeds} seeds, which the other figures are means of" if several else "; one seed"
    lines = [
        *table(header, rows),
        f"test split: {run['num_samples']:,} samples of {run['num_utterances']} utterances, unigram "
        f"{run['unigram_nats_per_sample']:.4f} nats; lower NLL is better",
        f"95% intervals over utterances{seeds}; differences are paired; trained in turn; {run['device']}, "
        f"{run['num_threads']} thread{'s' * (run['num_threads'] > 1)}",
        *figures["warnings"],
    ]
    return "\n".join(lines)


def _with_intervals(figure: dict[str, Any], *, sign: str) -> str:
    intervals = [figure["interval_95_over_utterances"], figure["interval_95_over_seeds"]]
    shown = [f"[{low:{sign}.4f}, {high:{sign}.4f}]" for low, high in filter(None, intervals)]
    return " ".join([f"{figure['mean']:{sign}.4f}", *shown])
