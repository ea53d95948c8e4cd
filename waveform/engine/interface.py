"""The contract between models and the engine: tokens and state in, hidden vectors and state out.

Shape letters: B rows (independent streams), T steps, D model width, V classes.
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from waveform.engine.drawing import DrawConfig, choose
from waveform.system.errors import UserError

WITHOUT_FP64 = {"mps"}  # types of devices; `mps`: Apple's GPUs

# A (possibly nested) NamedTuple or tuple of tensors, every one batch first. Counters live on the CPU, so that
# deciding where a window ends never waits for an accelerator.
State = Any


class Step(NamedTuple):
    """What one call of a model returns."""

    hidden: Tensor  # [B, T, D], input of the head
    state: State  # the same shapes and dtypes as the state that came in
    aux_losses: dict[str, Tensor]  # each [B], one value per row; the sum over calls is the same however they are cut


class Head(Protocol):
    """Maps hidden vectors to distributions over V classes."""

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, T, D], targets [B, T] -> NLL in nats [B, T]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] -> logits [B, T, V]."""


class SequenceModel(Protocol):
    """A causal model of token streams: the required part of the contract; `OptionalParts` is the rest.

    Input ids are 0..V, of which V itself begins an utterance. A model with N labels reads 0..V + N - 1, of which V + i
    begins an utterance with label i (models/label_embedding.py).
    """

    @property
    def head(self) -> Head:
        """Maps `Step.hidden` to distributions."""

    def init_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> State:
        """State of `batch_size` streams of which nothing has been read."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All that is trained (`nn.Module` has it)."""

    def forward(self, tokens: Tensor, state: State) -> Step:
        """tokens [B, T], any T >= 1. Cutting a stream elsewhere never changes an output.

        The returned state is detached, unless `OptionalParts.carry_gradient` is set.
        """


def begin_of_utterance(vocab_size: int, label: int = 0) -> int:
    """The input before the first token of an utterance: V, one above the token ids 0..V - 1, plus its label's number.

    A model keeps the label in its state, and adds a vector for it to every input until the next utterance begins.
    """
    return vocab_size + label


def shift_right(tokens: Tensor, *, vocab_size: int, label: int = 0) -> Tensor:
    """Tokens [..., T] of utterances from their start -> the inputs [..., T] that predict them."""
    first = torch.full_like(tokens[..., :1], begin_of_utterance(vocab_size, label))
    return torch.cat([first, tokens[..., :-1]], dim=-1)


class Decoder(ABC):
    """One token in, the next token's logits out; keeps its state in buffers, so it serves one set of streams.

    A subclass defines `step`, and `draw` too if it can draw without a return to Python between two tokens.
    """

    # Bytes of the weights, keys and values that a step reads, each once, if every slot is in use: they bound its speed.
    # None: unknown.
    bytes_per_step: int | None = None

    @property
    def steps_to_host(self) -> int:
        """How many steps may be taken in one go, without Python, before Python has work to do."""
        return sys.maxsize

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B], the inputs of this step -> logits [B, V], valid until the next step."""

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniform: Tensor, config: DrawConfig) -> Tensor:
        """tokens [B], the inputs of the first step, and uniform [n, B] fp32 in [0, 1) -> the tokens drawn [n, B].

        n steps, each with the inputs that `choose` draws from the logits of the one before.
        """
        drawn = torch.empty(uniform.shape, dtype=torch.int64, device=uniform.device)
        for t in range(len(uniform)):
            tokens = drawn[t] = choose(self.step(tokens), uniform[t], config=config)
        return drawn


class ForwardDecoder(Decoder):
    """The decoder of a model that brings none: one `forward` per token."""

    def __init__(self, model: SequenceModel, state: State) -> None:
        self._model, self._state = model, state

    def step(self, tokens: Tensor) -> Tensor:
        hidden, self._state, _ = self._model.forward(tokens[:, None], self._state)
        return self._model.head.logits(hidden)[:, 0]


class OptionalParts:
    """What a model may offer beyond `SequenceModel`: inherit from it, and override what the model has.

    The engine does without whatever is left at its default.
    """

    # The trainer sets it to True for BPTT over several calls: the returned state then keeps its graph.
    carry_gradient: bool = False
    # Set to True by train.checkpoint_activations: backward computes each layer again instead of keeping its
    # activations. None: the model cannot do that.
    checkpoint_activations: bool | None = None

    @property
    def why_no_int8(self) -> str | None:
        """Why this model, as it is, has no `decoder(..., int8=True)`, to tell the user; None: it has one."""
        return "this model has no int8 decoder"

    @property
    def has_own_threads(self) -> bool:
        """Whether, in fp32 on a CPU, it shares its work among threads itself, so that torch should not."""
        return False

    @property
    def receptive_field(self) -> int | None:
        """Tokens that one layer of attention, or a whole stack of convolutions, sees, the newest included.

        None: unknown. Analyses choose the lengths of contexts by it.
        """
        return None

    @property
    def trains_through_time(self) -> bool:
        """Whether some parameters learn only from the loss of later windows, so that train.unroll must be above 1."""
        return False

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Parameters that auxiliary losses train and the task loss never reaches; their gradient is clipped apart."""
        return []

    def sharding_units(self, window: int) -> list[nn.Module]:
        """Modules that FSDP may gather one at a time, for calls of `window` tokens.

        Their parameters must be used within their own forward only, and equally often on every rank.
        """
        return []

    def prepare_kernels(self) -> None:
        """Compile what training in fp32 on a CPU will need, so that the first step's time does not include it."""

    def compile_layers(self, window: int) -> bool:
        """Train from now on with layers compiled by torch.compile, in calls of `window` tokens (train.compile).

        False: the model has none that can be compiled. Raises UserError if its settings stand in the way.
        """
        return False

    def decoder(self, state: State, *, int8: bool = False) -> Decoder | None:
        """A faster way to step this model than `forward`, continuing from `state`, which it may consume.

        int8: compute with weights in 8 bits; only asked for if `why_no_int8` is None. None: there is none.
        """
        return None


def optional_parts(model: SequenceModel) -> OptionalParts:
    """The optional part of a model: the model itself if it inherits from `OptionalParts`, else the defaults."""
    return model if isinstance(model, OptionalParts) else OptionalParts()


def decoder(model: SequenceModel, state: State, *, int8: bool = False) -> Decoder:
    """The fastest decoder that `model` has, continuing from `state` (which it may consume).

    Raises UserError if int8 is asked of a model that has no such decoder.
    """
    parts = optional_parts(model)
    if int8 and parts.why_no_int8 is not None:
        raise UserError(f"{parts.why_no_int8}; sample without int8")
    made = parts.decoder(state, int8=int8)
    assert made is not None or not int8
    return made or ForwardDecoder(model, state)


def map_state(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply `function` to the corresponding tensors of one or more states of the same structure."""
    if isinstance(state, Tensor):
        return function(state, *others)
    fields = [map_state(function, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*fields) if hasattr(state, "_fields") else type(state)(fields)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, in fp32 if that has no fp64, without waiting for what the device is doing."""
    is_cuda = device.type == "cuda"
    if tensor.dtype == torch.float64 and device.type in WITHOUT_FP64:
        tensor = tensor.float()
    if is_cuda and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # a copy from pageable memory is not asynchronous
    return tensor.to(device, non_blocking=is_cuda)


def fp64_device(device: torch.device | str) -> torch.device:
    """Where a model on `device` computes what needs fp64: on the same device, or on the CPU if that has no fp64."""
    device = torch.device(device)
    return torch.device("cpu") if device.type in WITHOUT_FP64 else device


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in fp64, on its `fp64_device`."""
    return tensor.to(fp64_device(tensor.device)).double()


def for_drawing(model: SequenceModel) -> SequenceModel:
    """The model that tokens are drawn from: itself, or a copy on the CPU if its device has no fp64."""
    device = next(iter(model.parameters())).device
    if (other := fp64_device(device)) == device:
        return model
    assert isinstance(model, nn.Module)
    return copy.deepcopy(model).to(other)


def state_tensors(state: State) -> list[Tensor]:
    """Every tensor of a state, in a fixed order."""
    return [state] if isinstance(state, Tensor) else [tensor for part in state for tensor in state_tensors(part)]


def detach(state: State) -> State:
    """The same state, cut from the graph that made it."""
    return map_state(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, state)


def take_rows(state: State, rows: Sequence[int]) -> State:
    """The state of some rows, in the order given."""
    return map_state(lambda tensor: tensor[list(rows)], state)


def reset_rows(state: State, fresh: State, rows: Tensor) -> State:
    """`state` with the rows where `rows` [B] (bool, on the CPU) is true taken from `fresh`."""
    if not rows.any():
        return state
    if rows.all():
        return fresh

    @cache
    def rows_on(device: torch.device) -> Tensor:
        return to_device(rows, device)

    def pick(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(rows_on(old.device).view(-1, *[1] * (old.dim() - 1)), new, old)

    return map_state(pick, state, fresh)
