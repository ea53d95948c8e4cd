"""Trains an agent: actors collect unrolls, the learner makes one update of them, and so on until the budget is used up.

It is to agents what engine/trainer.py is to streams of tokens, and shares the rest with it: checkpoints, the log,
signals and progress. Each process has its share of the environments; losses are divided by the steps of all of them,
and gradients are summed, so the update does not depend on how rows are dealt. Whatever actors keep has rows first and
is part of the checkpoint, so a resumed run continues bit for bit on a CPU.
"""

import math
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.reinforcement.actors import Actors, Played, Unrolls
from recipes.reinforcement.agent import Agent
from recipes.reinforcement.encoders import GridEncoder
from recipes.reinforcement.environment import Environments
from recipes.reinforcement.learner import LearnerConfig, losses
from waveform.engine import checkpoint
from waveform.engine.clipping import clip
from waveform.engine.interface import map_state
from waveform.engine.metrics import MetricsLog
from waveform.engine.nonfinite import Diverged
from waveform.engine.resume_notes import conditions, notes
from waveform.engine.scored_window import threads_for
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import RunContext, TrainResult
from waveform.ranks.distributed import explain_lost_ranks
from waveform.system.folder_identity import FolderIdentity
from waveform.system.progress import Progress
from waveform.system.signals import signals_ask


@dataclass
class Tally:
    """What was played since the last record of the log; sums over this process's rows."""

    returns: float = 0.0
    episodes: float = 0.0
    successes: float = 0.0
    chances: float = 0.0

    def add(self, played: Played) -> None:
        """Count what was played."""
        self.returns += sum(value for _, value in played.returns)
        self.episodes += len(played.returns)
        self.successes += float(played.successes.sum())
        self.chances += float(played.chances.sum())

    def tensor(self) -> Tensor:
        """The four sums, fp64."""
        return torch.tensor([self.returns, self.episodes, self.successes, self.chances], dtype=torch.float64)


class AgentTrainer:
    """Trains one agent in one kind of environment; resumes from the newest checkpoint of the run folder, if any.

    Raises Diverged at a step whose loss or gradient is not finite, before anything of it is kept.
    """

    def __init__(
        self,
        agent: Agent,
        environments: Environments,
        config: TrainConfig,
        learner: LearnerConfig,
        *,
        seed: int,
        context: RunContext,
    ) -> None:
        """environments: this process's share of the train.batch_size rows."""
        self.agent, self.config, self.learner = agent, config, learner
        self.world = world = context.world
        self._context = context
        agent.to(world.device)
        world.broadcast_([*agent.parameters(), *agent.buffers()])
        self.actors = Actors(
            environments,
            agent,
            unroll=config.chunk,
            clipping=learner.reward_clipping,
            seed=seed,
            rows=own_rows(config.batch_size, rank=world.rank, num_ranks=world.size),
        )
        compressor = agent.parts.compressor_parameters()
        apart = {id(parameter) for parameter in compressor}
        trunk = [parameter for parameter in agent.parameters() if id(parameter) not in apart]
        self.groups = {"trunk": trunk, **({"compressor": compressor} if compressor else {})}
        self.optimiser = torch.optim.Adam([*trunk, *compressor], lr=config.lr, betas=(0.9, config.beta2), fused=True)
        self.step, self.seconds, self.steps_seen = 0, 0.0, 0
        self.tally = Tally()
        self.resumed_from: checkpoint.Checkpoint | None = None
        self._saved_step: int | None = None
        self._folder: FolderIdentity | None = None
        self._resume()

    def _resume(self) -> None:
        found = checkpoint.newest(self._context.run_dir)
        if self.world.is_first:
            checkpoint.tidy(self._context.run_dir, found=found, keep=self.config.keep_checkpoints)
        if found is None:
            return
        state = checkpoint.restore(
            found, model=self.agent, optimiser=self.optimiser, fresh=self.actors.state, world=self.world
        )
        self.actors.restore(state)
        self.resumed_from, progress = found, found.progress
        self.step = self._saved_step = found.step
        self.seconds, self.steps_seen = progress.seconds, progress.tokens_seen
        if self.world.is_first:
            self.tally = Tally(*progress.since_log)
            if self._context.show_progress:
                for note in notes(found, conditions(self.agent.trunk, self.config, self.world)):
                    print(f"note: {note}", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one."""
        if self._saved_step == self.step:
            return
        self._require_run_folder()
        returns, episodes, successes, chances = self.world.sum_(self.tally.tensor().to(self.world.device)).tolist()
        checkpoint.save(
            self._context.run_dir,
            model=self.agent,
            optimiser=self.optimiser,
            state=map_state(torch.clone, self.actors.state),  # the two states of an agent may share memory
            progress=checkpoint.TrainingProgress(
                step=self.step,
                num_ranks=self.world.size,
                seconds=self.seconds,
                tokens_seen=self.steps_seen,
                cursor={},
                since_log=(returns, episodes, successes, chances),
                run=self._context.record,
            ),
            conditions=conditions(self.agent.trunk, self.config, self.world),
            world=self.world,
            keep=self.config.keep_checkpoints,
        )
        self._saved_step = self.step

    def _require_run_folder(self) -> None:
        if self._folder is not None:
            self._folder.require_same(step=self.step)

    @property
    def finished(self) -> bool:
        """Whether the budget of steps or seconds is used up (on this rank's clock)."""
        return self.config.share(self.step, self.seconds) >= 1

    def run(self) -> TrainResult:
        """Train until the budget is used up or a signal asks to stop; either way the last state is saved.

        Raises Diverged for a loss that is not finite, RankLost if another process of the job ended or hangs.
        """
        config, world = self.config, self.world
        if world.device.type == "cpu":
            self.agent.parts.prepare_kernels()
        self._folder = FolderIdentity(self._context.run_dir) if world.is_first else None
        shows = self._context.show_progress and world.is_first
        total, unit = config.budget
        by_steps = unit == "step"
        done = self.step if by_steps else self.seconds
        log = MetricsLog(self._context.run_dir, resume_step=self.step) if world.is_first else None
        with (
            explain_lost_ranks(world, timeout_s=config.timeout_s, where=lambda: f"step {self.step}"),
            nullcontext() if log is None else closing(log),
            signals_ask() as stop,
            Progress("train", total=total, unit=unit, initial=done, enabled=shows) as progress,
        ):
            if self.step:
                progress.write(f"resumed at step {self.step}")
            logged = (self.seconds, self.steps_seen)
            while True:
                # Ranks must agree on stopping, and at every step.
                finished, stopped_by = world.largest(int(self.finished), stop.number)
                if finished or stopped_by:
                    break
                before = self.seconds
                figures = self.update()
                note = ""
                if self.step % config.log_every == 0:
                    note = self._record(figures, log, since=logged)
                    logged = (self.seconds, self.steps_seen)
                progress.update(1 if by_steps else self.seconds - before, note=note)
                if self.step % config.checkpoint_every == 0:
                    self.save()
            if stopped_by and self._saved_step != self.step:
                progress.write(f"asked to stop: saving step {self.step}")
            if self.step:
                self.save()
        return TrainResult(self.step, self.seconds, self.steps_seen, stopped_by, stop.number)

    def update(self) -> dict[str, float]:
        """Let the actors act for an unroll's steps, and learn from what ended; returns the figures of this update."""
        began = time.perf_counter()
        with threads_for(self.agent.trunk, device=self.world.device, autocast=None):
            self.agent.eval()
            unrolls, played = self.actors.collect(self.config.chunk)
            self.tally.add(played)
            self.steps_seen += played.steps * self.world.size
            for group in self.optimiser.param_groups:
                group["lr"] = self.config.learning_rate(self.step, self.seconds)
            joined = Unrolls.joined(unrolls)
            figures = self.accumulate_gradients(joined)
            self.world.sum_gradients(self.agent.parameters())
            norms = clip(self.groups, self.config.clip_norm)
            figures |= {f"grad_norm_{name}": float(norm) for name, norm in norms.items()}
            if self.world.any(not all(map(math.isfinite, figures.values()))):
                raise self._diverged(figures)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self._count(joined)
        self.step += 1
        self.seconds += time.perf_counter() - began
        return figures

    def accumulate_gradients(self, unrolls: Unrolls) -> dict[str, float]:
        """Backward of the mean over all ranks' steps; returns this rank's share of the losses."""
        self.agent.train()
        made = losses(self.agent, unrolls, self.learner, unroll_windows=self.config.unroll)
        counts = torch.tensor([int(unrolls.length.sum()), made.num_windows], dtype=torch.float64)
        num_steps, num_windows = self.world.sum_(counts.to(self.world.device)).tolist()
        learner = self.learner
        loss = (made.policy + learner.baseline_cost * made.value - learner.entropy_cost * made.entropy) / num_steps
        compression = made.compression / max(num_windows, 1)
        (loss + self.config.aux_weight * compression).backward()
        shares = {"policy_loss": made.policy, "value_loss": made.value, "entropy": made.entropy}
        figures = {name: float(value.detach()) / num_steps for name, value in shares.items()}
        return figures | {"aux_loss": float(compression.detach())}

    def _count(self, unrolls: Unrolls) -> None:
        """Tell the encoder what all ranks observed; after learning, which then reads as the actors did."""
        encoder = self.agent.encoder.observation
        if isinstance(encoder, GridEncoder):
            took_place_UT = torch.arange(self.config.chunk) < unrolls.length[:, None]
            observed = unrolls.steps.inputs.observation[took_place_UT].to(self.world.device)
            encoder.seen += self.world.sum_(encoder.counts(observed))

    def _diverged(self, figures: dict[str, float]) -> Diverged:
        bad = [name for name, value in figures.items() if not math.isfinite(value)]
        kept = checkpoint.newest(self._context.run_dir)
        return Diverged(
            f"{' and '.join(bad) or 'a figure of another process'} is not finite at step {self.step}; training "
            f"stopped. Last good checkpoint: {f'step {kept.step} in {kept.folder}' if kept else 'none was saved yet'}. "
            "Lower train.lr or train.clip_norm in a new run"
        )

    def _record(self, figures: dict[str, float], log: MetricsLog | None, *, since: tuple[float, int]) -> str:
        """Log the steps since the last record; returns them as a note for the progress line."""
        returns, episodes, successes, chances = self.world.sum_(self.tally.tensor().to(self.world.device)).tolist()
        summed = self.world.sum_(torch.tensor(list(figures.values()), dtype=torch.float64, device=self.world.device))
        self.tally = Tally()
        rate = (self.steps_seen - since[1]) / max(self.seconds - since[0], 1e-9)
        record: dict[str, Any] = {
            "seconds": round(self.seconds, 3),
            "steps_seen": self.steps_seen,
            "steps_per_second": rate,
            "lr": self.optimiser.param_groups[0]["lr"],
            "episodes": int(episodes),
            **dict(zip(figures, summed.tolist(), strict=True)),
        }
        # A norm is the same on every rank.
        record |= {name: figures[name] for name in figures if name.startswith("grad_norm")}
        if episodes:
            record["return_mean"] = returns / episodes
        if chances:
            record["success"] = successes / chances
        if log is not None:
            self._require_run_folder()
            log.write("train", step=self.step, **record)
        shown = f"return {returns / episodes:.2f}, " if episodes else ""
        shown += f"{successes / chances:.1%} right, " if chances else ""
        return f"{shown}{rate:,.0f} steps/s"


def own_rows(num_rows: int, *, rank: int, num_ranks: int) -> np.ndarray:
    """The indices of a process's rows among all."""
    each = num_rows // num_ranks
    return np.arange(rank * each, (rank + 1) * each)
