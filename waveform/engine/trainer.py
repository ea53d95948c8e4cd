"""The training loop, for every kind of learner: `Trainer.step`. Several trainers may take turns (engine/turns.py).

engine/learner.py makes updates, engine/metrics.py writes the log, engine/checkpoint.py saves and restores.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from waveform.engine import checkpoint
from waveform.engine.evaluator import Evaluation
from waveform.engine.interface import SequenceModel
from waveform.engine.learner import Learner
from waveform.engine.metrics import MetricsLog, bits
from waveform.engine.nonfinite import Diverged
from waveform.engine.resume_notes import conditions, notes, settle_library
from waveform.ranks.distributed import World, explain_lost_ranks
from waveform.system.progress import Progress
from waveform.system.signals import Stopped, StopRequest, signals_ask

# Gets the model, the step, the log, and a request to stop, on which it raises Stopped if it would take seconds.
OnEvaluate = Callable[[SequenceModel, int, MetricsLog, StopRequest], None]
# Scores the validation split; within, the first rank may use the model alone. Raises Stopped if a stop is asked for.
Validate = Callable[[StopRequest], AbstractContextManager[Evaluation]]


@dataclass(frozen=True)
class RunContext:
    """Where a training runs and how it reports; nothing here changes what is learned."""

    run_dir: Path
    world: World = field(default_factory=World)
    record: dict[str, Any] | None = None  # JSON that each checkpoint keeps as `run`
    unit: str = "token"  # what users call a token
    units_per_second: float | None = None  # tokens of one second of audio, to print x real time
    on_evaluate: OnEvaluate | None = None  # called by the first rank after each evaluation


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    seconds: float  # spent on training steps
    tokens_seen: int
    stopped_by: int  # the signal that asked to stop, after which the state was saved; 0: none
    asked_by: int  # the signal that asked to stop this process, in time or after the last step; 0: none


class Trainer:
    """Trains a learner into a run folder; resumes from the folder's newest checkpoint, if any."""

    def __init__(self, learner: Learner, context: RunContext, *, validate: Validate | None = None) -> None:
        self.learner, self.config, self.world = learner, learner.config, learner.world
        self._context, self.shows_progress = context, self.world.shows
        self._validate = validate if self.config.evaluate_tokens != 0 else None
        self._evaluation_due = False  # and not made yet: a stop may come first
        self._looked_s = 0.0  # training time at the last look whether an evaluation is due
        self._log: MetricsLog | None = None  # on the first rank, while training is open
        self._stop, self.progress = StopRequest(), Progress("train", total=None, unit="", enabled=False)
        self.saved_step: int | None = None  # None: nothing was saved yet
        self.saved_s = 0.0  # training time at the last checkpoint
        self.result: TrainResult | None = None  # None: training has not ended
        self.resumed_from = self._resume()
        self._random_numbers = checkpoint.random_state(self.world.device)  # with which training goes on

    def _resume(self) -> checkpoint.Checkpoint | None:
        run_dir, learner, world = self._context.run_dir, self.learner, self.world
        found = checkpoint.newest(run_dir)
        settle_library(learner, found)
        if world.is_first:
            checkpoint.tidy(run_dir, found=found, keep=self.config.keep_checkpoints)
        if found is None:
            return None
        state = checkpoint.restore(
            found, model=learner.module, optimiser=learner.optimiser, fresh=learner.fresh, world=world
        )
        learner.restore(found.progress, state)
        self.saved_step, self.saved_s = learner.step, learner.seconds
        self._evaluation_due, self._looked_s = found.progress.evaluation_due, learner.seconds
        if self.shows_progress:
            for note in notes(found, conditions(learner)):
                print(f"note: {note}", file=sys.stderr)
        return found

    def run(self) -> TrainResult:
        """Train until the budget is used up or a signal asks to stop; either way the last state is saved.

        Raises Diverged for a loss that is not finite, RankLost if another process of the job ended or hangs.
        """
        with signals_ask() as stop, progress_of([self]) as progress, self.opened(stop, progress), self.turn():
            while self.step():
                pass
        assert self.result is not None
        return self.result

    @contextmanager
    def opened(self, stop: StopRequest, progress: Progress) -> Iterator[None]:
        """Within, training may take turns, until `stop` is asked for."""
        self._stop, self.progress, step = stop, progress, self.learner.step
        self.learner.prepare_kernels()
        if self.world.is_first:
            self._log = MetricsLog(self._context.run_dir, resume_step=step, tracker=self.config.log)
        with nullcontext() if self._log is None else closing(self._log.tracker):
            if step:
                progress.write(f"resumed at step {step}")
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, `step` may be called: torch's random numbers are this training's, whatever others drew meanwhile."""
        checkpoint.set_random_state(self._random_numbers, self.world.device)
        try:
            with explain_lost_ranks(self.world, timeout_s=self.config.timeout_s, where=self._where):
                yield
        except Diverged as error:
            kept = checkpoint.newest(self._context.run_dir)
            where = f"step {kept.step} in {kept.folder}" if kept else "none was saved yet"
            raise Diverged(f"{error}. Last good checkpoint: {where}") from None
        self.learner.wait_for_device()  # or this trainer's work would count as time of the next
        self._random_numbers = checkpoint.random_state(self.world.device)

    def _where(self) -> str:
        saved = "nothing was saved yet" if self.saved_step is None else f"step {self.saved_step} is saved"
        return f"step {self.learner.step} ({saved}; the same command continues from there)"

    def step(self) -> bool:
        """Make an update, with what is due right after it, or a due evaluation; returns whether training goes on.

        Ranks agree at every step on what to do, because a scheduler gives them half a minute to stop. A signal comes
        before an evaluation, which then remains due.
        """
        learner, config = self.learner, self.config
        finished, stopped_by, evaluates, microseconds = self.world.largest(
            self.share >= 1, self._stop.number, self._evaluation_due, round(learner.seconds * 1e6)
        )
        learner.seconds = microseconds / 1e6  # the learning rate may follow the clock: one clock, or ranks drift apart
        if finished or stopped_by:
            self._end(stopped_by)
        elif evaluates:
            self._evaluate()
        else:
            done, step = self.done, learner.step
            learner.update()
            looked_s, self._looked_s = self._looked_s, learner.seconds
            by_clock = self.world.is_first and _passed(config.evaluate_every_seconds, looked_s, learner.seconds)
            self._evaluation_due = by_clock or _passed(config.evaluate_every, step, learner.step)
            note = self._record() if _passed(config.log_every, step, learner.step) else ""
            self.progress.update(self.done - done, note=note)
            if _passed(config.checkpoint_every, step, learner.step):  # first: nothing in an evaluation loses steps
                self.save()
        return self.result is None

    @property
    def share(self) -> float:
        """As `TrainConfig.share`, on this rank's clock."""
        return self.config.share(self.learner.step, self.learner.seconds)

    @property
    def done(self) -> float:
        """How much of the budget is used up, in its unit."""
        return self.learner.seconds if self.config.max_steps is None else self.learner.step

    def _end(self, stopped_by: int) -> None:
        """Save, evaluate if training was not stopped, and set `result`."""
        learner, say = self.learner, self.progress.write
        if stopped_by and self.saved_step != learner.step:
            say(f"asked to stop: saving step {learner.step}")
        if learner.step:
            self.save()
        if not stopped_by:
            self._evaluate()
            (stopped_by,) = self.world.largest(self._stop.number if self._evaluation_due else 0)
        if learner.skipped:
            say(f"{learner.skipped} of {learner.step} steps were skipped: their loss was not finite")
        self.result = TrainResult(learner.step, learner.seconds, learner.tokens_seen, stopped_by, self._stop.number)

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one. Raises Diverged for a loss that is not finite."""
        learner = self.learner
        learner.require_finite()
        if self.saved_step == learner.step:
            return
        if self._log is not None:
            self._log.require_folder(learner.step)
        checkpoint.save(
            self._context.run_dir,
            model=learner.module,
            optimiser=learner.optimiser,
            state=learner.state,
            progress=learner.progress(evaluation_due=self._evaluation_due, run=self._context.record),
            conditions=conditions(learner),
            world=self.world,
            keep=self.config.keep_checkpoints,
        )
        self.saved_step, self.saved_s = learner.step, learner.seconds

    def _record(self) -> str:
        """Record the steps since the last record; returns them as a note for the progress line."""
        record, words = self.learner.record()
        if self._log is not None:
            self._log.write("train", step=self.learner.step, **record)
        rate, per_second = record[f"{self.learner.unit}s_per_second"], self._context.units_per_second
        real_time = f", {rate / per_second:.2f} x real time" if per_second else ""
        return f"{words}{rate:,.0f} {self._context.unit}s/s{real_time}"

    def _evaluate(self) -> None:
        """Evaluate, unless the log has this step's: a process killed after it wrote that resumes at the same step.

        If a stop is asked for, it ends early and the evaluation remains due.
        """
        missing = self._log is not None and self.learner.step not in self._log.evaluated
        self._evaluation_due = self._validate is not None and self.world.any(missing)
        if self._validate is None or not self._evaluation_due:
            return
        self.learner.require_finite()  # weights gone bad would be recorded, and no sample can be drawn from them
        # Ranks score different numbers of windows, and the first one samples alone.
        with suppress(Stopped), self._validate(self._stop) as result:
            self._evaluation_due = False
            with self.world.first_alone():
                if self._log is not None:
                    self._report(result, self._log)

    def _report(self, result: Evaluation, log: MetricsLog) -> None:
        learner, nats = self.learner, result.nats_per_token
        log.require_folder(learner.step)
        shown = f"{nats:.4f} nats = {bits(nats):.4f} bits per {self._context.unit}"
        self.progress.write(f"step {learner.step}: validation {shown}")
        read = {"seconds": round(learner.seconds, 3), f"{learner.unit}s_seen": learner.tokens_seen}
        log.write("evaluate", step=learner.step, **read, nll_nats=nats, nll_bits=bits(nats))
        if self._context.on_evaluate is not None:
            with suppress(Stopped), torch.random.fork_rng(devices=[]):
                self._context.on_evaluate(learner.model, learner.step, log, self._stop)


def _passed(every: float | None, before: float, now: float) -> bool:
    """Whether a multiple of `every` lies in (before, now]: steps may advance by more than one. None: never."""
    return every is not None and now // every > before // every


def progress_of(trainers: Sequence[Trainer]) -> Progress:
    """One display for all: how much of their budgets they have used together."""
    totals, units = zip(*(trainer.config.budget for trainer in trainers), strict=True)
    done, shown = sum(trainer.done for trainer in trainers), trainers[0].shows_progress
    return Progress("train", total=sum(totals), unit=units[0], initial=done, enabled=shown)
