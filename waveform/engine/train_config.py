"""The settings of `train`: what they are, what they may be, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from waveform.engine.schedule import FLOOR_LR, learning_rate
from waveform.ranks.distributed import TIMEOUT_S
from waveform.system.errors import UserError
from waveform.system.rules import Rule, check_rules, one_of, or_null, whole_number

SHARDING = ("none", "fsdp")
ON_NONFINITE = ("stop", "skip")

_MAX_CHUNK = 2**24  # far above any that was ever trained on: a stop waits for the end of a step

_AT_LEAST_1 = Rule(lambda value: value >= 1, "it must be at least 1")
_ABOVE_0 = Rule(lambda value: value > 0, "it must be above 0")
_NOT_NEGATIVE = Rule(lambda value: (value or 0) >= 0, "it must be 0 or more")
_LIMIT = or_null(_ABOVE_0, "for no limit")


@dataclass
class TrainConfig:
    """Fields of `train`. A step is one chunk of every row; tokens of audio are samples."""

    # Stop after so many steps, and let the learning rate follow them. null: no limit; it follows the clock, so a
    # resumed run is not bit-identical to an uninterrupted one.
    max_steps: int | None = 100_000
    max_seconds: float | None = None  # stop after so much time spent on training itself; null: no limit
    count_waiting: bool = True  # whether time in which training waits for a core that other programs use counts
    batch_size: int = 32  # rows (streams) over all processes
    chunk: int = 3840  # tokens of each row in one step
    window: int | None = None  # tokens of one forward and backward; null: the model's window, or the chunk
    unroll: int = 1  # windows through which gradients flow (BPTT)
    state: str = "utterance"  # carry | utterance | chunk: when a row's state starts afresh
    loss_share: float = 1.0  # of a window, its last part, whose loss is learned from (half: Dai et al. 2019, Table 6)
    lr: float = 3e-4  # peak learning rate of Adam
    lr_floor: float = FLOOR_LR  # at which warm-up begins and the cosine ends
    beta2: float = 0.999  # decay of Adam's second moment
    warmup_steps: int = 4000
    decay_steps: int | None = None  # cosine length; null: what max_steps leaves; if that is null too, max_seconds
    lr_change_at: int | None = None  # step from which the learning rate is lr_after (Figure 3's study); null: never
    lr_after: float = 0.0
    clip_norm: float = 0.1  # limit on the trunk's gradient norm, and separately on the compressor's
    aux_weight: float = 1.0  # factor of auxiliary losses; Adam makes the compressor's own nearly indifferent to it
    label_dropout: float = 0.1  # share of the labels that training reads as unknown, so that sampling needs none
    update_period: int = 4  # chunks per update late in training
    update_period_from: int = 60_000  # step at which that begins
    checkpoint_every: int = 1000  # steps
    keep_checkpoints: int = 2
    evaluate_every: int = 1000  # steps
    evaluate_every_seconds: float | None = None  # of training itself, besides evaluate_every; null: by steps alone
    evaluate_tokens: int | None = 2_000_000  # about how much of the validation split; null: all; 0: no evaluation
    log_every: int = 20  # steps
    precision: str = "auto"  # auto: bf16 matrix products on CUDA, fp32 on CPU; fp32; bf16
    device: str | None = None  # cpu | cuda; null: a GPU if there is one
    sharding: str = "none"  # none: each process has all weights; fsdp: weights, gradients and Adam's state are spread
    checkpoint_activations: bool = False  # backward computes each layer again instead of keeping its activations
    compile: bool = False  # torch.compile for the layers' forward and backward; the first steps wait for it
    timeout_s: float = TIMEOUT_S  # seconds that a rank waits for the others in training before it gives the job up
    on_nonfinite: str = "stop"  # stop | skip: at a step whose loss or gradient is not finite; see `TokenLearner`
    max_skipped: int = 10  # consecutive steps that may be skipped before training stops after all

    RULES: ClassVar[Mapping[str, Rule]] = {
        "max_steps": _LIMIT,
        "max_seconds": _LIMIT,
        "batch_size": _AT_LEAST_1,
        "chunk": whole_number(1, _MAX_CHUNK),
        "unroll": _AT_LEAST_1,
        "loss_share": Rule(lambda value: 0 < value <= 1, "it must be above 0 and at most 1"),
        "lr": _ABOVE_0,
        "lr_floor": _NOT_NEGATIVE,
        "beta2": Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1"),
        "warmup_steps": _NOT_NEGATIVE,
        "decay_steps": _NOT_NEGATIVE,
        "lr_change_at": _NOT_NEGATIVE,
        "lr_after": _NOT_NEGATIVE,
        "clip_norm": _ABOVE_0,
        "aux_weight": _NOT_NEGATIVE,
        "label_dropout": Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1"),
        "update_period": _AT_LEAST_1,
        "update_period_from": _NOT_NEGATIVE,
        "checkpoint_every": _AT_LEAST_1,
        "keep_checkpoints": _AT_LEAST_1,
        "evaluate_every": _AT_LEAST_1,
        "evaluate_every_seconds": _LIMIT,
        "evaluate_tokens": _NOT_NEGATIVE,
        "log_every": _AT_LEAST_1,
        "precision": one_of("auto", "fp32", "bf16"),
        "device": Rule(
            lambda value: value in (None, "cpu", "cuda"), "choose cpu or cuda, or null for a GPU if there is one"
        ),
        "sharding": one_of(*SHARDING),
        "timeout_s": Rule(lambda value: 1 <= value <= 1e9, "it must be from 1 to 1e9"),
        "on_nonfinite": one_of(*ON_NONFINITE),
        "max_skipped": _AT_LEAST_1,
    }

    def __post_init__(self) -> None:
        check_rules(self, self.RULES, section="train")
        if self.max_steps is None and self.max_seconds is None:
            raise UserError("train.max_steps and train.max_seconds are both null; set one, or training never ends")
        if self.window is not None and (self.window < 1 or self.chunk % self.window):
            raise UserError(f"train.chunk={self.chunk} is not a multiple of train.window={self.window}")

    def autocast(self, device: torch.device) -> torch.dtype | None:
        """dtype of matrix products, None for the parameters' own."""
        wants = self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")
        return torch.bfloat16 if wants else None

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
        """The learning rate of the update at `step`, after `seconds` of training."""
        return learning_rate(
            step,
            peak=self.lr,
            warmup_steps=self.warmup_steps,
            decayed=self.decayed(step, seconds),
            change_at=self.lr_change_at,
            after=self.lr_after,
            floor=self.lr_floor,
        )

    def decayed(self, step: int, seconds: float) -> float:
        """Share of the cosine that has passed, from 0 to 1."""
        if self.decay_steps is not None:
            return (step - self.warmup_steps) / max(self.decay_steps, 1)
        if self.max_steps is not None:
            return (step - self.warmup_steps) / max(self.max_steps - self.warmup_steps, 1)
        assert self.max_seconds is not None
        return seconds / self.max_seconds
