"""The contract between models and the engine: tokens and state in, hidden vectors and state out.

Shape letters: B rows (independent streams), T steps, D model width, V classes.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from waveform.system.errors import UserError

# A (possibly nested) NamedTuple or tuple of tensors, every one batch first. Counters live on the CPU, so that
# deciding where a window ends never waits for an accelerator.
State = Any
S = TypeVar("S")


class Step(NamedTuple):
    """What one call of a model returns."""

    hidden: Tensor  # [B, T, D], input of the head
    state: State  # the same shapes and dtypes as the state that came in
    aux_losses: dict[str, Tensor]  # each [B]: one value a row, a mean over everything else


@runtime_checkable
class Head(Protocol):
    """Maps hidden vectors to distributions over V classes."""

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, T, D], targets [B, T] -> NLL in nats [B, T]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] -> logits [B, T, V]."""
        ...


@runtime_checkable
class SequenceModel(Protocol):
    """A causal model of token streams. Input ids are 0..V, where V itself is the begin-of-utterance id."""

    @property
    def head(self) -> Head:
        """Maps `Step.hidden` to distributions."""
        ...

    # True: the returned state keeps its graph, for BPTT over several calls. False (default): it is detached.
    carry_gradient: bool

    def init_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> State:
        """State of `batch_size` streams of which nothing has been read."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All that is trained (`nn.Module` has it)."""
        ...

    def forward(self, tokens: Tensor, state: State) -> Step:
        """tokens [B, T], any T >= 1. Cutting a stream elsewhere never changes an output."""
        ...


class Decoder(Protocol):
    """One token in, the next token's logits out; keeps static buffers and belongs to one sampling loop."""

    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] (the inputs at this step) -> logits [B, V], good until the next step."""
        ...


@runtime_checkable
class DeviceDecoder(Decoder, Protocol):
    """A decoder whose steps leave the host alone for a while, so that a GPU can replay several as one graph.

    `step(tokens)` is `device_step(tokens)` and `passed(1)`.
    """

    @property
    def steps_to_host(self) -> int:
        """How many `device_step` may follow each other before `passed` has work to do."""
        ...

    def device_step(self, tokens: Tensor) -> Tensor:
        """As `step`, by operations on the device alone, on tensors that stay where they are in memory."""
        ...

    def passed(self, num_steps: int) -> None:
        """Count steps, at most `steps_to_host`, and do what is due after them."""
        ...


class ForwardDecoder:
    """The decoder of any model that brings none: one `forward` a token."""

    def __init__(self, model: SequenceModel, state: State) -> None:
        self._model, self._state = model, state

    def step(self, tokens: Tensor) -> Tensor:
        hidden, self._state, _ = self._model.forward(tokens[:, None], self._state)
        return self._model.head.logits(hidden)[:, 0]


def decoder(model: SequenceModel, state: State, *, int8: bool = False) -> Decoder:
    """The fastest decoder that `model` has, continuing from `state` (which it may consume).

    A model brings one by a method `decoder(state)`; if that also takes `int8`, it has one that computes with weights
    in 8 bits. Raises UserError where int8 is asked of a model that has none.
    """
    own = getattr(model, "decoder", None)
    if int8:
        if own is None or not has_int8_decoder(model):
            raise UserError(f"{type(model).__name__} has no int8 decoder; sample without int8")
        return own(state, int8=True)
    return own(state) if own is not None else ForwardDecoder(model, state)


def has_int8_decoder(model: SequenceModel) -> bool:
    """Whether `decoder(..., int8=True)` can be asked for (it may still refuse a device)."""
    own = getattr(model, "decoder", None)
    return own is not None and "int8" in inspect.signature(own).parameters


def map_state(function: Callable[..., Tensor], state: S, *others: S) -> S:
    """Apply `function` to the tensors that stand at each place of one or more states of the same structure."""
    return _map(function, state, *others)


def _map(function: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    if isinstance(state, Tensor):
        return function(state, *others)
    fields = [_map(function, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*fields) if hasattr(state, "_fields") else type(state)(fields)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting for what the device is doing."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # a copy from pageable memory is no asynchronous one
    return tensor.to(device, non_blocking=True)


def state_tensors(state: State) -> list[Tensor]:
    """Every tensor of a state, in a fixed order."""
    return [state] if isinstance(state, Tensor) else [tensor for part in state for tensor in state_tensors(part)]


def detach(state: S) -> S:
    """The same state, cut from the graph that made it."""
    return map_state(torch.Tensor.detach, state)


def take_rows(state: S, rows: Sequence[int]) -> S:
    """The state of some rows, in the order given."""
    return map_state(lambda tensor: tensor[list(rows)], state)


def reset_rows(state: S, fresh: S, rows: Tensor) -> S:
    """`state` with the rows where `rows` [B] (bool, on the CPU) is true taken from `fresh`."""
    if not rows.any():
        return state
    if rows.all():
        return fresh

    def pick(old: Tensor, new: Tensor) -> Tensor:
        mask = to_device(rows, old.device).view(-1, *[1] * (old.dim() - 1))
        return torch.where(mask, new, old)

    return map_state(pick, state, fresh)
