"""What races of any modality have in common: who takes part, looks at even times, figures over seeds, a table.

A race trains models for the same budget in turn (engine/turns), one seed after the other, and scores them all.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import bits
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import TrainResult
from waveform.runs.configured_model import num_parameters
from waveform.runs.folder import CONFIG_FILE
from waveform.runs.learning_curves import LearningCurve, read_learning_curve, save_learning_curves
from waveform.runs.opened import TrainedRun
from waveform.runs.speeds import read_speeds, read_training_speed, read_waited_share, warnings_of
from waveform.runs.statistics import interval_over_utterances, mean_and_interval, with_intervals
from waveform.system.console import table
from waveform.system.errors import UserError
from waveform.system.signals import Interrupted

_MOST_SEEDS = 100
_NUM_LOOKS = 10  # evaluations in training, evenly over the budget
_LOOK_TOKENS = 64_000  # of each, in 16 pieces of 4,000: longer than what small models can look back


@dataclass(frozen=True)
class Entrants:
    """What takes part in a race. Raises UserError for a number of seeds out of range."""

    models: Sequence[str] | None = None  # registered names; None: those of the verb
    seeds: int = 1  # trainings of each model
    # Pieces that the test split is cut into, and that intervals are over; None: whole utterances
    rows: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= _MOST_SEEDS:
            raise UserError(f"--seeds is {self.seeds}; it must be from 1 to {_MOST_SEEDS}")


@dataclass(frozen=True)
class ScoredRun:
    """A run, its NLL of the tokens that were scored, and how its training went."""

    run: TrainedRun
    tokens: TokenSet
    result: Evaluation
    curve: LearningCurve
    speeds: list[float]  # of training, in tokens per second, by slice
    waited_share: float | None  # of the training time, for a core; None if that did not cost updates
    figures: dict[str, Any]  # what `evaluate --json` writes

    @staticmethod
    def of(run: TrainedRun, tokens: TokenSet, result: Evaluation, figures: dict[str, Any]) -> "ScoredRun":
        """Read from the run's log how its training went."""
        curve = read_learning_curve(run.folder, run.config)
        waited = read_waited_share(run.folder, run.config["train"])
        return ScoredRun(run, tokens, result, curve, read_speeds(run.folder), waited, figures)

    @property
    def all_figures(self) -> dict[str, Any]:
        """What a comparison's JSON has of this run on its own."""
        return {
            **self.figures,
            "train_tokens_per_second": read_training_speed(self.run.folder),
            "train_tokens_per_second_by_slice": self.speeds,
            "train_waited_share": self.waited_share,
            "learning_curve": self.curve.figures(),
            "device": str(self.run.device),
            "num_threads": torch.get_num_threads(),
        }


@dataclass(frozen=True)
class Scored:
    """The runs of a race, by model, one of each seed in the same order."""

    by_model: Mapping[str, Sequence[ScoredRun]]
    seeds: Sequence[int]
    unit: str  # what a token is called
    baseline: str  # the model that the others are compared with, if it takes part
    tokens_per_second: float | None = None  # of audio


def train_rounds(
    out_dir: Path,
    overrides: Sequence[str],
    models: Sequence[str],
    *,
    num_seeds: int,
    compose: Callable[[Sequence[str]], dict[str, Any]],
    train: Callable[[Mapping[Path, Sequence[str]]], list[TrainResult]],
) -> dict[int, list[Path]]:
    """Train `out_dir`/MODEL-SEED for every model and seed; returns the run folders of each seed.

    compose: settings -> configuration. train: trains some runs (settings by folder) in turn. Raises UserError for
    overrides that name a model and if `out_dir` is a run itself, Interrupted if a signal asks to stop, after all are
    saved.
    """
    if (out_dir / CONFIG_FILE).exists():
        raise UserError(f"{out_dir} is a run; give a folder for the race, which keeps its runs there")
    for override in overrides:
        if override.startswith("model="):
            raise UserError(f"{override}: a race has several models; name them with --models")
    settings = {model: _with_looks(model, overrides, compose) for model in models}
    first_seed = compose(settings[models[0]])["seed"]
    rounds = {
        seed: {out_dir / f"{model}-{seed}": [*settings[model], f"seed={seed}"] for model in models}
        for seed in range(first_seed, first_seed + num_seeds)
    }
    for runs in rounds.values():
        results = train(runs)
        if asked_by := next((result.asked_by for result in results if result.asked_by), 0):
            raise Interrupted(asked_by, "all runs are saved; the same command continues")
    return {seed: list(runs) for seed, runs in rounds.items()}


def _with_looks(model: str, overrides: Sequence[str], compose: Callable[[Sequence[str]], dict[str, Any]]) -> list[str]:
    """Settings of a model: short evaluations, evenly over its budget, unless `overrides` say otherwise."""
    train = compose([f"model={model}", *overrides])["train"]
    if train["max_seconds"] is not None:
        looks = f"train.evaluate_every_seconds={train['max_seconds'] / _NUM_LOOKS}"
    else:
        looks = f"train.evaluate_every={math.ceil(train['max_steps'] / _NUM_LOOKS)}"
    return [f"model={model}", looks, f"train.evaluate_tokens={_LOOK_TOKENS}", *overrides]


def figures_of_race(scored: Scored) -> dict[str, Any]:
    """Figures of each model over its seeds, `models`, and the `warnings` of uneven speed."""
    baseline = scored.by_model.get(scored.baseline)
    rounds = zip(*scored.by_model.values(), strict=True)
    return {
        "models": [
            {"model": model, **_summary(runs, baseline, scored), "seeds": list(scored.seeds)}
            for model, runs in scored.by_model.items()
        ],
        "warnings": [line for of_seed in rounds for line in _warnings(of_seed, unit=scored.unit)],
    }


def _warnings(scored: Sequence[ScoredRun], *, unit: str) -> list[str]:
    """What to warn of runs that were trained in turn."""
    return warnings_of(
        {one.run.folder.name: one.speeds for one in scored},
        {one.run.folder.name: one.waited_share for one in scored},
        unit=unit,
    )


def _summary(runs: Sequence[ScoredRun], baseline: Sequence[ScoredRun] | None, scored: Scored) -> dict[str, Any]:
    """Figures of one model over its seeds; baseline: the runs of the same seeds that it is compared with."""
    speeds = [speed for one in runs for speed in one.speeds]
    return {
        "num_parameters": num_parameters(runs[0].run.model),
        "nats_per_token": _over_seeds_and_utterances([one.result for one in runs]),
        "difference_nats": None
        if baseline is None or baseline[0] is runs[0]
        else _over_seeds_and_utterances([_difference(a.result, b.result) for a, b in zip(runs, baseline, strict=True)]),
        "train_tokens_seen": mean_and_interval([one.run.tokens_seen for one in runs]),
        "train_seconds": mean_and_interval([one.run.train_seconds for one in runs]),
        "train_tokens_per_second": statistics.median(speeds) if speeds else None,  # of slices
    }


def _difference(a: Evaluation, b: Evaluation) -> Evaluation:
    return replace(a, nats=a.nats - b.nats)


def _over_seeds_and_utterances(results: Sequence[Evaluation]) -> dict[str, Any]:
    """The mean over seeds, with an interval over seeds (Student's t) and one over utterances (bootstrap)."""
    over_seeds = mean_and_interval([result.nats_per_token for result in results])
    nats, counts = np.mean([result.nats for result in results], axis=0), results[0].counts
    return {
        "mean": over_seeds["mean"],
        "interval_95_over_utterances": interval_over_utterances(nats, counts),
        "interval_95_over_seeds": over_seeds["interval_95"],
        "seeds": over_seeds["seeds"],
    }


def race_table(
    figures: dict[str, Any], scored: Scored, *, extra: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """The race as lines of text, best NLL first.

    figures: what `figures_of_race` returns. extra: heading -> cell of each model, for further columns.
    """
    unit, extra = scored.unit, extra or {}
    several = len(scored.seeds) > 1
    utterances = any(entry["nats_per_token"]["interval_95_over_utterances"] for entry in figures["models"])
    brackets = " ".join([*["[utterances]"] * utterances, *["[seeds]"] * several])
    header = ["model", f"nats/{unit} {brackets}".strip(), f"bits/{unit}", *extra,
              f"to {scored.baseline}, nats {brackets}".strip(), "parameters", f"{unit}s seen", "training"]  # fmt: skip
    rows = []
    for entry in sorted(figures["models"], key=lambda entry: entry["nats_per_token"]["mean"]):
        nll, difference, rate = entry["nats_per_token"], entry["difference_nats"], entry["train_tokens_per_second"]
        seen, seconds = entry["train_tokens_seen"]["mean"], entry["train_seconds"]["mean"]
        rows.append(
            [
                entry["model"],
                _shown(nll, sign=""),
                f"{bits(nll['mean']):.4f}",
                *(cells[entry["model"]] for cells in extra.values()),
                "-" if difference is None else _shown(difference, sign="+"),
                f"{entry['num_parameters'] / 1e6:.2f} M",
                f"{seen / 1e6:.2f} M in {seconds:.0f} s",
                "-" if rate is None else _speed(rate, scored.tokens_per_second),
            ]
        )
    seeds = f"over {len(scored.seeds)} seeds, which the other figures are means of" if several else "one seed"
    over = ["95% intervals over utterances"] * utterances + [seeds]
    lines = [*table(header, rows), f"{', '.join(over)}; differences are paired; trained in turn"]
    return [*lines, *figures["warnings"]]


def _speed(rate: float, tokens_per_second: float | None) -> str:
    real_time = f" ({rate / tokens_per_second:.2f} x real time)" if tokens_per_second else ""
    return f"{rate:,.0f}/s{real_time}"


def _shown(figure: dict[str, Any], *, sign: str) -> str:
    intervals = figure["interval_95_over_utterances"], figure["interval_95_over_seeds"]
    return with_intervals(figure["mean"], *intervals, sign=sign)


def save_race(path: Path, scored: Scored) -> None:
    """Draw validation NLL in training, and test NLL against parameters. Raises UserError if it cannot be written."""
    runs = [(model, one) for model, of_model in scored.by_model.items() for one in of_model]
    save_learning_curves(
        path,
        [(model, one.curve) for model, one in runs],
        unit=scored.unit,
        scores=[(model, num_parameters(one.run.model), one.result.nats_per_token) for model, one in runs],
    )
