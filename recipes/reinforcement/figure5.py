"""`python -m recipes study figure5 OUT_DIR`: Figure 5 of Rae et al. 2019, at a preset's size.

Object matching, or a Gymnasium environment, by agents with the Compressive Transformer at four rates, Transformer-XL
and an LSTM. In object matching, ways take from no step to as many as Transformer-XL reaches back, so that what was seen
before the longest lies beyond its reach, and trained agents are evaluated by delay; those of Gymnasium in further
environments. Models have a single layer, because deeper ones relay what they saw; two rows show how far that carries.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.reinforcement.curves import read_returns, save_returns
from recipes.reinforcement.evaluation import in_env
from recipes.reinforcement.recipes import AGENTS_STUDY as NAME
from recipes.reinforcement.recipes import GYMNASIUM, OBJECT_MATCHING
from recipes.reinforcement.settings import compose_config, environment_text
from recipes.studies.children import Children, StudyConfig
from waveform.engine import checkpoint
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import say, table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json

_SEEDS = 3  # the paper's
_TITLE = "Rae et al. 2019, Figure 5: {} by compression rate"
_PUBLISHED = "the paper, after 1e9 frames of DMLab's level: rate 4 is best, and rate 1 does not learn it as well"
_CT = "model=compressive_transformer"
VARIANTS: Mapping[str, Sequence[str]] = {
    **{f"rate_{rate}": (_CT, f"model.compression_rate={rate}") for rate in (1, 2, 4, 8)},
    "transformer_xl": ("model=transformer_xl",),
    "lstm": ("model=lstm",),
    "rate_4_two_layers": (_CT, "model.compression_rate=4", "model.num_layers=2"),
    "transformer_xl_two_layers": ("model=transformer_xl", "model.num_layers=2"),
}
_MEMORIES = ("model.window", "model.memory", "model.compressed")
_WAYS = 8  # of the longest delay, for which an episode has room
_EIGHTHS = (1, 2, 4, 6, 8)  # of the longest delay: where trained agents are evaluated


def figure5(
    out_dir: Path,
    overrides: Sequence[str] = (),
    *,
    config: StudyConfig | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train and evaluate every agent with several seeds, a process each; interrupted, it continues.

    overrides: settings of every run; with env=NAME the environment is Gymnasium's. Sizes of window and memories are the
    Compressive Transformer's; Transformer-XL has as many slots. Prints a table, returns the figures, writes and draws
    them. Raises UserError for settings that a run refuses, and if a run fails.
    """
    config = config or StudyConfig()
    if unknown := set(config.agents) - set(VARIANTS):
        raise UserError(f"there is no agent {min(unknown)!r} in {NAME}; choose from {', '.join(VARIANTS)}")
    labels = [label for label in VARIANTS if label in config.agents or not config.agents]
    json_file, plot_file = json_file or out_dir / f"{NAME}.json", plot_file or out_dir / f"{NAME}.png"
    check_files(json_file=json_file, plot_file=plot_file)
    recipe = GYMNASIUM if any(override.startswith("env=") for override in overrides) else OBJECT_MATCHING
    if recipe == OBJECT_MATCHING and config.envs:
        raise UserError("--envs is for Gymnasium; name an environment to train in too, env=NAME, or leave it out")
    by_agent = _by_agent(recipe, overrides)
    task = () if recipe == GYMNASIUM else _task(overrides, by_agent)
    settings = {label: (*task, *by_agent[label]) for label in labels}
    for given in settings.values():
        composed = compose_config(recipe, given)  # refuses bad settings before anything is trained
    by, places = "env", list(config.envs)
    if task:
        longest = composed["task"]["delay"]
        by, places = "delay", [str(n) for n in sorted({longest * eighths // 8 for eighths in _EIGHTHS})]
    for env in config.envs:
        in_env(composed, env)  # likewise
    children = Children(config.jobs)
    where = ["--device", device] if (device := composed["train"]["device"]) else []

    def finish(run: tuple[str, int]) -> dict[str, Any]:
        label, seed = run
        folder = out_dir / f"{label}-{seed}"
        children.call("train", recipe, str(folder), *settings[label], f"seed={seed}")
        found, path = checkpoint.newest(folder), folder / "evaluation.json"
        assert found is not None
        figures: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        played = [str(at[by]) for at in figures.get(f"by_{by}", [{by: None}])]
        if figures.get("step") != found.step or played != places:
            named = ["--env", environment_text(composed)] if recipe == GYMNASIUM else []
            elsewhere = [f"--{by}s", *places] if places else []
            children.call("evaluate", str(folder), *named, *elsewhere, "--json", str(path), *where)
            figures = json.loads(path.read_bytes())
        if show_progress:
            say(f"{folder}: trained and evaluated")
        return {**figures, "curve": read_returns(folder)}

    seeds = range(config.seeds or _SEEDS)
    every = children.finish_all([(label, seed) for seed in seeds for label in labels], finish)
    by_label = {label: [every[label, seed] for seed in seeds] for label in labels}
    figures = {label: _over_seeds(runs, by=by) for label, runs in by_label.items()}
    summary = {
        "study": NAME,
        "title": _TITLE.format(composed["env"] if recipe == GYMNASIUM else "object matching"),
        "published": _PUBLISHED,
        "recipe": recipe,
        "overrides": [*task, *overrides],
        "by": by,
        "seeds": len(seeds),
        "threads_per_run": children.threads,
        "steps_seen": max(run["train_steps_seen"] for run in every.values()),
        "figures": figures,
    }
    if show_progress:
        print(f"{summary['title']}\n{_PUBLISHED}\n{format_table(summary)}")
    write_json(json_file, summary)
    curves = {label: [run["curve"] for run in runs] for label, runs in by_label.items()}
    by_place = {label: _successes(row[f"by_{by}"]) for label, row in figures.items()}
    save_returns(plot_file, curves, by_place if places else None)
    return summary


def _by_agent(recipe: str, overrides: Sequence[str]) -> dict[str, Sequence[str]]:
    """Settings of each agent: `overrides`, with what they say of memories as it applies to its model, and its own."""
    sized = [override for override in overrides if override.partition("=")[0] in _MEMORIES]
    others = [override for override in overrides if override not in sized]
    model = compose_config(recipe, (*overrides, *VARIANTS["rate_4"]))["model"]
    sizes = {
        "compressive_transformer": sized,
        "transformer_xl": [f"model.window={model['window']}", f"model.memory={model['memory'] + model['compressed']}"],
        "lstm": [],
    }
    return {
        label: (*others, *(sizes[chosen[0].removeprefix("model=")] if sized else ()), *chosen)
        for label, chosen in VARIANTS.items()
    }


def _task(overrides: Sequence[str], settings_by_agent: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Settings of object matching, unless `overrides` have a delay: ways that end beyond Transformer-XL's reach.

    Raises UserError for a preset in which rate 4 does not reach that far either.
    """
    if any(override.startswith("task.delay=") for override in overrides):
        return ("task.shortest_delay=0",)
    reach = {label: _reach(settings_by_agent[label]) for label in ("transformer_xl", "rate_4")}
    # A step at the end of a window reaches a whole window further than one at its start.
    beyond = reach["transformer_xl"][1]
    if beyond > reach["rate_4"][0]:
        raise UserError(
            f"figure5 needs a delay that Transformer-XL ({beyond} steps at most) does not reach and rate 4 "
            f"({reach['rate_4'][0]} at least) does; raise model.compressed, lower model.window, or give task.delay"
        )
    return f"task.delay={beyond}", "task.shortest_delay=0", f"task.episode={_WAYS * beyond}"


def _reach(settings: Sequence[str]) -> tuple[int, int]:
    """Steps that a layer sees back from the start and from the end of a window."""
    model = compose_config(OBJECT_MATCHING, settings)["model"]
    back = model["memory"] + model.get("compressed", 0) * model.get("compression_rate", 0)
    return back, back + model["window"]


def _over_seeds(seeds: Sequence[Mapping[str, Any]], *, by: str) -> dict[str, Any]:
    places = zip(*(figures[f"by_{by}"] for figures in seeds), strict=True)
    return {
        "return": mean_and_interval([figures["return_mean"] for figures in seeds]),
        "success": _success(seeds),
        f"by_{by}": {str(figures[0][by]): _success(figures) for figures in places},
        "num_parameters": seeds[0]["num_parameters"],
    }


def _success(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """None if an agent never came to a choice, or the environment has none."""
    shares = [figures["success"] for figures in seeds]
    return None if None in shares else mean_and_interval(shares)


def _successes(by_place: Mapping[str, Any]) -> dict[str, list[float]]:
    return {place: success["seeds"] for place, success in by_place.items() if success is not None}


def format_table(summary: Mapping[str, Any]) -> str:
    """The figures as text: a row for each agent."""
    rows, by = summary["figures"], summary["by"]
    places = list(next(iter(rows.values()))[f"by_{by}"])
    columns = [f"delay {place}" if by == "delay" else place for place in places]
    header = ["agent", "return an episode [95%]", "successes [95%]", *columns, "parameters"]
    body = [
        [
            label,
            shown(row["return"], 2),
            *("-" if s is None else shown(s, 3) for s in (row["success"], *row[f"by_{by}"].values())),
            f"{row['num_parameters'] / 1e6:.2f} M",
        ]
        for label, row in rows.items()
    ]
    return "\n".join([*table(header, body), f"{summary['seeds']} seeds of {summary['steps_seen'] / 1e6:.2f} M steps"])
