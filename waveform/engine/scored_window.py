"""The NLL of one window: one forward pass through model and head, in training as in evaluation.

Shape letters: B rows of this rank, W tokens of a window.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from waveform.engine.interface import SequenceModel, State, Step, optional_parts, reset_rows, to_device
from waveform.engine.streams import Window


class ScoredWindow(NamedTuple):
    """The model's NLL of one window."""

    nll: Tensor  # [B, W] nats, meaningless where not scored
    scored: Tensor  # [B, W] bool, on the model's device
    state: State
    aux: Tensor  # auxiliary losses, summed over the rows without padding

    @property
    def nats(self) -> Tensor:
        """Sum of the NLL over scored tokens."""
        return torch.where(self.scored, self.nll, 0).sum()

    @property
    def row_nats(self) -> Tensor:
        """[B] sums of the NLL over each row's scored tokens, without gradient."""
        return torch.where(self.scored, self.nll.detach(), 0).sum(dim=1)


def uses_kernel_threads(model: SequenceModel, *, device: torch.device, autocast: torch.dtype | None) -> bool:
    """Whether the model runs on `device` in kernels of its own, which share their work among threads themselves."""
    return device.type == "cpu" and autocast is None and optional_parts(model).has_own_threads


class _Inputs:
    """Arguments of a forward, hidden from FSDP: it moves the tensor arguments of its root to the GPU, and a state's
    counters belong on the CPU."""

    def __init__(self, tokens: Tensor, targets: Tensor, state: State) -> None:
        self.tokens, self.targets, self.state = tokens, targets, state


class ScoredForward(nn.Module):
    """A model and its head in one forward, because sharded weights are complete only within a forward."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: _Inputs) -> tuple[Tensor, Step]:
        """NLL in nats [B, W] of the targets, and what the model returned."""
        step = self.model.forward(inputs.tokens, inputs.state)
        return self.model.head.nll(step.hidden, inputs.targets), step


def score_window(
    scored_forward: ScoredForward,
    window: Window,
    state: State,
    *,
    fresh: State,
    device: torch.device,
    autocast: torch.dtype | None,
) -> ScoredWindow:
    """One forward pass: of training, with gradients enabled, and of evaluation, without.

    fresh: the state that a reset gives to rows; autocast: dtype of matrix products, None for the parameters' own.
    """
    state = reset_rows(state, fresh, window.reset)
    inputs, targets, scored = (to_device(t, device) for t in (window.inputs, window.targets, window.scored))
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        nll, step = scored_forward(_Inputs(inputs, targets, state))
    # A row with padding is left out: its losses may be of padded steps, in any number of the model's own windows.
    whole = scored[:, -1]
    aux = sum((torch.where(whole, loss, 0).sum() for loss in step.aux_losses.values()), torch.zeros((), device=device))
    return ScoredWindow(nll, scored, step.state, aux)
