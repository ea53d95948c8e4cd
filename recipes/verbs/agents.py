"""`evaluate` and `compare` for runs of agents: they play the same episodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.reinforcement.curves import read_returns, save_returns
from recipes.reinforcement.evaluation import EPISODES, compared, describe, open_agent, play
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json


@dataclass(frozen=True)
class Playing:
    """What an agent plays when it is evaluated."""

    episodes: int = EPISODES
    delays: Sequence[int] = ()  # of object matching: corridors' lengths in steps, each with as many episodes
    env: str | None = None  # of Gymnasium: the one that they were trained in, if it has a module or options
    envs: Sequence[str] = ()  # other Gymnasium environments, in each of which as many episodes are played
    memory: int | None = None  # memory slots; None: as in training
    compressed: int | None = None  # compressed slots; None: as in training


def evaluate(
    run_dir: Path | str,
    playing: Playing | None = None,
    *,
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Let an agent play; print a table, return (and write) the figures, draw its return in training.

    Raises UserError as `open_agent` does.
    """
    check_files(json_file=json_file, plot_file=plot_file)
    (entry,) = _play([run_dir], playing or Playing(), plot_file=plot_file, device=device)
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
    """Let each agent play the same episodes, as `evaluate` does one. Raises UserError for different environments."""
    check_files(json_file=json_file, plot_file=plot_file)
    entries = _play(run_dirs, playing or Playing(), plot_file=plot_file, device=device)
    write_json(json_file, entries)
    return entries


def _play(
    run_dirs: Sequence[Path | str], playing: Playing, *, plot_file: Path | None, device: str | None
) -> list[dict[str, Any]]:
    sizes = {"memory": playing.memory, "compressed": playing.compressed}
    fields = {name: size for name, size in sizes.items() if size is not None}
    agents = [open_agent(run, env=playing.env, device=device, **fields) for run in run_dirs]
    for agent in agents:
        if agent.task != agents[0].task:
            raise UserError(
                f"{agents[0].folder} and {agent.folder} were trained in different environments and cannot be compared"
            )
    played = [play(agent, episodes=playing.episodes, delays=playing.delays, envs=playing.envs) for agent in agents]
    entries = compared(played)
    print(describe(entries))
    if plot_file is not None:
        save_returns(plot_file, {agent.folder.name: [read_returns(agent.folder)] for agent in agents})
    return entries
