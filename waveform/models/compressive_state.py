"""What a Compressive Transformer remembers of its streams, and all that follows from how far each has been read.

Shape letters: B rows, T steps of a call, W window, e window slots in use, M memory slots, C compressed slots, K
attended slots, D model width, L layers, c compression rate.

Windows lie at multiples of W in each row's stream, however the stream is cut into calls. One counter a row, the number
of tokens read, decides which slots are in use, what time each slot has and when a window ends:

    attended by window w     [ compressed, c steps each | memory | window w up to the query ]
    at its end               the oldest W of [memory; window] leave; c of them at a time become a compressed slot
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from waveform.engine.interface import to_device
from waveform.models.attention import Slots, attention_bias, encode_times
from waveform.models.compression import compression_function
from waveform.models.label_embedding import RowLabels
from waveform.models.linear_prediction import PredictionState
from waveform.models.transformer_config import CompressiveTransformerConfig


class LayerState(NamedTuple):
    """One layer's part of the state. Slots are right-aligned: the newest is last, empty ones are first."""

    window: Tensor  # [B, W, D]: inputs of the layer in the unfinished window, from slot 0
    memory: Tensor  # [B, M, D]: inputs of the layer
    compressed: Tensor  # [B, C, D]
    pending: Tensor  # [B, c - 1, D]: evicted, waiting for their group to fill
    usage: Tensor  # [B, c - 1 + M]: attention received by [pending; memory]; only if the compression looks at it
    times: Tensor | None  # [B, C]: of compressed slots, relative to the window's start; only if they have their own


class CompressiveState(NamedTuple):
    """Memories of B streams: the fields of `LayerState` for every layer, and one counter a row."""

    steps: Tensor  # [B] int64 on the CPU: tokens read since the row's reset
    window: tuple[Tensor, ...]  # L x [B, W, D]
    memory: tuple[Tensor, ...]  # L x [B, M, D]
    compressed: tuple[Tensor, ...]  # L x [B, C, D]
    pending: tuple[Tensor, ...]  # L x [B, c - 1, D]
    usage: tuple[Tensor, ...]  # L x [B, c - 1 + M]
    times: tuple[Tensor, ...]  # L x [B, C]; empty if compressed slots have no times of their own
    labels: RowLabels = ()  # of the utterances that are read; empty without labels
    predictors: tuple[PredictionState, ...] = ()  # one, or none without linear prediction

    @classmethod
    def of_layers(cls, steps: Tensor, layers: Iterable[LayerState]) -> "CompressiveState":
        window, memory, compressed, pending, usage, times = zip(*layers, strict=True)
        own_times = tuple(time for time in times if time is not None)
        return cls(steps, window, memory, compressed, pending, usage, own_times)

    def layers(self) -> list[LayerState]:
        times = self.times or (None,) * len(self.window)
        fields = (self.window, self.memory, self.compressed, self.pending, self.usage, times)
        return [LayerState(*parts) for parts in zip(*fields, strict=True)]


def empty_state(
    config: CompressiveTransformerConfig, batch_size: int, *, device: torch.device | str, dtype: torch.dtype
) -> CompressiveState:
    """State of `batch_size` streams of which nothing has been read; slots are of `dtype`."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch_size, *shape, device=device, dtype=dtype) for _ in range(config.num_layers))

    precise = torch.promote_types(dtype, torch.float32)
    waiting = config.compression_rate - 1 if config.compressed else 0
    tracks_usage = config.compressed > 0 and compression_function(config.compression).uses_attention
    steps = torch.full((batch_size,), _first_step(config), dtype=torch.int64)
    # A slot of an empty memory of zeros stands at the centre of a group, as if it had been pooled.
    centres = _group_centres(config, fill_at(config, steps).pending, num_compressed=config.compressed)
    times = [centres.clone() for _ in range(config.num_layers)] if config.keeps_times else []
    return CompressiveState(
        steps=steps,
        window=zeros(config.window, config.d_model),
        memory=zeros(config.memory, config.d_model),
        compressed=zeros(config.compressed, config.d_model),
        pending=zeros(waiting, config.d_model),
        # Sums in bf16 would lose small weights, and times would lose steps.
        usage=zeros(waiting + config.memory if tracks_usage else 0, dtype=precise),
        times=tuple(time.to(device, precise) for time in times),
    )


def _first_step(config: CompressiveTransformerConfig) -> int:
    """0; or, if empty memory counts as zeros, enough whole windows for every slot to hold one."""
    if config.empty_memory == "mask":
        return 0
    return config.window * -(-(config.memory + config.compression_rate * (config.compressed + 1)) // config.window)


# What follows from the counters


class Fill(NamedTuple):
    """How full the memories are after a number of steps; each [B] int64 on the CPU."""

    phase: Tensor  # steps into the window
    memory: Tensor  # slots in use
    evicted: Tensor  # steps that ever left memory
    groups: Tensor  # compressed slots ever made
    compressed: Tensor  # slots in use
    pending: Tensor  # evicted, not yet compressed


def fill_at(config: CompressiveTransformerConfig, steps: Tensor) -> Fill:
    """steps [B]: tokens read."""
    finished = steps // config.window * config.window
    evicted = (finished - config.memory).clamp(min=0)
    groups = evicted // config.compression_rate
    return Fill(
        phase=steps % config.window,
        memory=finished.clamp(max=config.memory),
        evicted=evicted,
        groups=groups,
        compressed=groups.clamp(max=config.compressed),
        pending=evicted % config.compression_rate,
    )


def slot_times(
    config: CompressiveTransformerConfig, pending: Tensor, *, num_compressed: int, num_memory: int, end: int
) -> Tensor:
    """Times of the slots [compressed; memory; window] relative to the window's start, [rows of `pending`, K] in fp64.

    A compressed slot's time is the centre of the c steps that it covers, which come before memory and what is pending
    (`compressed_position=time`), or one step before the next slot's (`contiguous`). Slots with times of their own
    have those of the state instead (`with_own_times`).
    """
    if config.compressed_position == "time":
        compressed_times = _group_centres(config, pending, num_compressed=num_compressed)
    else:
        compressed_times = torch.arange(-num_compressed, 0, dtype=torch.float64) - config.memory
        compressed_times = compressed_times.expand(len(pending), -1)
    unit_steps = torch.arange(-num_memory, end, dtype=torch.float64).expand(len(pending), -1)
    return torch.cat([compressed_times, unit_steps], dim=1)


def _group_centres(config: CompressiveTransformerConfig, pending: Tensor, *, num_compressed: int) -> Tensor:
    """Centres of the newest groups that were compressed, relative to the window's start, [rows of `pending`, n]."""
    rate = config.compression_rate
    age = torch.arange(num_compressed - 1, -1, -1, dtype=torch.float64)  # 0 is the newest
    newest = -(config.memory + pending.to(torch.float64)) - (rate + 1) / 2
    return newest[:, None] - rate * age


def source_times(config: CompressiveTransformerConfig, *, device: torch.device) -> Tensor:
    """Times of [pending; evicted] at a window's end, relative to the start of the next, [c - 1 + W]."""
    first = -(config.memory + config.window + config.compression_rate - 1)
    return torch.arange(first, -config.memory, device=device)


def with_own_times(config: CompressiveTransformerConfig, state: LayerState, piece: "Piece") -> Slots:
    """The piece's slots, the compressed ones at the times that they have in this layer."""
    slots, num = piece.slots, piece.num_compressed
    if state.times is None or not num:
        return slots
    own_times = state.times[:, config.compressed - num :]
    own_encoding = encode_times(
        own_times, num_position_features=config.num_position_features, dtype=slots.slot_encoding.dtype
    )
    others, other_encodings = slots.slot_times[:, num:], slots.slot_encoding[:, num:]
    num_rows = len(own_times)
    return slots._replace(
        slot_times=torch.cat([own_times, others.expand(num_rows, -1)], dim=1),
        slot_encoding=torch.cat([own_encoding, other_encodings.expand(num_rows, -1, -1)], dim=1),
    )


class PartToCompress(NamedTuple):
    """Complete groups among [pending; evicted] at a window's end, in rows that have the same number of them."""

    rows: slice | Tensor  # of B; a slice if it is all rows, for views instead of copies; else on the device
    first: int  # of [pending; evicted]
    last: int
    was_attended: bool  # none of these slots was pending: all were in memory or window until now


class Advance(NamedTuple):
    """How a number of steps, within one window, moves each row on; the same for every layer."""

    before: Fill
    some_done: bool  # the window of at least one row ends with these steps
    all_done: bool
    done_mask: Tensor | None  # [B] bool on the device: whose window ends; None if that of every row does, or of none
    evicts: bool  # something leaves the memory of at least one row
    parts: tuple[PartToCompress, ...]  # what is compressed at the end, from the oldest on


def advance(
    config: CompressiveTransformerConfig, steps: Tensor, num_new: int | Tensor, *, device: torch.device
) -> Advance:
    """From `steps` [B] to `steps + num_new`; no row may pass the end of its window. device: that of the slots."""
    before, after = fill_at(config, steps), fill_at(config, steps + num_new)
    done = after.phase == 0
    parts = tuple(_parts_to_compress(config, before, after, device=device)) if config.compressed else ()
    some_done, all_done = bool(done.any()), bool(done.all())
    done_mask = to_device(done, device) if some_done != all_done else None
    return Advance(before, some_done, all_done, done_mask, bool((after.evicted > before.evicted).any()), parts)


def _parts_to_compress(
    config: CompressiveTransformerConfig, before: Fill, after: Fill, *, device: torch.device
) -> Iterator[PartToCompress]:
    """Which slots to compress, from the oldest on; `rows` are on `device`."""
    available = torch.where(after.phase == 0, before.pending + after.evicted - before.evicted, 0)
    num_slots = config.compression_rate - 1 + config.window
    for count in sorted({int(n) for n in available if n >= config.compression_rate}):
        chosen = available == count
        rows = slice(None) if bool(chosen.all()) else to_device(chosen.nonzero()[:, 0], device)
        first = num_slots - count
        last = first + count // config.compression_rate * config.compression_rate
        yield PartToCompress(rows, first, last, not bool(before.pending[chosen].any()))


@dataclass(frozen=True)
class Piece:
    """What all layers share in one call within a window. Not a tuple, so that FSDP leaves its counters on the CPU.

    `through_time` is kept here because a layer that is computed again in the backward pass must do what it did before.
    """

    advance: Advance
    num_new: int
    end: int  # window slots in use after this piece
    num_memory: int  # the most slots that a row has in use
    num_compressed: int  # the same for compressed slots
    places: Tensor | None  # [B, T] where the steps are written in the window, on the device; None: after `end` - T
    slots: Slots  # as in every layer, but for `with_own_times`
    through_time: bool  # gradient reaches the compressor from later windows


def is_steady(config: CompressiveTransformerConfig, piece: Piece) -> bool:
    """Whether it is a whole window over full memories that all rows end and evict alike, as nearly all are in training.

    Shapes are then always the same, with or without a mask for rows whose compressed memory is still filling.
    """
    return (
        piece.num_new == config.window
        and piece.places is None
        and piece.advance.all_done
        and piece.num_memory == config.memory
        and piece.num_compressed == config.compressed
        and all(isinstance(part.rows, slice) for part in piece.advance.parts)
    )


def next_piece(
    config: CompressiveTransformerConfig,
    steps: Tensor,
    num_new: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    through_time: bool,
) -> Piece:
    """The piece of `num_new` steps after `steps` [B]; its encodings of times are of `dtype` on `device`."""
    advanced = advance(config, steps, num_new, device=device)
    before = advanced.before
    end = int(before.phase.max()) + num_new
    num_memory, num_compressed = int(before.memory.max()), int(before.compressed.max())
    aligned = all(_all_equal(field) for field in (before.phase, before.memory, before.compressed, before.pending))
    fill = Fill(*(field[:1] for field in before)) if aligned else before
    query_times = fill.phase[:, None] + torch.arange(num_new)
    places = None if _all_equal(before.phase) else to_device(query_times, device)
    times = slot_times(config, fill.pending, num_compressed=num_compressed, num_memory=num_memory, end=end)
    # Vectors go to the device; what is quadratic is made there.
    query_times, times = to_device(query_times, device), to_device(times, device)
    visible = None
    if not aligned or config.same_length:
        in_use = torch.cat(
            [
                torch.arange(num_compressed) >= num_compressed - fill.compressed[:, None],
                torch.arange(num_memory) >= num_memory - fill.memory[:, None],
                torch.ones(len(fill.phase), end, dtype=torch.bool),
            ],
            dim=1,
        )
        distances = query_times[:, :, None] - times[:, None, :]
        visible = to_device(in_use, device)[:, None] & (distances >= 0)
        if config.same_length:
            visible &= distances < config.memory
        visible = visible[:, None]
    query_encoding, slot_encoding = (
        encode_times(t, num_position_features=config.num_position_features, dtype=dtype) for t in (query_times, times)
    )
    bias = None if visible is None else attention_bias(visible, dtype=dtype)
    slots = Slots(query_times, times, query_encoding, slot_encoding, visible, bias)
    return Piece(advanced, num_new, end, num_memory, num_compressed, places, slots, through_time)


# What a layer writes and moves


def attended_slots(
    config: CompressiveTransformerConfig, state: LayerState, window_BeD: Tensor, piece: Piece
) -> Tensor | None:
    """What the queries attend to besides themselves, [B, K - T or K, D], oldest first; None if there is nothing.

    Rows at the same position continue where they stopped. Otherwise the new steps have different places in their
    windows, so all of `window_BeD`, the window with the new steps written, is attended to (RelativeAttention.forward).
    """
    old_end = piece.end - piece.num_new
    in_window = state.window[:, :old_end].to(window_BeD.dtype) if piece.places is None else window_BeD
    compressed = state.compressed[:, config.compressed - piece.num_compressed :]
    past = torch.cat([compressed, state.memory[:, config.memory - piece.num_memory :], in_window], dim=1)
    return past if past.shape[1] else None


def write_window(old_BWD: Tensor, new_BTD: Tensor, piece: Piece) -> Tensor:
    """The first `piece.end` slots of the window with `new_BTD` written at each row's phase; of its dtype."""
    if piece.places is None:
        first = piece.end - piece.num_new
        return torch.cat([old_BWD[:, :first].to(new_BTD.dtype), new_BTD], dim=1) if first else new_BTD
    places = piece.places[..., None].expand_as(new_BTD)
    return old_BWD[:, : piece.end].to(new_BTD.dtype).scatter(1, places, new_BTD)


def evict(config: CompressiveTransformerConfig, memory_BMD: Tensor, window_BWD: Tensor) -> tuple[Tensor, Tensor]:
    """[memory; window] -> its oldest W slots, which leave, and the other M, which are memory from now on."""
    # The two are not joined: the new memory would be a view that keeps all of it alive.
    memory_BMD, first = memory_BMD.to(window_BWD.dtype), max(config.window - config.memory, 0)
    evicted = torch.cat([memory_BMD[:, : config.window], window_BWD[:, :first]], dim=1)
    return evicted, torch.cat([memory_BMD[:, config.window :], window_BWD[:, first:]], dim=1)


def add_usage(usage: Tensor, received_BK: Tensor, piece: Piece) -> Tensor:
    """Add the attention received to the memory slots that took part."""
    added = received_BK[:, piece.num_compressed : piece.num_compressed + piece.num_memory]
    return usage + F.pad(added, (usage.shape[1] - piece.num_memory, 0)).to(usage.dtype)


def split_usage(config: CompressiveTransformerConfig, usage: Tensor) -> tuple[Tensor, Tensor]:
    """usage of [pending; memory] -> average use of [pending; evicted], and the usage to keep after the shift."""
    if not usage.shape[1]:
        return usage, usage
    waiting = config.compression_rate - 1
    evicted = torch.arange(config.window, device=usage.device)
    windows_seen = -((evicted - config.memory) // config.window)  # each slot's windows in memory
    average = usage[:, waiting : waiting + config.window] / (windows_seen * config.window)
    source = torch.cat([usage[:, :waiting], average], dim=1)
    kept = F.pad(usage[:, waiting + config.window :], (0, config.window))
    return source, torch.cat([source[:, config.window :], kept], dim=1)


def where_rows(rows: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows where `rows` [B] is true (None: in all), `old` elsewhere; always of `old`'s dtype."""
    new = new.to(old.dtype)
    return new if rows is None else torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old)


def put_rows(rows: slice | Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in place of those `rows` of `old`; a slice means all of them."""
    return new if isinstance(rows, slice) else old.index_put((rows,), new)


def _all_equal(x: Tensor) -> bool:
    return bool((x == x[0]).all())
