"""`python -m recipes race`: trains models in turn on the same text and budget, with several seeds; compares them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from recipes.metrics import UNITS
from recipes.text import compose_config, load
from recipes.verbs.evaluate import measure
from recipes.verbs.train import train_all
from waveform.ranks.distributed import World
from waveform.runs.folder import read_config
from waveform.runs.race import Entrants, Scored, ScoredRun, figures_of_race, race_table, save_race, train_rounds
from waveform.runs.scoring import EvaluateOptions, own_tokens
from waveform.runs.seeds import mean_and_interval
from waveform.system.console import counted
from waveform.system.output import check_files, write_json

MODELS = ("compressive_transformer", "transformer_xl")
_BASELINE = "transformer_xl"


@dataclass(frozen=True)
class RaceConfig(Entrants):
    """Who takes part in a race on text, and how they are scored."""

    rows: int | None = None  # pieces that the test split is cut into, and intervals are over; None: whole documents
    config_dir: Path | None = None  # the user's own configs


def race(
    recipe: str,
    data_dir: Path | str,
    out_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config: RaceConfig | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any] | None:
    """Train models for the same budget, in turn, into `out_dir`/MODEL-SEED; score them on the test split.

    As `waveform.race`, with the recipe's metrics beside NLL; differences are to Transformer-XL, and there are
    intervals over documents, or pieces with config.rows, if there are at least five. Raises UserError as `train` and
    `evaluate` do.
    """
    out_dir, config = Path(out_dir), config or RaceConfig()
    options = EvaluateOptions(rows=config.rows)
    models = list(dict.fromkeys(config.models or MODELS))
    check_files(json_file=json_file, plot_file=plot_file)
    rounds = train_rounds(
        out_dir,
        overrides,
        models,
        num_seeds=config.seeds,
        compose=partial(compose_config, recipe, config_dir=config.config_dir),
        train=partial(train_all, recipe, data_dir, config_dir=config.config_dir, show_progress=show_progress),
    )
    if os.environ.get("RANK", "0") != "0":
        return None
    by_model: dict[str, list[ScoredRun]] = {model: [] for model in models}
    entries: dict[str, list[dict[str, Any]]] = {model: [] for model in models}
    for run_dir in (run_dir for run_dirs in rounds.values() for run_dir in run_dirs):
        run = load(run_dir, device=read_config(run_dir)["train"]["device"])
        measured = measure(run, options, split="test", world=World(device=run.device), show_progress=show_progress)
        one = ScoredRun.of(run, own_tokens(run, split="test"), measured.result)
        by_model[run.name].append(one)
        speeds = {"train_tokens_per_second_by_slice": one.speeds, "learning_curve": one.curve.figures()}
        entries[run.name].append({**measured.figures, **speeds})
    scored = Scored(by_model, list(rounds), unit="token", baseline=_BASELINE)
    figures = figures_of_race(scored)
    first = entries[models[0]][0]
    metrics = [name for name in UNITS if name in first]
    for of_model in figures["models"]:
        for name in metrics:
            of_model[name] = mean_and_interval([entry[name] for entry in entries[of_model["model"]]])
    figures["runs"] = [entry for of_seed in zip(*entries.values(), strict=True) for entry in of_seed]
    if show_progress:
        columns = {
            UNITS[name]: {each["model"]: f"{each[name]['mean']:.5g}" for each in figures["models"]} for name in metrics
        }
        print("\n".join(race_table(figures, scored, extra=columns)))
        size = f"{first['num_tokens']:,} tokens of {counted(first['num_documents'], 'document')}"
        print(f"test split: {size}, state {first['state']}")
    write_json(json_file, figures)
    if plot_file is not None:
        save_race(plot_file, scored)
    return figures
