"""What a compiled decoder remembers: keys and values in blocks of slots, and the inputs that compression will need.

Slots of memory and window form one ring, those of compressed memory another: a new window replaces what it evicts,
nothing moves, and only the slots' times are renewed at a window's end, for all rows and for layers with the same sizes
at once. The rings are as large as the layer with the largest needs, so that a step has the same slot in all layers;
those with smaller memories do not look at the rest. Keys and values lie in blocks of 64 slots, in the order in which a
head reads them:

    keys    [L, B, H, block, d, 64]    logits of 64 slots grow together, one feature of the query after another
    values  [L, B, H, block, 64, d']   outputs of d' features (d padded to whole vectors), one slot after another

Shape letters: B rows, L layers, V views (one for each kind of layer), W window, M memory slots, C compressed slots,
both of the largest, D model width, H heads, d = D / H head width, P position features; D', d' padded to whole vectors.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from waveform.kernels.dense import pad_last, quantise, zeros
from waveform.kernels.vectors import padded
from waveform.models.attention import encode_times
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.memory import CompressiveState, Occupancy, occupancy, of_layers, slot_times
from waveform.models.transformer_config import CompressiveTransformerConfig, LayerKind

SLOTS = 64  # slots of a block
UNUSED = -1e30  # added to the logits of empty slots; finite, so that no arithmetic meets infinities


class Windows:
    """Sets, at the start of each window, which slots are in use and what their times are in it."""

    def __init__(self, kinds: Sequence[LayerKind], memory: Mapping[str, Any]) -> None:
        self._memory = memory
        # By kind of layer; encodings are in the order of time
        self._kinds = [(config, _encode(slot_times(config), config)) for config, _ in kinds]

    def begin(self, num_steps: int) -> None:
        """Begin, or continue, the window in which step `num_steps` lies."""
        memory = self._memory
        memory["mask"][:] = UNUSED
        for view, (config, encoding) in enumerate(self._kinds):
            slots, used = _ring_slots(config, memory, occupancy(config, torch.tensor([num_steps])), num_steps)
            memory["slot_encoding"][view].swapaxes(1, 2)[slots // SLOTS, slots % SLOTS] = encoding
            memory["mask"][view, used] = 0
            memory["num_used"][view] = np.bincount(used // SLOTS, minlength=memory["num_blocks"])


def _ring_slots(
    config: CompressiveTransformerConfig, memory: Mapping[str, Any], now: Occupancy, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where [compressed; memory; window] of a layer lie: all of their slots, and those that hold something."""
    start, num_groups = num_steps - int(now.phase), int(now.evicted) * config.groups
    groups = np.arange(num_groups - config.compressed, num_groups) % max(config.compressed, 1)
    steps = np.arange(start - config.memory, start + config.window)
    slots = np.concatenate([groups, memory["first_step_slot"] + steps % memory["step_ring"]])
    first_in_window = config.compressed + config.memory
    used_groups = slots[config.compressed - int(now.compressed) : config.compressed]
    used_steps = slots[first_in_window - int(now.memory) : first_in_window + int(now.phase)]
    return slots, np.concatenate([used_groups, used_steps])


def _encode(times: Tensor, config: CompressiveTransformerConfig) -> np.ndarray:
    """times [..., n], fp64 -> cosines, then sines, of w t [..., n, P]."""
    sin, cos = encode_times(times, num_position_features=config.num_position_features, dtype=torch.float64).chunk(2, -1)
    return torch.cat([cos, sin], dim=-1).float().numpy()


def caches_read(kinds: Sequence[LayerKind], memory: Mapping[str, Any]) -> list[np.ndarray]:
    """The cached keys and values that a step reads when memories are full; it passes over other blocks."""
    caches, read = [memory["keys"], memory["values"]], []
    if memory["quantised"]:
        scales = memory["key_scales"], memory["value_scales"]
        caches += [each.reshape(*memory["keys"].shape[:4], SLOTS) for each in scales]
    for config, layers in kinds:
        num_blocks = math.ceil(config.compressed / SLOTS) + math.ceil((config.memory + config.window) / SLOTS)
        read += [cache[i, :, :, :num_blocks] for cache in caches for i in layers]
    return read


def lay_out_memory(model: CompressiveTransformer, state: CompressiveState, *, int8: bool) -> dict[str, Any]:
    """The memory of a decoder that continues from `state`: what it remembers of the streams, and the sizes."""
    config, kinds = model.config, model.kinds
    compressed = max(kind.config.compressed for kind in kinds)
    steps = max(kind.config.memory + kind.config.window for kind in kinds)
    num_blocks, history_ring = -(-(compressed + steps) // SLOTS), steps if compressed else 0
    num_rows, d_head = len(state.steps), config.d_model // config.num_heads
    caches, kind = (config.num_layers, num_rows, config.num_heads), np.int8 if int8 else np.float32
    scales = (*caches, num_blocks * SLOTS) if int8 else (SLOTS,)
    memory = {
        "num_blocks": num_blocks,
        "num_views": len(kinds),
        "quantised": int8,
        # The slots of every layer: first compressed ones, then those of steps
        "first_step_slot": compressed,  # C
        "step_ring": steps,  # M + W
        "history_ring": history_ring,  # 0 without compressed memory
        "keys": np.zeros((*caches, num_blocks, d_head, SLOTS), dtype=kind),
        "values": np.zeros((*caches, num_blocks, SLOTS, padded(d_head)), dtype=kind),
        # [L, B, H, blocks * 64]; 64 ones if keys and values are not quantised
        "key_scales": np.ones(scales, dtype=np.float32),
        "value_scales": np.ones(scales, dtype=np.float32),
        # [L, B, M + W, D'] inputs of each layer, for compression; ring by step
        "history": zeros(config.num_layers, num_rows, history_ring, padded(config.d_model)),
        # [V, blocks, P, 64]: cosines, then sines
        "slot_encoding": zeros(len(kinds), num_blocks, config.num_position_features, SLOTS),
        "mask": zeros(len(kinds), num_blocks * SLOTS),  # 0 or UNUSED
        "num_used": np.zeros((len(kinds), num_blocks), dtype=np.int64),  # slots in use
        "views": np.repeat(np.arange(len(kinds)), [len(kind.layers) for kind in kinds]),  # [L] the view of each layer
        # [W, P]: cosines, then sines, of the times in a window
        "rotations": _encode(torch.arange(config.window, dtype=torch.float64), config),
    }
    for alike in kinds:
        _write(memory, model, state, alike)
    return memory


def _write(memory: Mapping[str, Any], model: CompressiveTransformer, state: CompressiveState, alike: LayerKind) -> None:
    """Write what the slots of these layers hold: keys and values, and the inputs that will be compressed."""
    config, now = alike.config, occupancy(alike.config, state.steps[:1])
    num_groups, num_steps = int(now.compressed), int(now.memory) + int(now.phase)
    if not num_groups + num_steps:
        return
    _, used = _ring_slots(config, memory, now, int(state.steps[0]))
    first, end = config.compressed + config.memory - (num_groups + int(now.memory)), int(now.phase)
    for i in alike.layers:
        layer = model.layers[i]
        held = torch.cat([of_layers(config, state, i)[0][:, first:], state.window[:, i, :end]], dim=1).float()
        if memory["history_ring"]:
            in_ring = used[num_groups:] - memory["first_step_slot"]
            memory["history"][i][:, in_ring, : config.d_model] = held[:, num_groups:].numpy()
        for b, row in enumerate(held.split(1)):  # row by row, because products of other sizes may round differently
            keys, key_scales = _blocks(layer.projection(row, layer.attention.key)[0], used, memory["keys"])
            memory["keys"][i, b] = keys.transpose(2, 3).numpy()
            values, value_scales = _blocks(layer.projection(row, layer.attention.value)[0], used, memory["keys"])
            memory["values"][i, b] = pad_last(values).numpy()
            if memory["quantised"]:
                memory["key_scales"][i, b], memory["value_scales"][i, b] = key_scales.numpy(), value_scales.numpy()


def _blocks(x: Tensor, slots: np.ndarray, cache: np.ndarray) -> tuple[Tensor, Tensor]:
    """x [H, n, d] at `slots` [n] of `cache`'s blocks, [H, blocks, 64, d] of its dtype; scales [H, blocks * 64]."""
    spread = torch.zeros(len(x), cache.shape[3] * SLOTS, x.shape[2])
    spread[:, torch.from_numpy(slots)] = x
    scales = torch.ones(spread.shape[:2])
    if cache.dtype == np.int8:
        spread, scales = quantise(spread)
    return spread.unflatten(1, (-1, SLOTS)), scales
