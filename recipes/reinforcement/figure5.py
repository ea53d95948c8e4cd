"""`python -m recipes study figure5 OUT_DIR`: Figure 5 of Rae et al. 2019, at a preset's size.

Object matching, or a Gymnasium environment, by agents with the Compressive Transformer at four rates, Transformer-XL
and an LSTM. In object matching, corridors take from no step to as many as Transformer-XL reaches back, so that what was
seen before the longest is beyond its reach, and trained agents are evaluated by delay; those of Gymnasium, in further
environments. Models have a single layer, because deeper ones relay what they saw; two rows show how far that carries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.plots import read_returns, save_returns
from recipes.reinforcement import AGENTS_STUDY, GYMNASIUM, OBJECT_MATCHING
from recipes.reinforcement.evaluation import in_env
from recipes.reinforcement.settings import compose_config, environment_text
from recipes.studies.catalogue import Study
from recipes.studies.children import StudyConfig
from recipes.studies.report import TEST, Config, Figures, Report, Runs, slots
from waveform.runs.settings import setting_of
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import as_table, counted
from waveform.system.errors import UserError

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
_WAYS = 8  # corridors of the longest delay that fit into an episode
_EIGHTHS = (1, 2, 4, 6, 8)  # of the longest delay: those at which trained agents are evaluated


def study_of_agents(overrides: Sequence[str], config: StudyConfig) -> Study:
    """The study of agents, whose variants contain all settings; with env=NAME in `overrides`, that of Gymnasium.

    Sizes of window and memories are the Compressive Transformer's; Transformer-XL has as many slots. Raises UserError
    for unknown agents and unsuitable environments, and settings that are refused.
    """
    if unknown := set(config.agents) - set(VARIANTS):
        raise UserError(f"there is no agent {min(unknown)!r} in {AGENTS_STUDY}; choose from {', '.join(VARIANTS)}")
    recipe = GYMNASIUM if any(override.startswith("env=") for override in overrides) else OBJECT_MATCHING
    if recipe == OBJECT_MATCHING and config.envs:
        raise UserError("--envs is for Gymnasium; name an environment to train in too, env=NAME, or leave it out")
    config_of_rate_4 = compose_config(recipe, (*overrides, *VARIANTS["rate_4"]))
    by, places = "env", list(config.envs)
    for env in config.envs:
        in_env(config_of_rate_4, env)
    task: Sequence[str] = ()
    if recipe == OBJECT_MATCHING:
        longest, task = _ways(config_of_rate_4, overrides)
        by, places = "delay", [str(n) for n in sorted({longest * eighths // 8 for eighths in _EIGHTHS})]
    by_agent = _by_agent(config_of_rate_4, overrides)
    return Study(
        variants={k: (*task, *by_agent[k]) for k in VARIANTS if k in config.agents or not config.agents},
        report=ByPlace(by, places),
        title=_TITLE.format(config_of_rate_4["env"] if recipe == GYMNASIUM else "object matching"),
        recipe=recipe,
        seeds=_SEEDS,
        heeds=_MEMORIES,
    )


def _by_agent(rate_4: Config, overrides: Sequence[str]) -> dict[str, Sequence[str]]:
    """Settings of each agent: `overrides`, with sizes of memories as they apply to its model, and its own settings."""
    sized = [override for override in overrides if setting_of(override) in _MEMORIES]
    others = [override for override in overrides if override not in sized]
    as_many = slots(rate_4, "memory") + slots(rate_4, "compressed")
    txl = [f"model.window={rate_4['model']['window']}", f"model.memory={as_many}"]
    sizes = {_CT: sized, "model=transformer_xl": txl, "model=lstm": []}
    return {label: (*others, *sizes[chosen[0]], *chosen) for label, chosen in VARIANTS.items()}


def _ways(rate_4: Config, overrides: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """The longest delay, and settings of object matching: corridors as long as Transformer-XL's reach, or as given.

    Raises UserError for sizes with which rate 4 does not reach that far either.
    """
    if any(override.startswith("task.delay=") for override in overrides):
        return rate_4["task"]["delay"], ("task.shortest_delay=0",)
    memory, compressed, window = (slots(rate_4, field) for field in ("memory", "compressed", "window"))
    # From the end of a window; its start sees a whole window less.
    beyond, of_rate_4 = memory + compressed + window, memory + 4 * compressed
    if beyond > of_rate_4:
        raise UserError(
            f"figure5 needs a delay that Transformer-XL ({beyond} steps at most) does not reach and rate 4 "
            f"({of_rate_4} at least) does; raise model.compressed, lower model.window, or give task.delay"
        )
    return beyond, (f"task.delay={beyond}", "task.shortest_delay=0", f"task.episode={_WAYS * beyond}")


@dataclass(frozen=True)
class ByPlace(Report):
    """The returns of agents, and how often they choose right, in all and by delay or environment."""

    by: str  # delay | env
    places: Sequence[str]

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        named = ["--env", environment_text(config)] if self.by == "env" else []
        elsewhere = [f"--{self.by}s", *self.places] if self.places else []
        return {TEST: ["evaluate", *named, *elsewhere]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        return {**scores[TEST], "curve": read_returns(run_dir)}

    def summarise(self, runs: Runs) -> dict[str, Any]:
        summary = {}
        for label, seeds in runs.items():
            places = zip(*(figures[f"by_{self.by}"] for figures in seeds), strict=True)
            summary[label] = {
                "return": mean_and_interval([figures["return_mean"] for figures in seeds]),
                "success": _success(seeds),
                f"by_{self.by}": {str(figures[0][self.by]): _success(figures) for figures in places},
                "num_parameters": seeds[0]["num_parameters"],
                "train_tokens_seen": max(figures["train_tokens_seen"] for figures in seeds),
            }
        return summary

    def beside(self, runs: Runs) -> dict[str, Any]:
        steps_seen = max(run["train_tokens_seen"] for seeds in runs.values() for run in seeds)
        return {"published": _PUBLISHED, "by": self.by, "steps_seen": steps_seen}

    def table(self, summary: Figures) -> str:
        rows = []
        for label, row in summary.items():
            places = {f"delay {p}" if self.by == "delay" else p: s for p, s in row[f"by_{self.by}"].items()}
            shares = {"successes [95%]": row["success"], **places}
            rows.append(
                {
                    "agent": label,
                    "return per episode [95%]": shown(row["return"], 2),
                    **{name: "-" if share is None else shown(share, 3) for name, share in shares.items()},
                    "parameters": f"{row['num_parameters'] / 1e6:.2f} M",
                }
            )
        seeds = counted(len(next(iter(summary.values()))["return"]["seeds"]), "seed")
        steps = max(row["train_tokens_seen"] for row in summary.values())
        return f"{_PUBLISHED}\n{as_table(rows, f'{seeds} of {steps / 1e6:.2f} M steps')}"

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        curves = {label: [run["curve"] for run in seeds] for label, seeds in runs.items()}
        by_place = {
            label: {place: s["seeds"] for place, s in row[f"by_{self.by}"].items() if s is not None}
            for label, row in summary.items()
        }
        save_returns(path, curves, by_place if self.places else None)


def _success(seeds: Sequence[Figures]) -> dict[str, Any] | None:
    """None if an agent never came to a choice, or the environment has no choices."""
    shares = [figures["success"] for figures in seeds]
    return None if None in shares else mean_and_interval(shares)
