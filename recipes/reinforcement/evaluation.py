"""`evaluate` and `compare` for runs of agents: those with the same seed play the same episodes, none from training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from recipes.plots import read_returns, save_returns
from recipes.reinforcement import GYMNASIUM, OBJECT_MATCHING
from recipes.reinforcement.actors import Actors
from recipes.reinforcement.agent import Agent
from recipes.reinforcement.learner import LearnerConfig
from recipes.reinforcement.object_matching import ObjectMatchingConfig
from recipes.reinforcement.settings import check_agent, make_environments
from waveform.domain import SCHEMA
from waveform.engine.checkpoint import Checkpoint
from waveform.engine.state_ram import require_ram_for_state
from waveform.ranks.distributed import choose_device
from waveform.runs.configured_model import num_parameters
from waveform.runs.folder import Saved, read_config
from waveform.runs.named import find_run
from waveform.runs.opened import load_model, use_saved
from waveform.runs.scoring import display_names, trained_on
from waveform.runs.settings import typed
from waveform.runs.statistics import students_t, with_intervals
from waveform.system.console import as_table, counted, table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.rules import check_rules, whole_number

_OF_ENVIRONMENT = ("recipe", "env", "env_options", "env_actions", "task")  # settings that identify it
_ROWS = 64  # side by side
# Mean returns of people and of random actions in that level (Espeholt et al. 2018, scalable_agent's dmlab30.py).
_HUMAN, _RANDOM = 65.9, 0.312
_FIRST_ROW = 1 << 40  # beyond all rows of training, so that the episodes are different


@dataclass(frozen=True)
class Playing:
    """What an agent plays when it is evaluated. Raises UserError for a number of episodes out of range."""

    episodes: Annotated[int, whole_number(1)] = 256
    delays: Sequence[int] = ()  # for object matching: corridors of so many steps; as many episodes in each
    env: str | None = None  # for Gymnasium: the environment that they were trained in, if it has a module or options
    envs: Sequence[str] = ()  # other Gymnasium environments; as many episodes in each
    memory: int | None = None  # memory slots; None: as in training
    compressed: int | None = None  # compressed slots; None: as in training

    def __post_init__(self) -> None:
        check_rules(self)


@dataclass
class TrainedAgent:
    """An agent with the weights of a run's newest checkpoint."""

    folder: Path
    config: dict[str, Any]
    agent: Agent
    checkpoint: Checkpoint

    def at_delay(self, delay: int) -> "TrainedAgent":
        """The same agent, in corridors of `delay` steps. Raises UserError if its task is not object matching."""
        if self.config["recipe"] != OBJECT_MATCHING:
            raise UserError(f"{self.folder} was not trained on object matching; leave out --delays")
        task = {**self.config["task"], "delay": delay, "shortest_delay": None}
        typed(ObjectMatchingConfig, task, section="task")  # refuses a delay before the agent plays
        return replace(self, config={**self.config, "task": task})

    def in_env(self, env: str) -> "TrainedAgent":
        """The same agent in another Gymnasium environment. Raises UserError unless it can see and act there."""
        if self.config["recipe"] != GYMNASIUM:
            raise UserError(f"{self.folder} was not trained in a Gymnasium environment; leave out --envs")
        return replace(self, config=in_env(self.config, env))

    def actors(self, num_rows: int, *, first_row: int = _FIRST_ROW) -> Actors:
        """Actors in rows whose episodes training does not have. Raises UserError if RAM does not hold their states."""
        require_ram_for_state(self.agent.trunk, 2 * num_rows)  # now, and at the start of the unroll
        rows = first_row + np.arange(num_rows)
        return Actors(
            make_environments(self.config, rows=rows),
            self.agent,
            unroll=1,
            clipping=typed(LearnerConfig, self.config["learner"], section="learner").reward_clipping,
            seed=self.config["seed"],
            rows=rows,
        )


def in_env(config: dict[str, Any], env: str) -> dict[str, Any]:
    """`config` with another Gymnasium environment. Raises UserError unless its agent can see and act there."""
    moved = {**config, "env": env}
    own, other = (make_environments(each, rows=np.arange(1)) for each in (config, moved))
    if (own.observation, own.num_actions) != (other.observation, other.num_actions):
        raise UserError(f"env={env} shows other observations, or takes other actions, than env={config['env']}")
    return moved


def open_agent(
    run_dir: Path | str, *, env: str | None = None, device: str | None = None, **model_fields: int | None
) -> TrainedAgent:
    """Open the newest checkpoint of an agent's run; other arguments, and errors, as for `open_run`.

    env: the environment, which must be named if it is imported from a module or has options. Also raises UserError if
    the run is not an agent's.
    """
    if read_config(find_run(run_dir))["dataset"]["modality"].get("kind") != "environment":
        raise UserError(f"{run_dir} is not a run of an agent; train one with `python -m recipes train object_matching`")

    def load(saved: Saved) -> tuple[Saved, Agent]:
        check_agent(run_dir, saved.config, env=env)
        environments = make_environments(saved.config, rows=np.arange(1))
        make = partial(Agent, saved.config["model"], environments.observation, num_actions=environments.num_actions)
        return saved, load_model(saved, make, lambda agent: agent.trunk, **model_fields)

    saved, agent = use_saved(run_dir, load, **model_fields)
    agent.eval().requires_grad_(False)
    return TrainedAgent(Path(run_dir), saved.config, agent.to(choose_device(device)), saved.checkpoint)


def evaluate(
    run_dir: Path | str,
    playing: Playing | None = None,
    *,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Let one agent play, as in `compare`; return (and write) its figures."""
    check_files(json_file=json_file, plot_file=plot_file)
    (entry,) = compare([run_dir], playing, plot_file=plot_file, device=device)
    write_json(json_file, entry)
    return entry


def compare(
    run_dirs: Sequence[Path | str],
    playing: Playing | None = None,
    *,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
) -> list[dict[str, Any]]:
    """Let each agent play; print a table, return (and write) the figures, draw returns in training.

    Each has its difference in return to the first one, and the 95% interval of that. Raises UserError as `open_agent`
    does, and for different environments.
    """
    check_files(json_file=json_file, plot_file=plot_file)
    playing = playing or Playing()
    how: dict[str, Any] = {"env": playing.env, "memory": playing.memory, "compressed": playing.compressed}
    agents = [open_agent(run, device=device, **how) for run in run_dirs]
    for agent in agents:
        if any(agent.config.get(name) != agents[0].config.get(name) for name in _OF_ENVIRONMENT):
            raise UserError(
                f"{agents[0].folder} and {agent.folder} were trained in different environments and cannot be compared"
            )
    entries = [play(agent, playing) for agent in agents]
    first = entries[0]
    for entry in entries:
        errors = [entry["return_standard_error"], first["return_standard_error"]]
        difference = entry["return_mean"] - first["return_mean"]
        num = entry["episodes"] + first["episodes"] - 1  # two means are known, so two degrees of freedom are gone
        half = None if entry is first or None in errors else students_t(num) * math.hypot(*errors)
        entry["baseline"], entry["difference_return"] = first["run"], difference
        entry["interval_95"] = None if half is None else [difference - half, difference + half]
    print(describe(entries))
    if plot_file is not None:
        names = display_names(entries)
        curves = {name: [read_returns(agent.folder)] for name, agent in zip(names, agents, strict=True)}
        save_returns(plot_file, curves)
    write_json(json_file, entries)
    return entries


def play(trained: TrainedAgent, playing: Playing) -> dict[str, Any]:
    """Play episodes to their ends, drawing actions from the policy; return the figures that `evaluate` reports.

    The first episodes of each row count, the same number in each, so that short ones are not preferred.
    """
    at_delays = [({"delay": delay}, trained.at_delay(delay)) for delay in dict.fromkeys(playing.delays)]
    in_envs = [({"env": env}, trained.in_env(env)) for env in dict.fromkeys(playing.envs)]
    # Each row may need a process, of which there should be no more than in training.
    config, episodes = trained.config, playing.episodes
    most = min(_ROWS, config["train"]["batch_size"]) if config.get("env_processes") else _ROWS
    each = -(-episodes // most)
    num_rows = -(-episodes // each)
    actors = trained.actors(num_rows)
    returns: list[list[float]] = [[] for _ in range(num_rows)]
    successes = chances = 0
    with torch.inference_mode():
        while min(map(len, returns)) < each:
            counts = np.array([len(row) < each for row in returns])
            outcome, ended = actors.step()
            for row, value in ended.items():
                returns[row].append(value)
            successes, chances = successes + outcome.successes[counts].sum(), chances + outcome.chances[counts].sum()
    counted = np.array([value for row in returns for value in row[:each]])

    def elsewhere(agent: TrainedAgent) -> dict[str, Any]:
        figures = play(agent, Playing(episodes))
        return {name: figures[name] for name in ("return_mean", "success", "chances")}

    return {
        "schema": SCHEMA,
        "kind": "environment",
        "unit": "step",
        "run": str(trained.folder),
        "recipe": config["recipe"],
        "environment": config.get("env") or config["recipe"],
        "task": config.get("task"),
        "model": config["model"]["name"],
        "num_parameters": num_parameters(trained.agent),
        "step": trained.checkpoint.step,
        "rows": None,
        "train_tokens_seen": trained.checkpoint.progress.tokens_seen,
        "train_seconds": trained.checkpoint.progress.seconds,
        "model_config": dict(config["model"]),
        "episodes": len(counted),
        "return_mean": float(counted.mean()),
        "return_standard_error": float(counted.std(ddof=1) / math.sqrt(len(counted))) if len(counted) > 1 else None,
        **_human_normalised(config, float(counted.mean())),
        "success": float(successes / chances) if chances else None,
        "chances": int(chances),
        "by_delay": [place | elsewhere(agent) for place, agent in at_delays],
        "by_env": [place | elsewhere(agent) for place, agent in in_envs],
    }


def _human_normalised(config: dict[str, Any], mean_return: float) -> dict[str, float]:
    """The score of Rae et al. 2019, Figure 5, on their level of DMLab (the default): 0: random actions, 1: people."""
    if config.get("env") != "DMLab-v0" or "level" in (config.get("env_options") or {}):
        return {}
    return {"human_normalised": (mean_return - _RANDOM) / (_HUMAN - _RANDOM)}


def describe(entries: Sequence[dict[str, Any]]) -> str:
    """Figures of one or several runs as a table."""
    rows, names = [], display_names(entries)
    for name, entry in zip(names, entries, strict=True):
        error = entry["return_standard_error"]
        against = with_intervals(entry["difference_return"], entry["interval_95"], decimals=2, sign="+")
        row = {
            "run": name,
            "return per episode": f"{entry['return_mean']:.2f}" + (f" ± {error:.2f}" if error is not None else ""),
            "to the first [95% interval]": "-" if entry is entries[0] else against,
            "successes": _successes(entry),
            "parameters": f"{entry['num_parameters'] / 1e6:.2f} M",
            "trained on": trained_on(entry),
        }
        if len(entries) == 1:
            del row["to the first [95% interval]"]
        if "human_normalised" in entry:
            row["human-normalised"] = f"{entry['human_normalised']:.1%}"
        rows.append(row)
    first = entries[0]
    lines = [as_table(rows, f"{first['environment']}: {counted(first['episodes'], 'episode')} each")]
    for by, at in (("delay", "at a delay of"), ("env", "in")):
        if first[f"by_{by}"]:
            places = zip(*(entry[f"by_{by}"] for entry in entries), strict=True)
            cells = [[str(figures[0][by]), *map(_successes, figures)] for figures in places]
            lines += ["", *table([f"successes {at}", *names], cells)]
    return "\n".join(lines)


def _successes(figures: dict[str, Any]) -> str:
    return f"{figures['success']:.1%} of {figures['chances']:,}" if figures["chances"] else "-"
