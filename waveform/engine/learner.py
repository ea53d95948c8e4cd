"""What a trainer (engine/trainer.py) trains: weights, their optimiser and a state, which every update changes.

It knows no files. `TokenLearner` learns from streams of tokens, an agent (recipes/reinforcement) from what it does.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from waveform.engine.checkpoint import TrainingProgress
from waveform.engine.interface import SequenceModel, State, fp64_device, optional_parts
from waveform.engine.scored_window import uses_kernel_threads
from waveform.engine.train_config import BaseTrainConfig
from waveform.ranks.distributed import World
from waveform.system.cpu import waited_s
from waveform.system.threads import torch_in_one_thread


class Learner(ABC):
    """Every rank has one, and all make the same calls at the same time."""

    unit = "token"  # what `tokens_seen` counts
    state: State  # of this rank's rows

    def __init__(
        self, module: nn.Module, model: SequenceModel, config: BaseTrainConfig, *, fresh: State, world: World
    ) -> None:
        """module: all weights, on the device; model: the one in it; fresh: the state of rows that have read nothing."""
        self.module, self.model, self.parts, self.config = module, model, optional_parts(model), config
        self.fresh, self.world = fresh, world
        self.groups = parameter_groups(module, model)
        parameters = [parameter for group in self.groups.values() for parameter in group]
        self.optimiser = torch.optim.Adam(parameters, lr=config.lr, betas=(0.9, config.beta2), fused=True)
        self.step, self.seconds, self.tokens_seen = 0, 0.0, 0
        # Since the last record, on this rank: what `_figures` is given, and how long it waited for a core.
        self.sums, self.waited_s = torch.zeros(4, dtype=torch.float64, device=fp64_device(world.device)), 0.0
        self._recorded = (self.seconds, self.tokens_seen)  # at the last record, or when it was restored

    @property
    def runs_in_kernels(self) -> bool:
        """Whether updates run in the model's own kernels, to which torch leaves all threads but one.

        Not with `train.unroll` above 1: kernels then run only the last window of each group.
        """
        device, config = self.world.device, self.config
        return config.unroll == 1 and uses_kernel_threads(self.model, device=device, autocast=config.autocast(device))

    def prepare_kernels(self) -> None:
        """Compile the model's own kernels, if it has any, so that no step waits for them."""
        if self.world.device.type == "cpu" and self.config.autocast(self.world.device) is None:
            self.parts.prepare_kernels()

    def update(self) -> Any:
        """Make one update, and count its steps, tokens and time. Returns what `_update` does; raises Diverged."""
        began, waited_before_s = time.perf_counter(), waited_s()  # in this order, so that waiting is part of the time
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.learning_rate(self.step, self.seconds)
        with torch_in_one_thread() if self.runs_in_kernels else nullcontext():
            made = self._update()
        waited = waited_s() - waited_before_s
        if not self.config.count_waiting:  # one that waits for a core keeps the others waiting
            waited = self.world.largest(int(waited * 1e6))[0] / 1e6
        self.waited_s += waited
        self.seconds += time.perf_counter() - began - (0 if self.config.count_waiting else waited)
        return made

    @abstractmethod
    def _update(self) -> Any: ...

    def wait_for_device(self) -> None:
        """Count the work that is still queued on a GPU as time of training."""
        if self.world.device.type != "cpu":
            began = time.perf_counter()
            getattr(torch, self.world.device.type).synchronize()
            self.seconds += time.perf_counter() - began

    @property
    def skipped(self) -> int:
        """Steps whose update was left out."""
        return 0

    def require_finite(self) -> None:
        """Raises Diverged if an update was not finite; looks at those that were not looked at yet."""
        return None

    def record(self) -> tuple[dict[str, Any], str]:
        """A record of the steps since the last one, over all ranks, and its most important figures in words."""
        self.require_finite()
        self.wait_for_device()
        figures, words = self._figures(*self.world.sum_(self.sums).tolist())
        seconds, tokens_seen = self._recorded
        rate = (self.tokens_seen - tokens_seen) / max(self.seconds - seconds, 1e-9)
        record = {
            "seconds": round(self.seconds, 3),
            f"{self.unit}s_seen": self.tokens_seen,
            f"{self.unit}s_per_second": rate,
            "lr": self.optimiser.param_groups[0]["lr"],
            **figures,
        }
        self.sums.zero_()
        self.waited_s, self._recorded = 0.0, (self.seconds, self.tokens_seen)
        return record, words

    @abstractmethod
    def _figures(self, *sums: float) -> tuple[dict[str, Any], str]:
        """Figures of `sums`, over all ranks, and of the last update; and the most important of them in words."""

    def progress(self, **others: Any) -> TrainingProgress:
        """What a checkpoint keeps besides weights, optimiser, state and random numbers; others: what callers know."""
        first, second, third, fourth = self.world.sum_(self.sums.clone()).tolist()
        return TrainingProgress(
            step=self.step,
            num_ranks=self.world.size,
            seconds=self.seconds,
            tokens_seen=self.tokens_seen,
            since_log=(first, second, third, fourth),
            waited_s=self.waited_s,
            **{"cursor": {}, **others},
        )

    def restore(self, progress: TrainingProgress, state: State) -> None:
        """Go on from what a checkpoint kept; weights and optimiser must have been restored already."""
        self.state, self.step, self.seconds = state, progress.step, progress.seconds
        self.tokens_seen, self.waited_s = progress.tokens_seen, progress.waited_s
        self._recorded = (self.seconds, self.tokens_seen)
        if self.world.is_first:
            self.sums += torch.tensor(progress.since_log, dtype=torch.float64, device=self.sums.device)


def parameter_groups(module: nn.Module, model: SequenceModel) -> dict[str, list[nn.Parameter]]:
    """The parameters of `module` that are clipped together: `trunk`, and `compressor` if one learns from its own loss.

    They are clipped apart because the paper mixes no losses. model: `module`, or the part of it with the compressor.
    """
    compressor = optional_parts(model).compressor_parameters()
    apart = {id(parameter) for parameter in compressor}
    trunk = [parameter for parameter in module.parameters() if id(parameter) not in apart]
    return {"trunk": trunk, **({"compressor": compressor} if compressor else {})}


def clip(groups: Mapping[str, list[nn.Parameter]], norm: float) -> dict[str, Tensor]:
    """Scale each group's gradients in place to at most `norm`; returns what their norms were."""
    return {name: nn.utils.clip_grad_norm_(parameters, norm) for name, parameters in groups.items()}
