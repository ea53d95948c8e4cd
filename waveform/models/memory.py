"""What a Compressive Transformer remembers of its streams, the times of its slots, and the clock that ends windows.

Shape letters: B rows, T steps of a call, W window, e window slots in use, M memory slots, C compressed slots, K
attended slots, G = W // c groups that a window becomes, D model width, L layers, c compression rate.

Windows start at multiples of W in each row's stream, however it is cut into calls. One counter per row, the number of
tokens read, decides which slots are in use and when a window ends:

    attended by a window     [ compressed, c steps each | memory | window up to the query ]
    at its end               the oldest W of [memory; window] leave; each c of them become a compressed slot

Steps that are left over when W is not a multiple of c are dropped, as in the authors' code (DeepMind's Sonnet), and so
is the first window of a stream that leaves only in part because M is not a multiple of W. So all windows leave alike,
and a slot's time follows from its place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from waveform.engine.interface import to_device
from waveform.models.attention import Slots, attention_bias, encode_times
from waveform.models.transformer_config import CompressiveTransformerConfig, LayerKind


class CompressiveState(NamedTuple):
    """Memories of B streams. Slots are right-aligned: the newest is last, empty ones are first."""

    steps: Tensor  # [B] int64 on the CPU: tokens read since the row's reset
    window: Tensor  # [B, L, W, D]: inputs of each layer in the unfinished window, from slot 0
    # [B, L, C + M, D]: compressed memory, then memory, which holds inputs of the layer; a layer with smaller memories
    # uses the last slots only
    slots: Tensor
    usage: Tensor  # [B, L, M]: attention received by memory; [B, L, 0] unless the compression looks at it


def empty_state(
    config: CompressiveTransformerConfig, batch_size: int, *, device: torch.device | str, dtype: torch.dtype
) -> CompressiveState:
    """State of `batch_size` streams of which nothing has been read; slots are of `dtype`."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(batch_size, config.num_layers, *shape, device=device, dtype=dtype)

    # With empty_memory=zeros, a fresh stream counts as one whose memories are full of zeros.
    first_step = config.steps_to_full if config.empty_memory == "zeros" else 0
    return CompressiveState(
        steps=torch.full((batch_size,), first_step, dtype=torch.int64),
        window=zeros(config.window, config.d_model),
        slots=zeros(max(kind.config.compressed + kind.config.memory for kind in config.kinds), config.d_model),
        # Sums in bf16 would lose small weights.
        usage=zeros(
            max(kind.config.memory for kind in config.kinds) if config.tracks_usage else 0,
            dtype=torch.promote_types(dtype, torch.float32),
        ),
    )


def of_layers(
    config: CompressiveTransformerConfig, state: CompressiveState, layers: int | slice
) -> tuple[Tensor, Tensor]:
    """Slots and usage of one layer [B, ...], or of several alike [B, l, ...]; config: that of these layers."""
    slots, usage = state.slots[:, layers], state.usage[:, layers]
    first = slots.shape[-2] - config.compressed - config.memory
    return slots[..., first:, :], usage[..., max(usage.shape[-1] - config.memory, 0) :]


def part_of(kind: LayerKind, state: CompressiveState) -> CompressiveState:
    """The state of the layers of one kind."""
    part = slice(kind.layers.start, kind.layers.stop)
    slots, usage = of_layers(kind.config, state, part)
    return state._replace(window=state.window[:, part], slots=slots, usage=usage)


def joined(parts: Sequence[CompressiveState], *, like: CompressiveState) -> CompressiveState:
    """The state of all layers, from those of each kind (`part_of`), in the shapes of `like`."""
    if len(parts) == 1:
        return parts[0]
    slots = [F.pad(part.slots, (0, 0, like.slots.shape[2] - part.slots.shape[2], 0)) for part in parts]
    usage = [F.pad(part.usage, (like.usage.shape[2] - part.usage.shape[2], 0)) for part in parts]
    windows = [part.window for part in parts]
    return parts[0]._replace(window=torch.cat(windows, 1), slots=torch.cat(slots, 1), usage=torch.cat(usage, 1))


# The clock


class Occupancy(NamedTuple):
    """How full the memories are after a number of steps; each [B] int64 on the CPU."""

    phase: Tensor  # steps into the window
    memory: Tensor  # slots in use
    compressed: Tensor  # slots in use
    evicted: Tensor  # whole windows that ever left memory


def occupancy(config: CompressiveTransformerConfig, steps: Tensor) -> Occupancy:
    """How full the memories are once `steps` [B] tokens have been read."""
    finished = steps // config.window
    evicted = (finished - config.windows_in_memory).clamp(min=0)
    return Occupancy(
        phase=steps % config.window,
        memory=(finished * config.window).clamp(max=config.memory),
        compressed=(evicted * config.groups).clamp(max=config.compressed),
        evicted=evicted,
    )


def slot_times(config: CompressiveTransformerConfig) -> Tensor:
    """Times of the slots [compressed; memory; window] relative to the window's start, [C + M + W] in fp64.

    A compressed slot's time is the centre of the c steps that it covers (`compressed_position=time`), or one step
    before the next slot's, so that the newest comes just before memory (`contiguous`) or the window (`window`).
    """
    age = torch.arange(config.compressed - 1, -1, -1)  # of compressed slots; 0 is the newest
    if config.compressed_position == "time":
        window = 1 + age // config.groups  # how many windows before memory
        group = config.groups - 1 - age % config.groups  # of that window
        compressed = -config.memory - config.window * window + config.compression_rate * (group + 0.5) - 0.5
    else:
        compressed = -1.0 - age - (config.memory if config.compressed_position == "contiguous" else 0)
    return torch.cat([compressed.double(), torch.arange(-config.memory, config.window, dtype=torch.float64)])


Rows = Tensor | bool  # which rows of a call: all (True), none (False), or [B] bool on the device


@dataclass(frozen=True)
class Clock:
    """What layers of a kind share in a call within a window. Not a tuple, so that FSDP leaves its counters on the CPU.

    `through_time` is kept here because a layer that is computed again in the backward pass must do what it did before.
    """

    num_new: int  # steps
    end: int  # window slots in use after them
    num_memory: int  # the most memory slots that any row has in use
    num_compressed: int  # the same for compressed slots
    places: Tensor | None  # [B, T] where the steps are written in the window, on the device; None: from `end` - T on
    slots: Slots
    ends: Rows  # those whose window ends with these steps
    evicts: Rows  # those whose memory then evicts a whole window
    through_time: bool  # gradient reaches the compressor from later windows

    def is_steady(self, config: CompressiveTransformerConfig) -> bool:
        """Whether the call is a whole window over full memories, alike in all rows, as most calls in training are.

        Shapes are then always the same, with or without a mask for rows whose compressed memory is still filling.
        """
        full = self.num_memory == config.memory and self.num_compressed == config.compressed
        alike = self.places is None and isinstance(self.evicts, bool) and self.slots.first_used is None
        return self.num_new == config.window and full and alike


def windows(
    kinds: Sequence[LayerKind], steps: Tensor, num_new: int, **of_clock: Any
) -> Iterator[tuple[slice, list[Clock]]]:
    """Cut `num_new` tokens after `steps` [B] at the windows' ends: parts of the call, and clocks by kind of layer.

    of_clock: further arguments of `clock_of`.
    """
    start, window = 0, kinds[0].config.window
    while start < num_new:
        length = min(window - int((steps % window).max()), num_new - start)
        yield slice(start, start + length), [clock_of(config, steps, length, **of_clock) for config, _ in kinds]
        start, steps = start + length, steps + length


def clock_of(
    config: CompressiveTransformerConfig,
    steps: Tensor,
    num_new: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    through_time: bool = False,
) -> Clock:
    """The clock of `num_new` tokens after `steps` [B]; no row may pass the end of its window.

    Encodings of times are of `dtype` on `device`.
    """
    now, after = occupancy(config, steps), occupancy(config, steps + num_new)
    num_memory, num_compressed, end = int(now.memory.max()), int(now.compressed.max()), int(now.phase.max()) + num_new
    # Compressed slots are in use only if all of memory is, so the slots in use are the last ones.
    num_past, in_use = num_compressed + num_memory, now.compressed + now.memory
    in_phase = _all_equal(now.phase)
    aligned = in_phase and _all_equal(in_use)
    query_times = (now.phase[:1] if aligned else now.phase)[:, None] + torch.arange(num_new)
    places = None if in_phase else to_device(query_times, device)
    times = slot_times(config)[None, config.compressed + config.memory - num_past :][:, : num_past + end]
    # Only vectors are sent to the device; matrices [T, K] are made there.
    query_times, times = to_device(query_times, device), to_device(times, device)
    visible = bias = first_used = None
    if not aligned or config.same_length:
        first = num_past - (in_use[:1] if aligned else in_use)
        distances = query_times[:, :, None] - times[:, None, :]
        visible = to_device(torch.arange(num_past + end) >= first[:, None], device)[:, None] & (distances >= 0)
        if config.same_length:
            visible &= distances < config.memory
        visible = visible[:, None]
        if device.type == "cpu" and in_phase and not config.same_length:
            first_used = tuple(first.tolist())
        else:
            bias = attention_bias(visible, dtype=dtype)
    of_queries, of_slots = (
        encode_times(t, num_position_features=config.num_position_features, dtype=dtype) for t in (query_times, times)
    )
    if config.compressed_apart:  # features of their own
        is_compressed = (torch.arange(of_slots.shape[1], device=device) < num_compressed)[:, None]
        of_slots = torch.cat([of_slots * ~is_compressed, of_slots * is_compressed], dim=-1)
    return Clock(
        num_new=num_new,
        end=end,
        num_memory=num_memory,
        num_compressed=num_compressed,
        places=places,
        slots=Slots(query_times, times, of_queries, of_slots, visible, bias, first_used, num_compressed),
        ends=_rows(after.phase == 0, device),
        evicts=_rows(after.evicted > now.evicted, device),
        through_time=through_time,
    )


def _all_equal(x: Tensor) -> bool:
    return bool((x == x[0]).all())


def _rows(chosen: Tensor, device: torch.device) -> Rows:
    return bool(chosen[0]) if _all_equal(chosen) else to_device(chosen, device)


# What is read and written; tensors are of one layer [B, ..., D] or of all [B, L, ..., D]


def attended_slots(config: CompressiveTransformerConfig, slots: Tensor, window: Tensor, clock: Clock) -> Tensor | None:
    """What a layer's queries attend to besides themselves, [B, K - T or K, D], oldest first; None if there is nothing.

    window: with the new steps written. Rows at the same position continue where they stopped. Otherwise the new steps
    have different places in their windows, so all of the window is attended to (RelativeAttention.forward).
    """
    in_window = window[:, : clock.end - clock.num_new] if clock.places is None else window
    slots = slots[:, config.compressed + config.memory - clock.num_compressed - clock.num_memory :]
    past = torch.cat([slots.to(window.dtype), in_window], dim=1) if in_window.shape[1] else slots.to(window.dtype)
    return past if past.shape[1] else None


def write_window(old: Tensor, new: Tensor, clock: Clock) -> Tensor:
    """The first `clock.end` slots of the window, with `new` [..., T, D] written at each row's phase, in its dtype."""
    if clock.places is None:
        first = clock.end - clock.num_new
        return torch.cat([old[..., :first, :].to(new.dtype), new], dim=-2) if first else new
    places = clock.places.view(len(new), *[1] * (new.dim() - 3), -1, 1).expand_as(new)
    return old[..., : clock.end, :].to(new.dtype).scatter(-2, places, new)


def evicted(config: CompressiveTransformerConfig, slots: Tensor, window: Tensor) -> Tensor:
    """The oldest W steps of [memory; window], or more if one group needs more: groups are made of them. [..., n, D]."""
    num_evicted = max(config.window, config.num_consumed)
    memory = slots[..., config.compressed :, :].to(window.dtype)
    first = max(num_evicted - config.memory, 0)
    return torch.cat([memory[..., :num_evicted, :], window[..., :first, :]], dim=-2)


def after_call(
    config: CompressiveTransformerConfig,
    state: CompressiveState,
    window: Tensor,
    groups: Tensor | None,
    usage: Tensor,
    clock: Clock,
) -> CompressiveState:
    """The state after a call: at the end of a window evict, append, and shift.

    window [B, L, e, D]: with the new steps; groups [B, L, G, D]: what the evicted steps became, None if none were
    evicted; usage: with the attention of the call.
    """
    steps, dtype = state.steps + clock.num_new, state.slots.dtype
    if clock.ends is not True:  # some windows go on
        kept = torch.cat([window.to(dtype), state.window[:, :, clock.end :]], dim=2)
        state = state._replace(window=kept)
    if clock.ends is not False:
        compressed, memory = state.slots.split([config.compressed, config.memory], dim=2)
        entering = window[:, :, max(config.window - config.memory, 0) :].to(dtype)
        shifted = _in_rows(clock.ends, [memory[:, :, config.window :], entering], memory)
        appended = [compressed]
        if groups is not None:
            newest = groups[:, :, -config.compressed :].to(dtype)
            appended = _in_rows(clock.evicts, [compressed[:, :, newest.shape[2] :], newest], compressed)
        if usage.shape[2]:
            (usage,) = _in_rows(clock.ends, [F.pad(usage[:, :, config.window :], (0, config.window))], usage)
        state = state._replace(slots=torch.cat([*appended, *shifted], dim=2))
    return state._replace(steps=steps, usage=usage)


def add_usage(usage: Tensor, received_BK: Tensor, clock: Clock) -> Tensor:
    """usage [B, M] of a layer, with the attention that its slots received in a call."""
    added = received_BK[:, clock.num_compressed : clock.num_compressed + clock.num_memory]
    return usage + F.pad(added, (usage.shape[1] - clock.num_memory, 0)).to(usage.dtype)


def average_use(config: CompressiveTransformerConfig, usage: Tensor) -> Tensor:
    """usage [..., M] at a window's end -> mean attention that each evicted step received from a query, [..., G c]."""
    step = torch.arange(config.groups * config.compression_rate, device=usage.device)
    windows_seen = -((step - config.memory) // config.window)  # windows that each slot has been in memory
    return usage[..., : len(step)] / (windows_seen * config.window)


def _in_rows(rows: Rows, parts: list[Tensor], old: Tensor) -> list[Tensor]:
    """Parts of a tensor [B, L, ...]: `parts` in the rows `rows` (True or [B], never False), `old` in the others."""
    if isinstance(rows, bool):
        return parts
    return [torch.where(rows.view(-1, *[1] * (old.dim() - 1)), torch.cat(parts, dim=2), old)]
