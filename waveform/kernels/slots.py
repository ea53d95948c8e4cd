"""What a compiled decoder remembers: keys and values in blocks of slots, and the inputs that compression will need.

Slots of memory and window form one ring, those of compressed memory another: a new window replaces what it evicts,
nothing moves, and only the slots' times are renewed at a window's end, for all layers and rows at once. Keys and
values lie in blocks of 64 slots, in the order in which a head reads them:

    keys    [L, B, H, block, d, 64]    logits of 64 slots grow together, one feature of the query after another
    values  [L, B, H, block, 64, d']   outputs of d' features (d padded to whole vectors), one slot after another

Shape letters: B rows, L layers, W window, M memory slots, C compressed slots, c compression rate, D model width,
H heads, d = D / H head width, P position features; D', d' padded to whole vectors.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from waveform.kernels.dense import pad_last, quantise, zeros
from waveform.kernels.vectors import padded
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.memory import CompressiveState, Occupancy, occupancy, slot_times
from waveform.models.position_query import angles
from waveform.models.transformer_config import CompressiveTransformerConfig

SLOTS = 64  # of a block
UNUSED = -1e30  # added to the logits of empty slots; finite, so that no arithmetic meets infinities


class Memory(NamedTuple):
    """What is remembered of the streams."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray  # [L, B, H, blocks * 64]; 64 ones if keys and values are not quantised
    value_scales: np.ndarray
    history: np.ndarray  # [L, B, M + W, D'] inputs of each layer, for compression; ring by step
    slot_encoding: np.ndarray  # [blocks, P, 64]: cosines, then sines
    mask: np.ndarray  # [blocks * 64]: 0 or UNUSED
    num_used: np.ndarray  # [blocks] slots in use
    rotations: np.ndarray  # [W, P]: cosines, then sines, of the times in a window


class Windows:
    """Sets, at the start of each window, which slots are in use and what their times are in it."""

    def __init__(self, config: CompressiveTransformerConfig, memory: Memory) -> None:
        self._config, self._memory = config, memory
        self._encoding = _encode(slot_times(config), config)  # in the order of time

    def begin(self, num_steps: int) -> None:
        """Begin, or continue, the window in which step `num_steps` lies."""
        config, memory = self._config, self._memory
        slots, used = _ring_slots(config, occupancy(config, torch.tensor([num_steps])), num_steps)
        memory.slot_encoding.swapaxes(1, 2)[slots // SLOTS, slots % SLOTS] = self._encoding
        memory.mask[:] = UNUSED
        memory.mask[used] = 0
        memory.num_used[:] = np.bincount(used // SLOTS, minlength=len(memory.num_used))


def _ring_slots(config: CompressiveTransformerConfig, now: Occupancy, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Where [compressed; memory; window] lie in the rings: all of their slots, and those that hold something."""
    start, num_groups = num_steps - int(now.phase), int(now.evicted) * config.groups
    groups = np.arange(num_groups - config.compressed, num_groups) % max(config.compressed, 1)
    steps = np.arange(start - config.memory, start + config.window)
    slots = np.concatenate([groups, config.compressed + steps % (config.memory + config.window)])
    first_in_window = config.compressed + config.memory
    used_groups = slots[config.compressed - int(now.compressed) : config.compressed]
    used_steps = slots[first_in_window - int(now.memory) : first_in_window + int(now.phase)]
    return slots, np.concatenate([used_groups, used_steps])


def _encode(times: Tensor, config: CompressiveTransformerConfig) -> np.ndarray:
    """times [..., n], fp64 -> cosines, then sines, of w t [..., n, P]."""
    w_t = angles(times, num_position_features=config.num_position_features)
    return torch.cat([w_t.cos(), w_t.sin()], dim=-1).float().numpy()


def lay_out_memory(model: CompressiveTransformer, state: CompressiveState, *, int8: bool) -> Memory:
    """The memory of a decoder that continues from `state`."""
    config, batch_size = model.config, len(state.steps)
    heads, d_head = config.num_heads, config.d_model // config.num_heads
    num_blocks = -(-(config.compressed + config.memory + config.window) // SLOTS)
    history_ring = config.memory + config.window if config.compressed else 0
    caches, kind = (config.num_layers, batch_size, heads), np.int8 if int8 else np.float32
    scales = (*caches, num_blocks * SLOTS) if int8 else (SLOTS,)
    memory = Memory(
        keys=np.zeros((*caches, num_blocks, d_head, SLOTS), dtype=kind),
        values=np.zeros((*caches, num_blocks, SLOTS, padded(d_head)), dtype=kind),
        key_scales=np.ones(scales, dtype=np.float32),
        value_scales=np.ones(scales, dtype=np.float32),
        history=zeros(config.num_layers, batch_size, history_ring, padded(config.d_model)),
        slot_encoding=zeros(num_blocks, config.num_position_features, SLOTS),
        mask=zeros(num_blocks * SLOTS),
        num_used=np.zeros(num_blocks, dtype=np.int64),
        rotations=_encode(torch.arange(config.window, dtype=torch.float64), config),
    )
    _write_keys_and_values(memory, model, state)
    if config.compressed:
        _write_history(memory, config, state)
    return memory


def _write_keys_and_values(memory: Memory, model: CompressiveTransformer, state: CompressiveState) -> None:
    config = model.config
    now = occupancy(config, state.steps[:1])
    first_group, first_step = config.compressed - int(now.compressed), config.memory - int(now.memory)
    _, used = _ring_slots(config, now, int(state.steps[0]))
    if not len(used):
        return
    compressed, of_memory = state.slots.split([config.compressed, config.memory], dim=2)
    for i, layer in enumerate(model.layers):
        in_window = state.window[:, i, : int(now.phase)]
        held = [compressed[:, i, first_group:], of_memory[:, i, first_step:], in_window]
        for b, row in enumerate(torch.cat(held, dim=1).float().split(1)):  # products of other sizes may round otherwise
            keys, key_scales = _blocks(layer.projection(row, layer.attention.key)[0], used, memory.keys)
            memory.keys[i, b] = keys.transpose(2, 3).numpy()
            values, value_scales = _blocks(layer.projection(row, layer.attention.value)[0], used, memory.keys)
            memory.values[i, b] = pad_last(values).numpy()
            if memory.keys.dtype == np.int8:
                memory.key_scales[i, b], memory.value_scales[i, b] = key_scales.numpy(), value_scales.numpy()


def _blocks(x: Tensor, slots: np.ndarray, cache: np.ndarray) -> tuple[Tensor, Tensor]:
    """x [H, n, d] at `slots` [n] of `cache`'s blocks, [H, blocks, 64, d] of its dtype; scales [H, blocks * 64]."""
    spread = torch.zeros(len(x), cache.shape[3] * SLOTS, x.shape[2])
    spread[:, torch.from_numpy(slots)] = x
    scales = torch.ones(spread.shape[:2])
    if cache.dtype == np.int8:
        spread, scales = quantise(spread)
    return spread.unflatten(1, (-1, SLOTS)), scales


def _write_history(memory: Memory, config: CompressiveTransformerConfig, state: CompressiveState) -> None:
    start = int(state.steps[0]) // config.window * config.window
    steps = np.arange(start - config.memory, start + config.window)
    inputs = torch.cat([state.slots[:, :, config.compressed :], state.window], dim=2).float()
    memory.history[:, :, steps % len(steps), : config.d_model] = inputs.transpose(0, 1).numpy()
