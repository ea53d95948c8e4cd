"""The settings of `train`: what they are, what they may be, and what follows from them, such as the learning rate."""

import math
from dataclasses import dataclass
from typing import Annotated, cast

import torch

from waveform.engine.trackers import TRACKERS, require_installed
from waveform.ranks.distributed import TIMEOUT_S
from waveform.system.errors import UserError
from waveform.system.rules import BELOW_1, NOT_NEGATIVE, PART, POSITIVE, Rule, check_rules, one_of, whole_number

_MAX_CHUNK = 2**24  # far above any that was ever trained on: a stop waits for the end of a step

_LIMIT = Rule(lambda value: value is None or value > 0, "it must be above 0, or null for no limit")
_DEVICE = Rule(
    lambda value: value in (None, "cpu", "cuda", "mps"),
    "choose cpu, cuda or mps, or null for a CUDA GPU if there is one",
)
_Count = Annotated[int, Rule(lambda value: value >= 1, "it must be at least 1")]
_Steps = Annotated[int, NOT_NEGATIVE]
_Limit = Annotated[float | None, _LIMIT]
_Positive = Annotated[float, POSITIVE]
_FromZero = Annotated[float, NOT_NEGATIVE]
_Share = Annotated[float, BELOW_1]
_Part = Annotated[float, PART]
_Timeout = Annotated[float, Rule(lambda value: 1 <= value <= 1e9, "it must be from 1 to 1e9")]


@dataclass
class BaseTrainConfig:
    """Fields of `train` of every run. A step is one chunk of every row; tokens of audio are samples."""

    # Stop after this many steps; the learning rate follows them. null: no limit; the learning rate follows the clock,
    # so a resumed run is not bit-identical to an uninterrupted one.
    max_steps: Annotated[int | None, _LIMIT] = 100_000
    max_seconds: _Limit = None  # stop after this much time spent on training itself; null: no limit
    count_waiting: bool = True  # whether training time includes waiting for a core that other programs use
    batch_size: _Count = 32  # rows (streams) over all processes
    chunk: Annotated[int, whole_number(1, _MAX_CHUNK)] = 3840  # tokens of each row in one step
    unroll: _Count = 1  # windows through which gradients flow (BPTT)
    lr: _Positive = 3e-4  # peak learning rate of Adam
    lr_floor: _FromZero = 1e-6  # learning rate at which warm-up begins and the cosine ends
    beta2: _Share = 0.999  # decay of Adam's second moment
    warmup_steps: _Steps = 4000  # steps of linear warm-up, from lr_floor to lr
    # length of the cosine; null: the steps that max_steps leaves after warm-up, or max_seconds if that is null too
    decay_steps: _Steps | None = None
    lr_change_at: _Steps | None = None  # step from which the learning rate is lr_after (Figure 3's study); null: never
    lr_after: _FromZero = 0.0  # learning rate from lr_change_at on
    clip_norm: _Positive = 0.1  # limit on the trunk's gradient norm, and separately on the compressor's
    aux_weight: _FromZero = 1.0  # factor of auxiliary losses; Adam makes the compressor's own nearly indifferent to it
    checkpoint_every: _Count = 1000  # steps
    keep_checkpoints: _Count = 2  # how many of the newest checkpoints are kept
    log_every: _Count = 20  # steps
    # tensorboard | trackio | wandb | none: where to show curves and sounds, in addition to metrics.jsonl
    log: Annotated[str, one_of(*TRACKERS)] = "tensorboard"
    device: Annotated[str | None, _DEVICE] = None  # cpu | cuda | mps (Apple); null: a CUDA GPU if there is one
    timeout_s: _Timeout = TIMEOUT_S  # seconds that a rank waits for the others in training before it gives up the job

    # Settings of `TrainConfig`, fixed for runs in which there is nothing to choose.
    state, sharding = "utterance", "none"
    update_period, compile = 1, False
    evaluate_every = math.inf  # never
    evaluate_every_seconds = cast(float | None, None)  # never
    evaluate_tokens = cast(int | None, 0)  # none are held out

    def __post_init__(self) -> None:
        check_rules(self, section="train")
        require_installed(self.log)
        if self.max_steps is None and self.max_seconds is None:
            raise UserError("train.max_steps and train.max_seconds are both null; set one, or training never ends")

    def autocast(self, device: torch.device) -> torch.dtype | None:
        """dtype of matrix products, None for the parameters' own."""
        return None

    def share(self, step: int, seconds: float) -> float:
        """Share of the budget that is used up, of steps or of seconds, whichever is more."""
        limits = ((step, self.max_steps), (seconds, self.max_seconds))
        return max(done / limit for done, limit in limits if limit is not None)

    @property
    def budget(self) -> tuple[float, str]:
        """What progress counts up to, and its unit: steps if their number is limited, else seconds."""
        if self.max_steps is not None:
            return self.max_steps, "step"
        assert self.max_seconds is not None
        return self.max_seconds, "s"

    def learning_rate(self, step: int, seconds: float) -> float:
        """The learning rate of the update at `step`, counted from 0, after `seconds` of training.

        Linear warm-up from the floor to the peak, then a cosine back (Rae et al. 2019, section 5). A peak below the
        floor is kept.
        """
        if self.lr_change_at is not None and step >= self.lr_change_at:
            return self.lr_after
        floor = min(self.lr_floor, self.lr)
        warmed_up = (step + 1) / max(self.warmup_steps, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * self.decayed(step, seconds)))
        return floor + (self.lr - floor) * min(1.0, warmed_up, cosine)

    def decayed(self, step: int, seconds: float) -> float:
        """Share of the cosine that has passed, from 0 to 1."""
        decay_steps = self.decay_steps
        if decay_steps is None and self.max_steps is not None:
            decay_steps = self.max_steps - self.warmup_steps
        if decay_steps is not None:
            share = (step - self.warmup_steps) / max(decay_steps, 1)
        else:
            assert self.max_seconds is not None
            share = seconds / self.max_seconds
        return min(max(share, 0.0), 1.0)


@dataclass
class TrainConfig(BaseTrainConfig):
    """Fields of `train` of runs on a data set: those of every run, and these."""

    # tokens of one forward and backward pass; null: the model's window, or the chunk
    window: Annotated[int, whole_number(1)] | None = None
    # when a row's state is reset
    state: Annotated[str, one_of("carry", "utterance", "chunk")] = "utterance"
    loss_share: _Part = 1.0  # share of each window, at its end, that is learned from (half: Dai et al. 2019, Table 6)
    label_dropout: _Share = 0.1  # share of the labels that training reads as unknown, so that sampling needs none
    update_period: _Count = 4  # chunks per update late in training
    update_period_from: _Steps = 60_000  # step from which update_period applies
    evaluate_every: _Count = 1000  # steps
    # seconds of training itself between evaluations, in addition to evaluate_every; null: by steps alone
    evaluate_every_seconds: _Limit = None
    # about how many tokens of the validation split are scored, in pieces that are spread evenly over it, each from
    # empty memories; null: all; 0: no evaluation
    evaluate_tokens: _Steps | None = 2_000_000
    # auto: bf16 matrix products on CUDA, fp32 on CPU; fp32; bf16
    precision: Annotated[str, one_of("auto", "fp32", "bf16")] = "auto"
    # none: each process has all weights; fsdp: weights, gradients and Adam's state are spread over the processes
    sharding: Annotated[str, one_of("none", "fsdp")] = "none"
    checkpoint_activations: bool = False  # backward computes each layer again instead of keeping its activations
    compile: bool = False  # torch.compile for the layers' forward and backward; the first steps wait for it
    # stop | skip: what to do at a step whose loss or gradient is not finite; see `TokenLearner`
    on_nonfinite: Annotated[str, one_of("stop", "skip")] = "stop"
    max_skipped: _Count = 10  # consecutive steps that may be skipped before training stops after all

    def autocast(self, device: torch.device) -> torch.dtype | None:
        wants = self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")
        return torch.bfloat16 if wants else None

    def chunks_of_update(self, step: int) -> int:
        """Chunks whose gradients make the update at `step`: 1, and `update_period` late in training (section 5.5.1)."""
        return self.update_period if step >= self.update_period_from else 1
