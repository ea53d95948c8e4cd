"""`python -m recipes study figure5 OUT_DIR`: Figure 5 of Rae et al. 2019, at a preset's size.

Object matching, or a Gymnasium environment, by agents with the Compressive Transformer at four rates, Transformer-XL
and an LSTM; of object matching at a delay within every model's reach and at one beyond Transformer-XL's. Models have
a single layer, because deeper ones relay what they saw; two rows show how far that carries.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes.reinforcement.curves import read_returns, save_returns
from recipes.reinforcement.recipes import AGENTS_STUDY as NAME
from recipes.reinforcement.recipes import GYMNASIUM, OBJECT_MATCHING
from recipes.reinforcement.settings import compose_config
from recipes.studies.children import Children
from waveform.engine import checkpoint
from waveform.runs.seeds import mean_and_interval, shown
from waveform.system.console import say, table
from waveform.system.cpu import num_cores
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json

SEEDS = 3  # the paper's
_TITLE = "Rae et al. 2019, Figure 5: object matching by compression rate"
_PUBLISHED = "the paper, after 1e9 frames of DMLab's level: rate 4 is best, rate 1 does not learn it"
_CT = "model=compressive_transformer"
VARIANTS: Mapping[str, Sequence[str]] = {
    **{f"rate_{rate}": (_CT, f"model.compression_rate={rate}") for rate in (1, 2, 4, 8)},
    "transformer_xl": ("model=transformer_xl",),
    "lstm": ("model=lstm",),
    "rate_4_two_layers": (_CT, "model.compression_rate=4", "model.num_layers=2"),
    "transformer_xl_two_layers": ("model=transformer_xl", "model.num_layers=2"),
}
_WITHIN = "within reach"


class _Run(NamedTuple):
    place: str  # the panel
    label: str
    seed: int
    settings: tuple[str, ...]


def figure5(
    out_dir: Path,
    overrides: Sequence[str] = (),
    *,
    num_seeds: int = SEEDS,
    jobs: int = 2,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train and evaluate every variant with several seeds, a process each; interrupted, it continues.

    overrides: settings of every run; with env=NAME the environment is Gymnasium's. Prints a table, returns the figures,
    writes and draws them. Raises UserError for settings that a run refuses, and if a run fails.
    """
    json_file, plot_file = json_file or out_dir / f"{NAME}.json", plot_file or out_dir / f"{NAME}.png"
    check_files(json_file=json_file, plot_file=plot_file)
    recipe = GYMNASIUM if any(override.startswith("env=") for override in overrides) else OBJECT_MATCHING
    runs = _runs(recipe, overrides, num_seeds=num_seeds)
    children = Children(threads=max(1, num_cores() // jobs))

    def finish(run: _Run) -> dict[str, Any]:
        folder = _folder(out_dir, run)
        children.call("train", recipe, str(folder), *run.settings, f"seed={run.seed}")
        found, path = checkpoint.newest(folder), folder / "evaluation.json"
        assert found is not None
        if not path.exists() or json.loads(path.read_bytes())["step"] != found.step:
            children.call("evaluate", str(folder), "--json", str(path))
        if show_progress:
            say(f"{folder}: trained and evaluated")
        figures: dict[str, Any] = json.loads(path.read_bytes())
        return figures

    every = children.finish_all(runs, finish, jobs=jobs)
    places = list(dict.fromkeys(run.place for run in runs))
    summary = {
        "study": NAME,
        "title": _TITLE,
        "published": _PUBLISHED,
        "recipe": recipe,
        "overrides": list(overrides),
        "seeds": num_seeds,
        "threads_per_run": children.threads,
        "steps_seen": max(figures["train_steps_seen"] for figures in every.values()),
        "figures": {place: _of_place(place, every) for place in places},
    }
    if show_progress:
        print(f"{_TITLE}\n{_PUBLISHED}\n{format_table(summary)}")
    write_json(json_file, summary)
    curves: dict[str, dict[str, list[Any]]] = {place: {} for place in places}
    for run in runs:
        curves[run.place].setdefault(run.label, []).append(read_returns(_folder(out_dir, run)))
    save_returns(plot_file, curves, chance=None)
    return summary


def _runs(recipe: str, overrides: Sequence[str], *, num_seeds: int) -> list[_Run]:
    """Every run, its settings checked."""
    runs = []
    for place, delay in _places(recipe, overrides).items():
        for label, chosen in VARIANTS.items():
            settings = (*overrides, *chosen, *delay)
            compose_config(recipe, settings)
            runs += [_Run(place, label, seed, settings) for seed in range(num_seeds)]
    return sorted(runs, key=lambda run: run.seed)


def _places(recipe: str, overrides: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Panels: the settings of each. Raises UserError for a preset in which no delay is within one rate's reach only."""
    given = [override for override in overrides if override.startswith("task.delay=")]
    if recipe == GYMNASIUM or given:
        return {given[0] if given else "environment": ()}
    reach = {label: _reach(recipe, (*overrides, *VARIANTS[label])) for label in ("transformer_xl", "rate_4")}
    # A step at the end of a window reaches a whole window further than one at its start.
    beyond = reach["transformer_xl"][1]
    if beyond > reach["rate_4"][0]:
        raise UserError(
            f"figure5 needs a delay that Transformer-XL ({beyond} steps at most) does not reach and rate 4 "
            f"({reach['rate_4'][0]} at least) does; raise model.compressed, lower model.window, or give task.delay"
        )
    within = reach["transformer_xl"][0] // 4
    return {
        f"{_WITHIN} of all, delay {within}": (f"task.delay={within}",),
        f"beyond Transformer-XL's reach, delay {beyond}": (f"task.delay={beyond}", f"task.episode={6 * beyond}"),
    }


def _reach(recipe: str, settings: Sequence[str]) -> tuple[int, int]:
    """Steps that a layer sees back from the start and from the end of a window."""
    model = compose_config(recipe, settings)["model"]
    back = model["memory"] + model.get("compressed", 0) * model.get("compression_rate", 0)
    return back, back + model["window"]


def _folder(out_dir: Path, run: _Run) -> Path:
    place = run.place.rpartition("delay ")[2].rpartition("=")[2]
    return out_dir / f"{place}-{run.label}-{run.seed}"


def _of_place(place: str, every: Mapping[_Run, Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label in VARIANTS:
        seeds = [figures for run, figures in every.items() if (run.place, run.label) == (place, label)]
        found[label] = {
            "return": mean_and_interval([figures["return_mean"] for figures in seeds]),
            "success": mean_and_interval([figures["success"] or 0.0 for figures in seeds]),
            "num_parameters": seeds[0]["num_parameters"],
        }
    return found


def format_table(summary: Mapping[str, Any]) -> str:
    """The figures as text: a block for each delay."""
    lines = []
    for place, rows in summary["figures"].items():
        header = [place, "return an episode [95%]", "successes [95%]", "parameters"]
        body = [
            [label, shown(row["return"], 2), shown(row["success"], 3), f"{row['num_parameters'] / 1e6:.2f} M"]
            for label, row in rows.items()
        ]
        lines += [*table(header, body), ""]
    return "\n".join([*lines, f"{summary['seeds']} seeds of {summary['steps_seen'] / 1e6:.2f} M steps"])
