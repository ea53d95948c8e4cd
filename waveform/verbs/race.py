"""`race`: trains models in turn on the same data and budget, with several seeds, and compares them."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from waveform.domain import TokenDomain, TrainRequest, token_domain_of
from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import bits
from waveform.ranks.distributed import World, choose_device
from waveform.runs.configured_model import num_parameters
from waveform.runs.folder import CONFIG_FILE, read_config
from waveform.runs.learning_curves import save_learning_curves
from waveform.runs.scoring import EvaluateOptions, ScoredRun
from waveform.runs.settings import given_by, typed
from waveform.runs.speeds import warnings_of
from waveform.runs.statistics import interval_over_utterances, mean_and_interval, with_intervals
from waveform.system.console import as_table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.rules import check_rules, whole_number
from waveform.verbs.compare import open_runs
from waveform.verbs.train import train_all

_MOST_SEEDS = 100
_NUM_LOOKS = 10  # evaluations in training, evenly over the budget
_LOOK_TOKENS = 64_000  # of each, in 16 pieces of 4,000: longer than what small models can look back


@dataclass(frozen=True)
class Entrants:
    """What takes part in a race. Raises UserError for a number out of range."""

    models: Sequence[str] | None = None  # registered names; None: those of the domain
    seeds: Annotated[int, whole_number(1, _MOST_SEEDS)] = 1  # how often each model is trained
    # Number of pieces that the test split is cut into, over which intervals are computed; None: whole utterances
    rows: Annotated[int, whole_number(1)] | None = None

    def __post_init__(self) -> None:
        check_rules(self)


def race(
    source: Path | str,
    out_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    entrants: Entrants | None = None,
    config_dir: Path | str | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any] | None:
    """Train models for the same budget, in turn, into `out_dir`/MODEL-SEED; score them on the test split.

    Seeds follow each other; within a seed, the models take turns in slices of seconds. After an interruption the same
    call continues. overrides: settings for all models; `seed` is the first of the seeds. Prints a table and returns
    (and writes) its figures as `models`, those of every run as `runs`, and `warnings` of uneven speed; under torchrun,
    on the first process only (the others return None). Raises UserError as `train` and `compare` do, for overrides
    that name a model, and if `out_dir` is a run itself.
    """
    out_dir, data, entrants, domain = Path(out_dir), Path(source), entrants or Entrants(), token_domain_of(source)
    models = list(dict.fromkeys(entrants.models or domain.race_models))
    check_files(json_file=json_file, plot_file=plot_file)
    if (out_dir / CONFIG_FILE).exists():
        raise UserError(f"{out_dir} is a run; give a folder for the race, which keeps its runs there")
    for override in overrides:
        if "model" in given_by([override]):
            raise UserError(f"{override}: a race has several models; name them with --models")
    settings, configs = {}, []
    for model in models:
        request = TrainRequest(data, overrides=[f"model={model}", *overrides], config_dir=config_dir)
        configs.append(domain.compose(request))
        typed(domain.train_config, configs[-1]["train"], section="train")  # refuses training without an end
        settings[model] = [f"model={model}", *_looks(configs[-1]["train"]), *overrides]
    options = EvaluateOptions(rows=entrants.rows)
    domain.refuse_other_resets([config["train"] for config in configs], options)
    seeds = [configs[0]["seed"] + i for i in range(entrants.seeds)]
    last = TrainRequest(data, overrides=[*settings[models[0]], f"seed={seeds[-1]}"], config_dir=config_dir)
    domain.compose(last)  # refuses a seed that is too large
    for seed in seeds:
        runs = {out_dir / f"{model}-{seed}": [*settings[model], f"seed={seed}"] for model in models}
        train_all(data, runs, config_dir=config_dir, show_progress=show_progress)
        data = Path(read_config(next(iter(runs)))["dataset"]["path"])  # the next seed uses the prepared data
    if os.environ.get("RANK", "0") != "0":
        return None
    run_dirs = [out_dir / f"{model}-{seed}" for seed in seeds for model in models]
    device = choose_device(read_config(run_dirs[0])["train"]["device"])
    world = World(device=torch.device(device), show_progress=show_progress)
    opened = open_runs(domain, run_dirs, options, world=world)
    scored = [domain.measure(run, opened.tokens, options, world=world) for run in opened.runs]
    by_model = {model: scored[i :: len(models)] for i, model in enumerate(models)}
    baseline = domain.race_baseline if domain.race_baseline in by_model else models[0]
    columns = {name: heading for name, heading in domain.race_metrics.items() if name in scored[0].figures}
    figures: dict[str, Any] = {
        "models": [
            {"model": model, **_summary(of_model, by_model[baseline]), "seeds": seeds}
            | {name: mean_and_interval([one.figures[name] for one in of_model]) for name in columns}
            for model, of_model in by_model.items()
        ],
        "warnings": [
            line
            for of_seed in zip(*by_model.values(), strict=True)  # which were trained in turn
            for line in warnings_of({one.run.folder.name: one.all_figures for one in of_seed}, unit=domain.unit)
        ],
        "runs": [one.all_figures for one in scored],
    }
    if show_progress:
        print(_table(figures, domain, columns, baseline=baseline))
    write_json(json_file, figures)
    if plot_file is not None:
        save_learning_curves(
            plot_file,
            [(one.run.name, one.curve) for one in scored],
            unit=domain.unit,
            scores=[(one.run.name, num_parameters(one.run.model), one.result.nats_per_token) for one in scored],
        )
    return figures


def _looks(train: Mapping[str, Any]) -> list[str]:
    """Settings of short evaluations, evenly over a budget; the user's settings follow and override them."""
    if train["max_seconds"] is not None:
        looks = f"train.evaluate_every_seconds={train['max_seconds'] / _NUM_LOOKS}"
    else:
        looks = f"train.evaluate_every={math.ceil(train['max_steps'] / _NUM_LOOKS)}"
    return [looks, f"train.evaluate_tokens={_LOOK_TOKENS}"]


def _summary(runs: Sequence[ScoredRun], baseline: Sequence[ScoredRun]) -> dict[str, Any]:
    """Figures of one model over its seeds; baseline: the runs of the same seeds that it is compared with."""
    speeds = [speed for one in runs for speed in one.all_figures["train_tokens_per_second_by_slice"]]
    difference = None
    if baseline[0] is not runs[0]:
        pairs = [(one.result, other.result) for one, other in zip(runs, baseline, strict=True)]
        difference = _over_seeds_and_utterances([replace(a, nats=a.nats - b.nats) for a, b in pairs])
    return {
        "num_parameters": num_parameters(runs[0].run.model),
        "nats_per_token": _over_seeds_and_utterances([one.result for one in runs]),
        "difference_nats": difference,
        "train_tokens_seen": mean_and_interval([one.run.tokens_seen for one in runs]),
        "train_seconds": mean_and_interval([one.run.train_seconds for one in runs]),
        "train_tokens_per_second": statistics.median(speeds) if speeds else None,  # of slices
    }


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


def _table(figures: dict[str, Any], domain: TokenDomain, columns: Mapping[str, str], *, baseline: str) -> str:
    """The race as text, best NLL first; columns: further metrics, and what they are called."""
    unit, num_seeds = domain.unit, len(figures["models"][0]["seeds"])
    tokens_per_second = figures["runs"][0].get("sample_rate_hz")
    has_intervals = any(entry["nats_per_token"]["interval_95_over_utterances"] for entry in figures["models"])
    wholes = ["pieces" if figures["runs"][0]["rows"] else "utterances"] * has_intervals
    brackets = " ".join(f"[{each}]" for each in wholes + ["seeds"] * (num_seeds > 1))
    rows = []
    for entry in sorted(figures["models"], key=lambda entry: entry["nats_per_token"]["mean"]):
        nll, difference, rate = entry["nats_per_token"], entry["difference_nats"], entry["train_tokens_per_second"]
        seen, seconds = entry["train_tokens_seen"]["mean"], entry["train_seconds"]["mean"]
        real_time = f" ({rate / tokens_per_second:.2f} x real time)" if rate and tokens_per_second else ""
        rows.append(
            {
                "model": entry["model"],
                f"nats/{unit} {brackets}".strip(): _shown(nll),
                f"bits/{unit}": f"{bits(nll['mean']):.4f}",
                **{heading: f"{entry[name]['mean']:.5g}" for name, heading in columns.items()},
                f"vs {baseline}, nats {brackets}".strip(): "-" if difference is None else _shown(difference, sign="+"),
                "parameters": f"{entry['num_parameters'] / 1e6:.2f} M",
                f"{unit}s seen": f"{seen / 1e6:.2f} M in {seconds:.0f} s",
                "training": "-" if rate is None else f"{rate:,.0f}/s{real_time}",
            }
        )
    seeds = f"over {num_seeds} seeds (the other figures are means over these)" if num_seeds > 1 else "one seed"
    over = [*(f"95% intervals over {each}" for each in wholes), seeds]
    note = f"{', '.join(over)}; differences are paired; trained in turn"
    return as_table(rows, note, *figures["warnings"], domain.scope(figures["runs"][0]))


def _shown(figure: dict[str, Any], *, sign: str = "") -> str:
    intervals = figure["interval_95_over_utterances"], figure["interval_95_over_seeds"]
    return with_intervals(figure["mean"], *intervals, sign=sign)
