"""What `evaluate` and `compare` do for runs of agents."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waveform.runs.scoring import EvaluateOptions
from waveform.system.errors import UserError
from waveform.system.output import write_json


@dataclass(frozen=True)
class Playing:
    """What an agent plays when it is evaluated."""

    episodes: int | None = None  # None: the default
    delays: Sequence[int] = ()  # of object matching: as many episodes besides, whose ways all take so many steps
    env: str | None = None  # of Gymnasium: the one that they were trained in, if it has a module or options
    envs: Sequence[str] = ()  # other Gymnasium environments, in each of which as many episodes are played besides

    def refuse(self) -> None:
        """Raises UserError if anything is set, for a run on text."""
        for option, chosen in vars(self).items():
            if chosen not in (None, ()):
                raise UserError(f"--{option} is for runs of agents; leave it out for a run on text")


@dataclass(frozen=True)
class AgentEvaluation:
    """How agents are evaluated: what of the options of texts applies to them, and what is theirs."""

    options: EvaluateOptions
    playing: Playing
    split: str = "test"
    plot_file: Path | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        known = EvaluateOptions(memory=self.options.memory, compressed=self.options.compressed)
        if self.options != known or self.split != "test":
            raise UserError(
                "agents have no text to score: of these options they know --memory, --compressed, --episodes, "
                "--delays, --env, --envs, --json, --plot and --device"
            )


def evaluate_agents(
    run_dirs: Sequence[Path | str],
    chosen: AgentEvaluation,
    *,
    json_file: Path | str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Let each agent play the same episodes; print a table, return (and write) the figures, draw learning curves.

    Raises UserError for a run on text among them, and for different environments.
    """
    from recipes.reinforcement.curves import read_returns, save_returns  # here: texts do without it
    from recipes.reinforcement.evaluation import EPISODES, compared, describe, open_agent, play

    playing, fields = chosen.playing, chosen.options.model_fields
    agents = [open_agent(run, env=playing.env, device=chosen.device, **fields) for run in run_dirs]
    for agent in agents:
        if agent.task != agents[0].task:
            raise UserError(
                f"{agents[0].folder} and {agent.folder} were trained in different environments and cannot be compared"
            )
    episodes = EPISODES if playing.episodes is None else playing.episodes
    entries = compared([play(agent, episodes=episodes, delays=playing.delays, envs=playing.envs) for agent in agents])
    if show_progress:
        print(describe(entries))
    write_json(json_file, entries if len(entries) > 1 else entries[0])
    if chosen.plot_file is not None:
        curves = {agent.folder.name: [read_returns(agent.folder)] for agent in agents}
        save_returns(chosen.plot_file, curves)
    return entries
