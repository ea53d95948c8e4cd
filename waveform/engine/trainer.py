"""The training loop, for every model and modality.

One update: for `period` chunks, for each window: forward, NLL and auxiliary losses, backward; then sum gradients over
ranks, clip trunk and compressor apart, Adam. Losses are sums over tokens divided by the number of scored tokens of
the whole update on all ranks, so the gradient does not depend on how rows are dealt.
"""

import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from waveform.engine import checkpoint
from waveform.engine.evaluator import Evaluation, evaluate
from waveform.engine.interface import SequenceModel, State, detach, optional_parts
from waveform.engine.metrics import MetricsLog, bits
from waveform.engine.nonfinite import FiniteWatch, Update
from waveform.engine.schedule import learning_rate, update_period
from waveform.engine.scoring import score_window
from waveform.engine.shards import TokenSet
from waveform.engine.streams import Chunk, TokenStream, Window, check_sizes
from waveform.engine.train_config import TrainConfig
from waveform.ranks import fsdp
from waveform.ranks.distributed import World, explain_lost_ranks
from waveform.system.errors import UserError
from waveform.system.machine import cpu_name
from waveform.system.progress import Progress
from waveform.system.signals import Stopped, StopRequest, signals_ask

# Gets the model, the step, the log, and a request to stop, on which it raises Stopped where it would take seconds.
OnEvaluate = Callable[[SequenceModel, int, MetricsLog, StopRequest], None]


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


def parameter_groups(model: SequenceModel) -> dict[str, list[nn.Parameter]]:
    """The parameters in groups whose gradients are clipped apart: `trunk`, and `compressor` where one learns alone."""
    compressor = optional_parts(model).compressor_parameters()
    apart = {id(parameter) for parameter in compressor}
    trunk = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    return {"trunk": trunk, **({"compressor": compressor} if compressor else {})}


class Trainer:
    """Trains one model on one token set; resumes from the newest checkpoint of `run_dir`, if any.

    A loss or gradient that is not finite never reaches a checkpoint or an evaluation. `train.on_nonfinite=stop` raises
    Diverged: on a CPU at that step, on a GPU at the latest when figures are next logged, as looking makes it wait.
    `skip` looks at every step: one that is not finite on any rank leaves weights and optimiser as they are on all, the
    rows whose loss or state went bad start afresh, and training goes on behind it; after more than `train.max_skipped`
    in a row it stops.
    """

    def __init__(
        self,
        model: SequenceModel,
        config: TrainConfig,
        *,
        train: TokenSet,
        valid: TokenSet,
        run_dir: Path,
        window: int,
        seed: int,
        world: World | None = None,
        units_per_second: float | None = None,
        on_evaluate: OnEvaluate | None = None,
        record: dict[str, Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        """window: tokens of one forward; units_per_second: tokens of one second of audio, to print x real time.

        on_evaluate: called by the first rank after each evaluation. record: JSON that each checkpoint keeps as `run`.
        """
        assert isinstance(model, nn.Module)
        self.model, self.module, self.parts, self.config = model, model, optional_parts(model), config
        self.world = world or World()
        self._valid, self._run_dir, self._window = valid, run_dir, window
        self._units_per_second, self._on_evaluate = units_per_second, on_evaluate
        self._record = {} if record is None else {"run": record}
        self._show_progress = show_progress and self.world.is_first
        check_sizes(
            batch_size=config.batch_size,
            window=window,
            chunk=config.chunk,
            mode=config.state,
            num_ranks=self.world.size,
        )
        if min(config.unroll, config.chunk // window) < 2 and self.parts.trains_through_time:
            raise UserError(
                "model.compression_loss=none leaves the compressor to backpropagation through time, which this "
                "training does not do; set train.unroll=2 or more and a train.chunk of as many windows, or another loss"
            )
        if config.checkpoint_activations:
            if self.parts.checkpoint_activations is None:
                raise UserError(
                    f"train.checkpoint_activations: {type(model).__name__} has no layers that can be computed again; "
                    "leave it false, or lower train.batch_size"
                )
            self.parts.checkpoint_activations = True
        self.module.to(self.world.device)
        self.world.broadcast_([*self.module.parameters(), *self.module.buffers()])
        self._scored = fsdp.ScoredForward(model)
        self._watch: fsdp.GradientWatch | None = None
        if config.sharding == "fsdp" and self.world.size > 1:
            self._watch = fsdp.shard(self._scored, self.parts.sharding_units(window), world=self.world)
        self.stream = TokenStream(
            train,
            batch_size=config.batch_size,
            window=window,
            chunk=config.chunk,
            mode=config.state,
            seed=seed,
            rank=self.world.rank,
            num_ranks=self.world.size,
        )
        self.groups = parameter_groups(model)
        parameters = [parameter for group in self.groups.values() for parameter in group]
        self.optimiser = torch.optim.Adam(parameters, lr=config.lr, betas=(0.9, config.beta2), fused=True)
        dtype = next(iter(self.module.parameters())).dtype
        self._fresh = model.init_state(config.batch_size // self.world.size, device=self.world.device, dtype=dtype)
        self.state: State = self._fresh
        self.step, self.seconds, self.tokens_seen = 0, 0.0, 0
        self.finite = FiniteWatch(
            world=self.world,
            stream=self.stream,
            run_dir=run_dir,
            on_nonfinite=config.on_nonfinite,
            max_skipped=config.max_skipped,
        )
        self._place: tuple[int, int] | None = None
        self._row_nats: list[Tensor] = []
        self._saved_step: int | None = None
        self.resumed_from: checkpoint.Checkpoint | None = None
        # What the next record of the log will tell: [sum of nats, tokens, auxiliary losses, rows x windows].
        self._since_log = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        self._evaluation_due = False  # at this step, and not done yet
        self._resume()

    def _resume(self) -> None:
        found = checkpoint.newest(self._run_dir)
        if self.world.is_first:
            checkpoint.tidy(self._run_dir, found=found, keep=self.config.keep_checkpoints)
        if found is None:
            return
        self.state = checkpoint.restore(
            found, model=self.module, optimiser=self.optimiser, fresh=self._fresh, world=self.world
        )
        self.resumed_from = found
        self.step = found.step
        self.seconds = float(found.progress["seconds"])
        self.tokens_seen = int(found.progress["tokens_seen"])
        self.finite.skipped, self.finite.skipped_in_row = found.progress.get("skipped", (0, 0))
        self.stream.seek(found.progress["cursor"])
        self._saved_step = found.step
        self._evaluation_due = bool(found.progress.get("evaluation_due"))
        if self.world.is_first and "since_log" in found.progress:
            self._since_log += torch.tensor(found.progress["since_log"], dtype=torch.float64, device=self.world.device)
        known = {"format", "step", "num_ranks", "seconds", "tokens_seen", "cursor", "skipped"}
        known |= {"evaluation_due", "since_log", *self._record}
        unknown = sorted(found.progress.keys() - known - self._bitwise_only_with().keys())
        if unknown and self._show_progress:
            print(f"note: {found.folder} also says {', '.join(unknown)}, which is left aside", file=sys.stderr)
        for what, now in self._bitwise_only_with().items():
            then = found.progress.get(what, now)  # an older checkpoint does not say
            if then != now and self._show_progress:
                print(
                    f"note: saved with {what} {then}, resumed with {now}: the same no more bit by bit", file=sys.stderr
                )

    def _bitwise_only_with(self) -> dict[str, str | int]:
        """What a resumed run must share with the one before it to give the same bits; the number of ranks apart."""
        device = self.world.device
        return {
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "processor": cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "device": device.type,
            "precision": str(self.config.autocast(device) or torch.float32).removeprefix("torch."),
            "sharding": self.config.sharding if self.world.size > 1 else "none",
        }

    def save(self) -> None:
        """Write a checkpoint of this moment, unless it is saved already. Raises Diverged for a loss gone wrong."""
        self.finite.check()
        if self._saved_step == self.step:
            return
        self._require_run_dir()
        checkpoint.save(
            self._run_dir,
            step=self.step,
            model=self.module,
            optimiser=self.optimiser,
            state=self.state,
            progress={
                "seconds": self.seconds,
                "tokens_seen": self.tokens_seen,
                "cursor": self.stream.cursor(),
                "skipped": [self.finite.skipped, self.finite.skipped_in_row],
                "since_log": self.world.sum_(self._since_log.clone()).tolist(),
                "evaluation_due": self._evaluation_due,
                **self._record,
                **self._bitwise_only_with(),
            },
            world=self.world,
            keep=self.config.keep_checkpoints,
        )
        self._saved_step = self.step

    def _require_run_dir(self) -> None:
        """Raises UserError where the run's folder is not the one any more that training began in."""
        if self._place is None:
            return
        now = _identity(self._run_dir)
        if now != self._place:
            what = "is gone" if now is None else "is another folder now"
            raise UserError(
                f"{self._run_dir} {what}: it was moved or removed during training, at step {self.step}; put it back, "
                "and the same command goes on from its last checkpoint"
            )

    @property
    def finished(self) -> bool:
        """Whether the budget of steps or seconds is used up (on this rank's clock)."""
        config = self.config
        return (config.max_steps is not None and self.step >= config.max_steps) or (
            config.max_seconds is not None and self.seconds >= config.max_seconds
        )

    def run(self) -> TrainResult:
        """Train until the budget is used up or a signal asks to stop; either way the last state is saved.

        Raises Diverged for a loss that is not finite, RankLost where another process of the job ended or hangs.
        """
        with explain_lost_ranks(self.world, timeout_s=self.config.timeout_s, where=self._where):
            return self._run()

    def _where(self) -> str:
        saved = "nothing was saved yet" if self._saved_step is None else f"step {self._saved_step} is saved"
        return f"step {self.step} ({saved}; the same command goes on from there)"

    def _run(self) -> TrainResult:
        config, world = self.config, self.world
        log = MetricsLog(self._run_dir, resume_step=self.step) if world.is_first else None
        self._place = _identity(self._run_dir) if world.is_first else None
        resumed_at = self.step
        stopped_by = 0
        since = (self.seconds, self.tokens_seen)
        by_steps = config.max_steps is not None
        total = config.max_steps if by_steps else config.max_seconds
        with (
            nullcontext() if log is None else closing(log),
            signals_ask() as stop,
            Progress(
                "train",
                total=total,
                unit="step" if by_steps else "s",
                initial=self.step if by_steps else self.seconds,
                enabled=self._show_progress,
            ) as progress,
        ):
            if self.step:
                progress.write(f"resumed at step {self.step}")
            if self._evaluation_due:
                self._validate(log, progress, stop)
            while True:
                # Ranks must agree on stopping, and at every step: a scheduler gives them half a minute.
                finished, stopped_by = world.largest(int(self.finished), stop.number)
                if finished or stopped_by:
                    break
                before = self.step, self.seconds
                sums, norms = self.update()
                crossed = _crossed(before[0], self.step)
                if crossed(config.log_every):
                    self.finite.check()
                self._since_log += sums
                if crossed(config.log_every):
                    self._wait_for_device()
                    seconds, tokens = self.seconds - since[0], self.tokens_seen - since[1]
                    since = self.seconds, self.tokens_seen
                    nats, num_tokens, aux, num_rows = world.sum_(self._since_log).tolist()
                    self._since_log.zero_()
                    train_nats, train_aux = nats / max(num_tokens, 1), aux / max(num_rows, 1)
                    rate = tokens / max(seconds, 1e-9)
                    note = f"{train_nats:.3f} nats, {rate:,.0f} tokens/s"
                    if self._units_per_second:
                        note += f", {rate / self._units_per_second:.2f} x real time"
                    if log is not None:
                        self._require_run_dir()
                        log.write(
                            "train",
                            step=self.step,
                            seconds=round(self.seconds, 3),
                            nll_nats=train_nats,
                            nll_bits=bits(train_nats),
                            aux_loss=train_aux,
                            tokens_seen=self.tokens_seen,
                            tokens_per_second=rate,
                            lr=self.optimiser.param_groups[0]["lr"],
                            epoch=self.stream.epoch,
                            skipped=self.finite.skipped,
                            **{f"grad_norm_{name}": float(norm) for name, norm in norms.items()},
                        )
                else:
                    note = ""
                progress.update(self.step - before[0] if by_steps else self.seconds - before[1], note=note)
                self._evaluation_due = crossed(config.evaluate_every)
                if crossed(config.checkpoint_every):  # first, so that nothing that an evaluation runs into loses steps
                    self.save()
                    if log is not None:
                        log.flush()
                if self._evaluation_due:
                    self._validate(log, progress, stop)
            if stopped_by and self._saved_step != self.step:
                progress.write(f"asked to stop: saving step {self.step}")
            if self.step > resumed_at:
                self.save()
            if not stopped_by:
                self._validate(log, progress, stop)
                (stopped_by,) = world.largest(stop.number if self._evaluation_due else 0)
            if self.finite.skipped:
                progress.write(f"{self.finite.skipped} of {self.step} steps were skipped: their loss was not finite")
        return TrainResult(self.step, self.seconds, self.tokens_seen, stopped_by, stop.number)

    def update(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One update. Returns this rank's [sum of nats, tokens, sum of auxiliary losses, rows x windows] and norms."""
        began = time.perf_counter()
        config = self.config
        period = update_period(self.step, late_period=config.update_period, change_at=config.update_period_from)
        lr = learning_rate(
            self.step,
            peak=config.lr,
            warmup_steps=config.warmup_steps,
            decayed=config.decayed(self.step, self.seconds),
            change_at=config.lr_change_at,
            after=config.lr_after,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        cursor = self.stream.cursor()
        chunks = [self.stream.next_chunk() for _ in range(period)]
        sums = self.accumulate_gradients(chunks)
        self.reduce_gradients()
        norms = {
            # Without any gradient (nothing evicted yet) the norm is a zero on the CPU.
            name: fsdp.whole(nn.utils.clip_grad_norm_(parameters, config.clip_norm)).to(self.world.device)
            for name, parameters in self.groups.items()
        }
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
        self.seconds += time.perf_counter() - began
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
        num_row_windows = config.batch_size * len(windows)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._row_nats = []
        self.module.train()
        for begin in range(0, len(windows), config.unroll):
            group = windows[begin : begin + config.unroll]
            loss = torch.zeros((), device=device)
            for i, window in enumerate(group):
                self.parts.carry_gradient = i + 1 < len(group)
                nats, aux, count = self._forward(window)
                loss = loss + nats / num_scored + aux * (config.aux_weight / num_row_windows)
                sums[:3] += torch.stack([t.detach().double() for t in (nats, count, aux)])
            loss.backward()
            self.state = detach(self.state)
        sums[3] += len(windows) * len(windows[0].reset)
        self.parts.carry_gradient = False
        return sums

    def _forward(self, window: Window) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of nats over scored tokens, sum of auxiliary losses over rows, number of scored tokens."""
        device = self.world.device
        scores = score_window(
            self.model,
            window,
            self.state,
            fresh=self._fresh,
            device=device,
            autocast=self.config.autocast(device),
            forward=lambda inputs, targets, state: self._scored(fsdp.Inputs(inputs, targets, state)),
        )
        self.state = scores.state
        self._row_nats.append(scores.row_nats)
        return scores.nats, scores.aux, scores.scored.sum()

    def _wait_for_device(self) -> None:
        """Count the work that is still queued on a GPU as time of training, before a rate is computed."""
        if self.world.device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize(self.world.device)
            self.seconds += time.perf_counter() - began

    def _validate(self, log: MetricsLog | None, progress: Progress, stop: StopRequest) -> None:
        """Evaluate, unless the log has it: a process killed right after its record resumes at the same step.

        Where a stop is asked for it ends early, and the evaluation remains due. Raises Diverged for a loss gone wrong.
        """
        self._evaluation_due = True
        missing = self.world.any(log is not None and not log.has_evaluation(self.step))
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
                window=self._window,
                batch_size=self.config.evaluate_batch_size,
                protocol="chunk" if self.config.state == "chunk" else "utterance",
                chunk=self.config.chunk,
                world=self.world,
                autocast=self.config.autocast(self.world.device),
                max_tokens=self.config.evaluate_tokens,
                stop=stop,
            )
            self._evaluation_due = False
            if log is not None:
                self._require_run_dir()
                self._report(result, log, progress, stop)
            self.world.barrier()

    def _report(self, result: Evaluation, log: MetricsLog, progress: Progress, stop: StopRequest) -> None:
        nats = result.nats_per_token
        progress.write(f"step {self.step}: validation {nats:.4f} nats = {bits(nats):.4f} bits per token")
        log.write("evaluate", step=self.step, seconds=round(self.seconds, 3), nll_nats=nats, nll_bits=bits(nats))
        if self._on_evaluate is not None:
            random_numbers = torch.get_rng_state()
            with suppress(Stopped):
                self._on_evaluate(self.model, self.step, log, stop)
            torch.set_rng_state(random_numbers)


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another of its name; None where there is none."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _crossed(before: int, after: int) -> Callable[[int], bool]:
    """Whether a multiple of the argument lies in (before, after]: steps may advance by more than one."""
    return lambda every: after // every > before // every
