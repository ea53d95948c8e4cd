"""The training loop, for every model and modality.

One update: for `period` chunks, for each window: forward, NLL and auxiliary losses, backward; then sum gradients over
ranks, clip trunk and compressor separately, Adam. Losses are sums over tokens divided by the number of scored tokens of
the whole update on all ranks, auxiliary ones by that of rows without padding, so the gradient does not depend on how
rows are dealt.
"""

import math
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from waveform.engine import checkpoint
from waveform.engine.clipping import clip, parameter_groups
from waveform.engine.compiler import require_compiler
from waveform.engine.evaluator import EvaluateConfig, Evaluation, evaluate
from waveform.engine.interface import SequenceModel, State, detach, optional_parts
from waveform.engine.metrics import MetricsLog, bits
from waveform.engine.nonfinite import FiniteWatch, Update
from waveform.engine.random_numbers import random_state, set_random_state
from waveform.engine.resume_notes import conditions, notes
from waveform.engine.schedule import update_period
from waveform.engine.scored_window import ScoredForward, score_window, shares_out_itself
from waveform.engine.streams import Chunk, TokenStream, Window
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.engine.train_log import TrainLog
from waveform.ranks import fsdp
from waveform.ranks.distributed import World, explain_lost_ranks
from waveform.system.errors import UserError
from waveform.system.folder_identity import FolderIdentity
from waveform.system.progress import Progress
from waveform.system.signals import Stopped, StopRequest, signals_ask
from waveform.system.threads import torch_in_one_thread
from waveform.system.waiting import waited_s

# Gets the model, the step, the log, and a request to stop, on which it raises Stopped if it would take seconds.
OnEvaluate = Callable[[SequenceModel, int, MetricsLog, StopRequest], None]


@dataclass(frozen=True)
class RunContext:
    """Where a training runs and how it reports; nothing here changes what is learned."""

    run_dir: Path
    world: World = field(default_factory=World)
    record: dict[str, Any] | None = None  # JSON that each checkpoint keeps as `run`
    units_per_second: float | None = None  # tokens of one second of audio, to print x real time
    on_evaluate: OnEvaluate | None = None  # called by the first rank after each evaluation
    show_progress: bool = True


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    seconds: float  # spent on training steps
    tokens_seen: int
    stopped_by: int  # the signal that asked to stop, after which the state was saved; 0: none
    asked_by: int  # the signal that asked to stop this process, in time or after the last step; 0: none

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it before its budget."""
        return self.stopped_by != 0


class Trainer:
    """Trains one model on one token set; resumes from the newest checkpoint of the run folder, if any.

    A loss or gradient that is not finite never reaches a checkpoint or an evaluation. `train.on_nonfinite=stop` raises
    Diverged: on a CPU at that step, on a GPU at the latest when figures are next logged, because looking makes it wait.
    `skip` looks at every step: if one is not finite on any rank, all ranks leave weights and optimiser as they are, the
    rows whose loss or state went bad start afresh, and training continues with the next step; after more than
    `train.max_skipped` consecutive ones it stops.
    """

    def __init__(
        self,
        model: SequenceModel,
        config: TrainConfig,
        *,
        train: TokenSet,
        valid: TokenSet,
        window: int,
        seed: int,
        context: RunContext,
    ) -> None:
        """window: tokens of one forward."""
        assert isinstance(model, nn.Module)
        self.model, self.module, self.parts, self.config = model, model, optional_parts(model), config
        self.world = world = context.world
        self._context, self._valid, self._window = context, valid, window
        self.shows_progress = context.show_progress and world.is_first
        self.stream = TokenStream(
            train,
            batch_size=config.batch_size,
            window=window,
            chunk=config.chunk,
            mode=config.state,
            seed=seed,
            rank=world.rank,
            num_ranks=world.size,
        )
        self.stream.first_scored = min(window - 1, round((1 - config.loss_share) * window))
        self.stream.label_dropout = config.label_dropout
        self._set_up_model()
        self.groups = parameter_groups(model)
        parameters = [parameter for group in self.groups.values() for parameter in group]
        self.optimiser = torch.optim.Adam(parameters, lr=config.lr, betas=(0.9, config.beta2), fused=True)
        dtype = next(iter(self.module.parameters())).dtype
        self._fresh = model.init_state(config.batch_size // world.size, device=world.device, dtype=dtype)
        self.state: State = self._fresh
        self.step, self.seconds, self.tokens_seen = 0, 0.0, 0
        self.finite = FiniteWatch(
            world=world,
            stream=self.stream,
            run_dir=context.run_dir,
            on_nonfinite=config.on_nonfinite,
            max_skipped=config.max_skipped,
        )
        self._row_nats: list[Tensor] = []
        self._log = TrainLog(world)
        self._run_folder: FolderIdentity | None = None  # the one that training began in; None: it has not begun
        self._saved_step: int | None = None
        self._evaluation_due = False  # at this step, and not done yet
        self.resumed_from: checkpoint.Checkpoint | None = None
        self._waited_s = 0.0  # for a core, since the last record
        self._looked_s = 0.0  # when `_look_is_due` last looked at the clock
        self.result: TrainResult | None = None  # None: training has not ended
        self._resume()
        self._random_state = random_state(world.device)  # with which training begins

    @property
    def evaluation(self) -> EvaluateConfig:
        """How the validation split is scored during training."""
        return EvaluateConfig(
            window=self._window,
            protocol="chunk" if self.config.state == "chunk" else "utterance",
            chunk=self.config.chunk,
            autocast=self.config.autocast(self.world.device),
            max_tokens=self.config.evaluate_tokens,
        )

    def _set_up_model(self) -> None:
        """Check the model against the settings, and put it on the device, the same on every rank, sharded if asked."""
        config, world, window = self.config, self.world, self._window
        name = type(self.model).__name__
        if config.unroll > 1 and self.parts is not self.model:
            raise UserError(
                f"train.unroll={config.unroll}: {name} passes no gradient from one window to the next (it lacks "
                "carry_gradient of OptionalParts); set train.unroll=1"
            )
        if min(config.unroll, config.chunk // window) < 2 and self.parts.trains_through_time:
            raise UserError(
                f"some parameters of {name} learn only from the losses of later windows (trains_through_time), but "
                f"with train.unroll={config.unroll} and train.chunk={config.chunk} gradients stay within a window; set "
                f"train.unroll=2 or more and train.chunk={2 * window} or more, or give them a loss of their own"
            )
        if config.checkpoint_activations:
            if self.parts.checkpoint_activations is None:
                raise UserError(
                    f"train.checkpoint_activations: {name} has no layers that can be computed again; leave it false, "
                    "or lower train.batch_size"
                )
            self.parts.checkpoint_activations = True
        if config.compile:
            self._compile()
        self.module.to(world.device)
        world.broadcast_([*self.module.parameters(), *self.module.buffers()])
        self._scored = ScoredForward(self.model)
        self._watch: fsdp.GradientWatch | None = None
        if config.sharding == "fsdp" and world.size > 1:
            self._watch = fsdp.shard(self._scored, self.parts.sharding_units(window), world=world)

    def _compile(self) -> None:
        """Let the layers be compiled. Raises UserError if they cannot be, or torch.compile does not work here."""
        config = self.config
        if config.sharding == "fsdp" and self.world.size > 1:
            raise UserError(
                "train.compile=true cannot compile sharded weights; set train.sharding=none or leave it false"
            )
        if not self.parts.compile_layers(self._window):
            raise UserError(
                f"train.compile: {type(self.model).__name__} has no layers that can be compiled; leave it false"
            )
        require_compiler(self.world.device)

    def _resume(self) -> None:
        found = checkpoint.newest(self._context.run_dir)
        if self.world.is_first:
            checkpoint.tidy(self._context.run_dir, found=found, keep=self.config.keep_checkpoints)
        if found is None:
            return
        self.state = checkpoint.restore(
            found, model=self.module, optimiser=self.optimiser, fresh=self._fresh, world=self.world
        )
        progress = found.progress
        self.resumed_from = found
        self.step = self._saved_step = found.step
        self.seconds, self.tokens_seen = progress.seconds, progress.tokens_seen
        self._looked_s, self._waited_s = progress.seconds, progress.waited_s
        self.finite.skipped, self.finite.skipped_in_row = progress.skipped
        self.stream.seek(progress.cursor)
        self._evaluation_due = progress.evaluation_due
        if self.world.is_first:
            self._log.add(torch.tensor(progress.since_log, dtype=torch.float64))
        if self.shows_progress:
            for note in notes(found, conditions(self.model, self.config, self.world)):
                print(f"note: {note}", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one. Raises Diverged for a loss that is not finite."""
        self.finite.check()
        if self._saved_step == self.step:
            return
        self._require_run_folder()
        checkpoint.save(
            self._context.run_dir,
            model=self.module,
            optimiser=self.optimiser,
            state=self.state,
            progress=checkpoint.TrainingProgress(
                step=self.step,
                num_ranks=self.world.size,
                seconds=self.seconds,
                tokens_seen=self.tokens_seen,
                cursor=self.stream.cursor(),
                skipped=(self.finite.skipped, self.finite.skipped_in_row),
                since_log=self._log.over_ranks(),
                waited_s=self._waited_s,
                evaluation_due=self._evaluation_due,
                run=self._context.record,
            ),
            conditions=conditions(self.model, self.config, self.world),
            world=self.world,
            keep=self.config.keep_checkpoints,
        )
        self._saved_step = self.step

    def _require_run_folder(self) -> None:
        """Raises UserError if the run folder is no longer the one that training began in."""
        if self._run_folder is not None:
            self._run_folder.require_same(step=self.step)

    @property
    def finished(self) -> bool:
        """Whether the budget of steps or seconds is used up (on this rank's clock)."""
        return self.share >= 1

    @property
    def share(self) -> float:
        """Share of the budget that is used up, of steps or of seconds, whichever is more (on this rank's clock)."""
        return self.config.share(self.step, self.seconds)

    def run(self) -> TrainResult:
        """Train until the budget is used up or a signal asks to stop; either way the last state is saved.

        Raises Diverged for a loss that is not finite, RankLost if another process of the job ended or hangs.
        """
        self.prepare_kernels()
        with signals_ask() as stop, self.progress() as progress:
            for _ in self.slices(stop, progress):
                pass
        assert self.result is not None
        return self.result

    def prepare_kernels(self) -> None:
        """Compile the model's own kernels, if it has any, so that no step waits for them."""
        if self.world.device.type == "cpu" and self.config.autocast(self.world.device) is None:
            self.parts.prepare_kernels()

    @property
    def runs_in_kernels(self) -> bool:
        """Whether updates run in the model's own kernels, to which torch leaves all threads but one.

        Not with `train.unroll` above 1, where they take the last window only.
        """
        device, config = self.world.device, self.config
        return config.unroll == 1 and shares_out_itself(self.model, device=device, autocast=config.autocast(device))

    def slices(self, stop: StopRequest, progress: Progress, *, seconds: float = math.inf) -> Generator[None]:
        """Train as `run` does, pausing whenever so many `seconds` of training have passed; then `result` is there.

        In a pause other trainers may train in this process: they draw random numbers of their own. Signals and the
        display are the caller's; every rank takes the same slices.
        """
        run_dir = self._context.run_dir
        with (
            explain_lost_ranks(self.world, timeout_s=self.config.timeout_s, where=self._where),
            self._log.opened(run_dir, step=self.step, seconds=self.seconds, tokens_seen=self.tokens_seen),
        ):
            set_random_state(self._random_state, self.world.device)
            yield from self._slices(stop, progress, seconds=seconds)

    def _where(self) -> str:
        saved = "nothing was saved yet" if self._saved_step is None else f"step {self._saved_step} is saved"
        return f"step {self.step} ({saved}; the same command continues from there)"

    def _slices(self, stop: StopRequest, progress: Progress, *, seconds: float) -> Iterator[None]:
        world, began_at = self.world, self.step
        slice_at, slice_at_s = self.step, self.seconds  # where the slice began
        self._run_folder = FolderIdentity(self._context.run_dir) if world.is_first else None
        if self.step:
            progress.write(f"resumed at step {self.step}")
        while True:
            # Ranks must agree on stopping, and at every step: a scheduler gives them half a minute.
            over = self.step > slice_at and self.seconds - slice_at_s >= seconds
            finished, stopped_by, evaluates, pauses = world.largest(
                int(self.finished), stop.number, int(self._evaluation_due), int(over)
            )
            if finished or stopped_by:
                break
            # After a pause or an evaluation, a signal may have asked to stop: the next step would forget what is due.
            if evaluates:
                self._validate(progress, stop)
            elif pauses:
                yield from self._pause()
                slice_at, slice_at_s = self.step, self.seconds
            else:
                self._train_step(progress)
        if stopped_by and self._saved_step != self.step:
            progress.write(f"asked to stop: saving step {self.step}")
        if self.step > began_at:
            self.save()
        if not stopped_by:
            self._validate(progress, stop)
            (stopped_by,) = world.largest(stop.number if self._evaluation_due else 0)
        if self.finite.skipped:
            progress.write(f"{self.finite.skipped} of {self.step} steps were skipped: their loss was not finite")
        self.result = TrainResult(self.step, self.seconds, self.tokens_seen, stopped_by, stop.number)

    def _pause(self) -> Iterator[None]:
        self._wait_for_device()  # or the next trainer's time would have work of this one in it
        random_numbers = random_state(self.world.device)
        try:
            yield
        finally:  # also if training ends here: a checkpoint has its own random numbers, not another trainer's
            set_random_state(random_numbers, self.world.device)

    def _look_is_due(self) -> bool:
        """Whether the clock has asked for an evaluation since the last call (that of the first rank, which saves)."""
        every_s, before_s = self.config.evaluate_every_seconds, self._looked_s
        self._looked_s = self.seconds
        return self.world.is_first and every_s is not None and self.seconds // every_s > before_s // every_s

    def _train_step(self, progress: Progress) -> None:
        """One update, and what is due after it: a record, a checkpoint; it is noted whether an evaluation is."""
        config, step, done = self.config, self.step, self.done
        sums, norms = self.update()
        crossed = _crossed(step, self.step)
        self._log.add(sums)
        note = self._log_record(norms) if crossed(config.log_every) else ""
        progress.update(self.done - done, note=note)
        self._evaluation_due = self._look_is_due() or crossed(config.evaluate_every)
        if crossed(config.checkpoint_every):  # before the evaluation: nothing that it runs into loses steps
            self.save()

    def progress(self) -> Progress:
        """A display of this training alone."""
        total, unit = self.budget
        return Progress("train", total=total, unit=unit, initial=self.done, enabled=self.shows_progress)

    @property
    def budget(self) -> tuple[float, str]:
        """What progress counts up to, and its unit."""
        return self.config.budget

    @property
    def done(self) -> float:
        """How much of `budget` is used up."""
        return self.seconds if self.config.max_steps is None else self.step

    def update(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One update. Returns this rank's sums of [nats, tokens, auxiliary losses, rows without padding], and norms."""
        began, waited_before_s = time.perf_counter(), waited_s()  # in this order: no more waiting than time
        with torch_in_one_thread() if self.runs_in_kernels else nullcontext():
            sums, norms = self._update()
        waited = waited_s() - waited_before_s
        self._waited_s += waited
        self.seconds += time.perf_counter() - began - (0 if self.config.count_waiting else waited)
        return sums, norms

    def _update(self) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        period = update_period(self.step, late_period=config.update_period, change_at=config.update_period_from)
        lr = config.learning_rate(self.step, self.seconds)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        cursor = self.stream.cursor()
        chunks = [self.stream.next_chunk() for _ in range(period)]
        sums = self.accumulate_gradients(chunks)
        self.reduce_gradients()
        # Without any gradient (nothing evicted yet) a norm is a zero on the CPU.
        norms = {name: fsdp.whole(n).to(self.world.device) for name, n in clip(self.groups, config.clip_norm).items()}
        seen = sums + 0 * torch.stack(list(norms.values())).sum().to(sums.dtype)
        self.finite.note(Update(self.step, cursor, period, seen, torch.stack(self._row_nats)))
        bad = self.finite.first_bad() if self.finite.looks_at_once() else None
        if bad is None:
            self.optimiser.step()
            self.finite.skipped_in_row = 0
        else:
            self.state = self.finite.skip(bad, parameters=self.module.parameters(), state=self.state, fresh=self._fresh)
            sums, norms = torch.zeros_like(sums), {name: torch.zeros_like(norm) for name, norm in norms.items()}
        self.optimiser.zero_grad(set_to_none=True)
        self.step += period
        self.tokens_seen += sum(chunk.num_scored for chunk in chunks)
        return sums, norms

    def reduce_gradients(self) -> None:
        """Sum what `accumulate_gradients` left on all ranks; FSDP did so in each backward pass."""
        if self._watch is not None:
            self._watch.drop_missing(world=self.world)
        else:
            self.world.sum_gradients(self.module.parameters())

    def accumulate_gradients(self, chunks: list[Chunk]) -> Tensor:
        """Forward and backward of `chunks`; gradients are of the mean over all ranks' tokens.

        Returns the sums that `update` returns.
        """
        config, device = self.config, self.world.device
        num_scored = max(sum(chunk.num_scored for chunk in chunks), 1)
        windows = [window for chunk in chunks for window in chunk.windows]
        num_whole = max(sum(chunk.num_whole for chunk in chunks), 1)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._row_nats = []
        if not self.module.training:  # setting it walks all modules
            self.module.train()
        for begin in range(0, len(windows), config.unroll):
            group = windows[begin : begin + config.unroll]
            loss = torch.zeros((), device=device)
            for i, window in enumerate(group):
                self.parts.carry_gradient = i + 1 < len(group)
                nats, aux, count = self._forward(window)
                loss = loss + nats / num_scored + aux * (config.aux_weight / num_whole)
                sums[:3] += torch.stack([t.detach().double() for t in (nats, count, aux)])
            loss.backward()
            self.state = detach(self.state)
        sums[3] += sum(int(window.whole.sum()) for window in windows)
        self.parts.carry_gradient = False
        return sums

    def _forward(self, window: Window) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of nats over scored tokens, sum of auxiliary losses over rows, number of scored tokens."""
        device = self.world.device
        scores = score_window(
            self._scored,
            window,
            self.state,
            fresh=self._fresh,
            device=device,
            autocast=self.config.autocast(device),
        )
        self.state = scores.state
        self._row_nats.append(scores.row_nats)
        return scores.nats, scores.aux, scores.scored.sum()

    def _log_record(self, norms: dict[str, Tensor]) -> str:
        """Log the steps since the last record; returns them as a note for the progress line."""
        self.finite.check()
        self._wait_for_device()
        if self.world.is_first:
            self._require_run_folder()
        figures = self._log.write_train(
            step=self.step,
            seconds=self.seconds,
            tokens_seen=self.tokens_seen,
            lr=self.optimiser.param_groups[0]["lr"],
            epoch=self.stream.epoch,
            skipped=self.finite.skipped,
            waited_s=round(self._waited_s, 3),
            norms=norms,
        )
        self._waited_s = 0.0
        rate, per_second = figures["tokens_per_second"], self._context.units_per_second
        real_time = f", {rate / per_second:.2f} x real time" if per_second else ""
        return f"{figures['nll_nats']:.3f} nats, {rate:,.0f} tokens/s{real_time}"

    def _wait_for_device(self) -> None:
        """Count the work that is still queued on a GPU as time of training, before a rate is computed."""
        if self.world.device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize(self.world.device)
            self.seconds += time.perf_counter() - began

    def _validate(self, progress: Progress, stop: StopRequest) -> None:
        """Evaluate, unless the log has it: a process killed right after its record resumes at the same step.

        If a stop is asked for, it ends early and the evaluation remains due. Raises Diverged for a loss that is not
        finite.
        """
        self._evaluation_due = True
        missing = self.world.any(self._log.lacks_evaluation(self.step))
        if self.config.evaluate_tokens == 0 or not missing:
            self._evaluation_due = False
            return
        self.finite.check()  # weights gone bad would be recorded, and no sample can be drawn from them
        self.module.eval()
        # Ranks score different numbers of windows, and the first one samples alone.
        with suppress(Stopped), fsdp.gathered(self._scored):
            result = evaluate(
                self.model,
                self._valid,
                self.evaluation,
                world=self.world,
                stop=stop,
            )
            self._evaluation_due = False
            with self.world.first_alone():
                if self._log.metrics is not None:
                    self._require_run_folder()
                    self._report(result, self._log.metrics, progress, stop)

    def _report(self, result: Evaluation, log: MetricsLog, progress: Progress, stop: StopRequest) -> None:
        nats = result.nats_per_token
        progress.write(f"step {self.step}: validation {nats:.4f} nats = {bits(nats):.4f} bits per token")
        log.write("evaluate", step=self.step, seconds=round(self.seconds, 3), nll_nats=nats, nll_bits=bits(nats))
        if self._context.on_evaluate is not None:
            random_numbers = torch.get_rng_state()
            with suppress(Stopped):
                self._context.on_evaluate(self.model, self.step, log, stop)
            torch.set_rng_state(random_numbers)


def _crossed(before: int, after: int) -> Callable[[int], bool]:
    """Whether a multiple of the argument lies in (before, after]: steps may advance by more than one."""
    return lambda every: after // every > before // every
