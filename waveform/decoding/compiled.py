"""Steps a CompressiveTransformer on a CPU with compiled kernels, near the speed at which memory can be read.

A step reads every weight and every cached key and value once; nothing else takes long. One compiled function does the
whole step; Python is needed once a step, and for compression, once a window.

Slots of memory and window form one ring, those of compressed memory another: a new window takes the places of what it
evicts, nothing moves, and only the slots' times are renewed at a window's end. Keys and values lie in blocks of 64
slots, so that a head reads them in the order in which they lie:

    keys    [L, B, H, block, d, 64]    logits of 64 slots grow together, one feature of the query after another
    values  [L, B, H, block, 64, d']   outputs of d' features (d padded to whole vectors), one slot after another

Rows are computed alike whatever their number (see kernels.py); attention over PART blocks at a time is put together in
an order that depends on the model alone, so neither do threads change a stream.

Shape letters: B rows, L layers, W window, M memory slots, C compressed slots, c compression rate, D model width,
H heads, d = D / H head width, P position features, D', d', ... padded to whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

from typing import NamedTuple, cast

import numba
import numpy as np
import torch
from torch import Tensor, nn

from waveform.decoding.kernels import (
    ADD,
    F32,
    GELU,
    SET,
    DenseWeights,
    copy,
    dense,
    layer_norm,
    of_layer,
    pad_last,
    padded,
    quantise,
    zeros,
)
from waveform.decoding.plan import make_plan, num_threads_for, share, shared_out
from waveform.decoding.simd import (
    add,
    address,
    compiled,
    convert,
    exp,
    fill,
    fma,
    get,
    largest,
    load,
    maximum,
    put,
    store,
    total,
)
from waveform.models import attention
from waveform.models.compressive_state import CompressiveState, fill_at, slot_times
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.heads import SoftmaxHead

I64 = np.int64(0)
_SLOTS = 64  # of a block
_PART = 8  # blocks that one task attends to
_UNUSED = -1e30  # added to the logits of slots that hold nothing; finite, so that no arithmetic meets infinities

_PROJECT, _ATTEND, _OUTPUT, _FEED_IN, _FEED_OUT, _HEAD, _ADOPT = range(7)


class _Weights(NamedTuple):
    """The weights of all layers."""

    embedding: np.ndarray  # [V + 1, D']
    attention_gain: np.ndarray  # [L, D'], as the following
    attention_bias: np.ndarray
    feedforward_gain: np.ndarray
    feedforward_bias: np.ndarray
    final_gain: np.ndarray  # [1, D']
    final_bias: np.ndarray
    projection: DenseWeights  # q, k, v and (q + v)^T W_R (cosine halves, then negated sine halves), each padded
    output: DenseWeights
    feed_in: DenseWeights
    feed_out: DenseWeights
    head: DenseWeights


class _Memory(NamedTuple):
    """What is remembered of the streams."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray  # [L, B, H, blocks * 64]; 64 ones where keys and values are not quantised
    value_scales: np.ndarray
    history: np.ndarray  # [L, B, c - 1 + M + W, D'] inputs of each layer, for compression; ring by step
    usage: np.ndarray  # [L, B, c - 1 + M + W] attention received by memory slots; ring by step; most_used only
    slot_encoding: np.ndarray  # [blocks, P, 64]: cosines, then sines
    mask: np.ndarray  # [blocks * 64]: 0 or _UNUSED
    num_used: np.ndarray  # [blocks] slots in use
    rotations: np.ndarray  # [W, P]: cosines, then sines, of the times in a window


class _Scratch(NamedTuple):
    """Values on their way through a step."""

    x: np.ndarray  # [B, D']
    normed: np.ndarray  # [B, D']
    projected: np.ndarray  # [B, 3 D' + (H P)']
    rotated: np.ndarray  # [B, H, P]
    weights: np.ndarray  # [B, H, blocks * 64], up to a factor for each part
    peaks: np.ndarray  # [B, H, parts] largest logit; then the factor
    sums: np.ndarray  # [B, H, parts]
    parts: np.ndarray  # [B, H, parts, d']
    mixed: np.ndarray  # [B, H d']
    inner: np.ndarray  # [B, F']
    logits: np.ndarray  # [B, V']
    groups: np.ndarray  # [B, groups, D'] new compressed slots of a layer
    group_keys: np.ndarray  # [B, groups, 3 D' + (H P)'] their projection


class _Sizes(NamedTuple):
    """Numbers that a step needs."""

    num_threads: int
    num_rows: int
    num_layers: int
    d_model: int
    width: int  # D'
    num_heads: int
    d_head: int
    d_padded: int  # d'
    num_features: int  # P
    num_projected: int
    num_inner: int
    num_logits: int
    num_blocks: int
    num_parts: int
    history_ring: int  # 0 without compressed memory
    tracks_usage: bool
    pre_norm: bool
    quantised: bool
    compressed: int
    memory: int
    window: int
    epsilon: float
    num_groups: int = 0  # new compressed slots of a row in `groups` of the scratch


@compiled
def _append(projected, layer, b, head, slot, p, kind):
    """Keep the key and the value of one head in a slot; `projected`: address of a row."""
    cache = (layer * p.num_rows + b) * p.num_heads + head
    block, lane = cache * p.num_blocks + slot // _SLOTS, slot % _SLOTS
    key, value = projected + (p.width + head * p.d_head) * 4, projected + (2 * p.width + head * p.d_head) * 4
    key_scale = value_scale = np.float32(1)
    if p.quantised:
        key_scale, value_scale = _scale_of(key, p.d_head), _scale_of(value, p.d_head)
        put(p.key_scales, block * _SLOTS + lane, key_scale)
        put(p.value_scales, block * _SLOTS + lane, value_scale)
    for i in range(p.d_head):
        put(p.keys, (block * p.d_head + i) * _SLOTS + lane, convert(get(key, i, F32) / key_scale, kind))
        put(p.values, (block * _SLOTS + lane) * p.d_padded + i, convert(get(value, i, F32) / value_scale, kind))


@compiled
def _scale_of(x, num):
    largest_size = np.float32(0)
    for i in range(num):
        largest_size = max(largest_size, abs(get(x, i, F32)))
    return largest_size / np.float32(127) if largest_size > 0 else np.float32(1)


@compiled
def _attend(layer, b, head, part, slot, p, kind):
    """One head of one row over one part of the slots; `slot` is appended where it lies in the part."""
    row_head = b * p.num_heads + head
    first, last = part * _PART, min((part + 1) * _PART, p.num_blocks)
    projected = p.projected + b * p.num_projected * 4
    if first <= slot // _SLOTS < last:
        _append(projected, layer, b, head, slot, p, kind)
    place = row_head * p.num_blocks * _SLOTS  # in `weights`
    cache = (layer * p.num_rows * p.num_heads + row_head) * p.num_blocks
    scaled = 1 if p.quantised else 0
    peaks = fill(np.float32(_UNUSED))
    for block in range(first, last):
        if get(p.num_used, block, I64) == 0:
            continue
        p0 = load(p.mask, block * _SLOTS, F32)
        p1 = load(p.mask, block * _SLOTS + 16, F32)
        p2 = load(p.mask, block * _SLOTS + 32, F32)
        p3 = load(p.mask, block * _SLOTS + 48, F32)
        at = block * p.num_features * _SLOTS
        for i in range(p.num_features):
            a = fill(get(p.rotated, row_head * p.num_features + i, F32))
            p0 = fma(a, load(p.slot_encoding, at, F32), p0)
            p1 = fma(a, load(p.slot_encoding, at + 16, F32), p1)
            p2 = fma(a, load(p.slot_encoding, at + 32, F32), p2)
            p3 = fma(a, load(p.slot_encoding, at + 48, F32), p3)
            at += _SLOTS
        c0 = c1 = c2 = c3 = fill(np.float32(0))
        at = (cache + block) * p.d_head * _SLOTS
        for i in range(p.d_head):
            q = fill(get(projected, head * p.d_head + i, F32))
            c0 = fma(q, load(p.keys, at, kind), c0)
            c1 = fma(q, load(p.keys, at + 16, kind), c1)
            c2 = fma(q, load(p.keys, at + 32, kind), c2)
            c3 = fma(q, load(p.keys, at + 48, kind), c3)
            at += _SLOTS
        at = (cache + block) * _SLOTS * scaled
        p0 = fma(c0, load(p.key_scales, at, F32), p0)
        p1 = fma(c1, load(p.key_scales, at + 16, F32), p1)
        p2 = fma(c2, load(p.key_scales, at + 32, F32), p2)
        p3 = fma(c3, load(p.key_scales, at + 48, F32), p3)
        peaks = maximum(peaks, maximum(maximum(p0, p1), maximum(p2, p3)))
        at = place + block * _SLOTS
        store(p.weights, at, p0)
        store(p.weights, at + 16, p1)
        store(p.weights, at + 32, p2)
        store(p.weights, at + 48, p3)
    peak = largest(peaks)
    away, sums = fill(-peak), fill(np.float32(0))
    mix = p.parts + (row_head * p.num_parts + part) * p.d_padded * 4
    for i in range(0, p.d_padded, 16):
        store(mix, i, fill(np.float32(0)))
    for block in range(first, last):
        if get(p.num_used, block, I64) == 0:
            continue
        here, there = place + block * _SLOTS, (cache + block) * _SLOTS * scaled
        for i in range(0, _SLOTS, 16):
            weights = exp(add(load(p.weights, here + i, F32), away))
            sums = add(sums, weights)
            store(p.weights, here + i, weights)
        _mix((cache + block) * _SLOTS * p.d_padded, here, there, mix, p, kind)
    put(p.peaks, row_head * p.num_parts + part, peak)
    put(p.sums, row_head * p.num_parts + part, total(sums))


@compiled
def _mix(values_at, weights_at, scales_at, mix, p, kind):
    """Add a block's values, weighted, to a part's sum."""
    width, i = p.d_padded, 0
    while i + 64 <= width:
        a, b, c, d = load(mix, i, F32), load(mix, i + 16, F32), load(mix, i + 32, F32), load(mix, i + 48, F32)
        at = values_at + i
        for slot in range(_SLOTS):
            w = fill(get(p.weights, weights_at + slot, F32) * get(p.value_scales, scales_at + slot, F32))
            a = fma(w, load(p.values, at, kind), a)
            b = fma(w, load(p.values, at + 16, kind), b)
            c = fma(w, load(p.values, at + 32, kind), c)
            d = fma(w, load(p.values, at + 48, kind), d)
            at += width
        store(mix, i, a)
        store(mix, i + 16, b)
        store(mix, i + 32, c)
        store(mix, i + 48, d)
        i += 64
    while i < width:
        sums = load(mix, i, F32)
        a = b = c = d = fill(np.float32(0))
        at = values_at + i
        for slot in range(0, _SLOTS, 4):
            a = _add_weighted(weights_at + slot, scales_at + slot, at, a, p, kind)
            b = _add_weighted(weights_at + slot + 1, scales_at + slot + 1, at + width, b, p, kind)
            c = _add_weighted(weights_at + slot + 2, scales_at + slot + 2, at + 2 * width, c, p, kind)
            d = _add_weighted(weights_at + slot + 3, scales_at + slot + 3, at + 3 * width, d, p, kind)
            at += 4 * width
        store(mix, i, add(sums, add(add(a, b), add(c, d))))
        i += 16


@compiled
def _add_weighted(weight, scale, at, sums, p, kind):
    w = fill(get(p.weights, weight, F32) * get(p.value_scales, scale, F32))
    return fma(w, load(p.values, at, kind), sums)


@compiled
def _combine(layer, window_start, p, kind):
    """Put the parts of each head together, and count the attention that memory slots received."""
    for row_head in range(p.num_rows * p.num_heads):
        first = row_head * p.num_parts
        peak = get(p.peaks, first, F32)
        for part in range(first + 1, first + p.num_parts):
            peak = max(peak, get(p.peaks, part, F32))
        whole = np.float32(0)
        for part in range(first, first + p.num_parts):
            factor = largest(exp(fill(get(p.peaks, part, F32) - peak)))
            put(p.peaks, part, factor)
            whole += factor * get(p.sums, part, F32)
        for part in range(first, first + p.num_parts):
            put(p.peaks, part, get(p.peaks, part, F32) / whole)
        for i in range(0, p.d_padded, 16):
            mixed = fill(np.float32(0))
            for part in range(first, first + p.num_parts):
                mixed = fma(fill(get(p.peaks, part, F32)), load(p.parts, part * p.d_padded + i, F32), mixed)
            store(p.mixed, row_head * p.d_padded + i, mixed)
    if p.tracks_usage:
        for b in range(p.num_rows):
            for step in range(max(0, window_start - p.memory), window_start):
                slot = p.compressed + step % (p.memory + p.window)
                received = np.float32(0)
                for row_head in range(b * p.num_heads, (b + 1) * p.num_heads):
                    factor = get(p.peaks, row_head * p.num_parts + slot // (_SLOTS * _PART), F32)
                    received += get(p.weights, row_head * p.num_blocks * _SLOTS + slot, F32) * factor
                at = (layer * p.num_rows + b) * p.history_ring + step % p.history_ring
                put(p.usage, at, get(p.usage, at, F32) + received / np.float32(p.num_heads))


@compiled
def _rotate(phase, p, kind):
    """The part of each query that meets the slots' encodings: (a_c - i a_s) e^{i w t}, real part first."""
    half = p.num_features // 2
    rotation = p.rotations + phase * p.num_features * 4
    for b in range(p.num_rows):
        for head in range(p.num_heads):
            source = p.projected + (b * p.num_projected + 3 * p.width + head * p.num_features) * 4
            target = p.rotated + (b * p.num_heads + head) * p.num_features * 4
            for i in range(half):
                real, imaginary = get(source, i, F32), get(source, half + i, F32)
                cosine, sine = get(rotation, i, F32), get(rotation, half + i, F32)
                put(target, i, real * cosine - imaginary * sine)
                put(target, half + i, real * sine + imaginary * cosine)


@compiled
def _adopt(first, last, layer, first_slot, p, kind):
    """Cache keys and values of new compressed slots, for a range of [rows, groups]."""
    for row in range(first, last):
        x = p.groups + row * p.width * 4
        if p.pre_norm:
            gain, bias = p.attention_gain + layer * p.width * 4, p.attention_bias + layer * p.width * 4
            layer_norm(x, x, gain, bias, p.width, p.d_model, p.epsilon)
    matrix = (p.projection, p.projection_scales, p.projection_biases)
    matrix = of_layer(matrix, layer, p.width, p.num_projected, kind)
    vectors = (p.width // 16, 3 * p.width // 16)  # keys and values
    dense(matrix, p.groups, p.group_keys, p.width, p.num_projected, (first, last), vectors, np.int64(SET), kind)
    for row in range(first, last):
        slot = (first_slot + row % p.num_groups) % p.compressed
        for head in range(p.num_heads):
            _append(p.group_keys + row * p.num_projected * 4, layer, row // p.num_groups, head, slot, p, kind)


@compiled
def _work(phase, part, num_parts, layer, slot, p, kind):
    """A thread's share of one phase of a layer."""
    if phase == _ATTEND:
        first, last = share(p.num_rows * p.num_heads * p.num_parts, part, num_parts)
        for task in range(first, last):
            row_head = task // p.num_parts
            _attend(layer, row_head // p.num_heads, row_head % p.num_heads, task % p.num_parts, slot, p, kind)
        return
    if phase == _ADOPT:
        first, last = share(p.num_rows * p.num_groups, part, num_parts)
        _adopt(first, last, layer, slot, p, kind)
        return
    if phase == _PROJECT:
        x, out, num_inputs, num_outputs, mode = p.normed, p.projected, p.width, p.num_projected, SET
        matrix = (p.projection, p.projection_scales, p.projection_biases)
    elif phase == _OUTPUT:
        x, out, num_inputs, num_outputs, mode = p.mixed, p.x, p.num_heads * p.d_padded, p.width, ADD
        matrix = (p.output, p.output_scales, p.output_biases)
    elif phase == _FEED_IN:
        x, out, num_inputs, num_outputs, mode = p.normed, p.inner, p.width, p.num_inner, GELU
        matrix = (p.feed_in, p.feed_in_scales, p.feed_in_biases)
    elif phase == _FEED_OUT:
        x, out, num_inputs, num_outputs, mode = p.inner, p.x, p.num_inner, p.width, ADD
        matrix = (p.feed_out, p.feed_out_scales, p.feed_out_biases)
    else:
        x, out, num_inputs, num_outputs, mode = p.normed, p.logits, p.width, p.num_logits, SET
        matrix = (p.head, p.head_scales, p.head_biases)
    matrix = of_layer(matrix, layer, num_inputs, num_outputs, kind)
    vectors = share(num_outputs // 16, part, num_parts)
    dense(matrix, x, out, num_inputs, num_outputs, (np.int64(0), p.num_rows), vectors, mode, kind)


_share_out = shared_out(_work)


@compiled
def _norm_rows(source, target, gain, bias, layer, p, kind):
    offset = layer * p.width * 4
    for b in range(p.num_rows):
        row = b * p.width * 4
        layer_norm(source + row, target + row, gain + offset, bias + offset, p.width, p.d_model, p.epsilon)


@compiled
def _begin_layer(layer, num_steps, p, kind):
    """What comes before a layer's projection: remember its input, norm it."""
    for b in range(p.num_rows):
        row = layer * p.num_rows + b
        if p.history_ring:
            at = row * p.history_ring + num_steps % p.history_ring
            copy(p.x + b * p.width * 4, p.history + at * p.width * 4, p.width)
            if p.tracks_usage:
                put(p.usage, at, np.float32(0))
    if p.pre_norm:
        _norm_rows(p.x, p.normed, p.attention_gain, p.attention_bias, layer, p, kind)
    else:
        copy(p.x, p.normed, p.num_rows * p.width)


@compiled
def _between(phase, layer, num_steps, p, kind):
    """The little that follows a phase and is not worth sharing."""
    if phase == _PROJECT:
        _rotate(num_steps % p.window, p, kind)
    elif phase == _ATTEND:
        _combine(layer, num_steps - num_steps % p.window, p, kind)
    elif phase == _OUTPUT:
        if p.pre_norm:
            _norm_rows(p.x, p.normed, p.feedforward_gain, p.feedforward_bias, layer, p, kind)
        else:
            _norm_rows(p.x, p.x, p.attention_gain, p.attention_bias, layer, p, kind)
            copy(p.x, p.normed, p.num_rows * p.width)
    elif phase == _FEED_OUT:
        if not p.pre_norm:
            _norm_rows(p.x, p.x, p.feedforward_gain, p.feedforward_bias, layer, p, kind)
        if layer + 1 < p.num_layers:
            _begin_layer(layer + 1, num_steps, p, kind)
        elif p.pre_norm:
            _norm_rows(p.x, p.normed, p.final_gain, p.final_bias, 0, p, kind)
        else:
            copy(p.x, p.normed, p.num_rows * p.width)


@compiled(entry=True)
def _run(tokens, first_phase, place, plan, kind):
    """first_phase _PROJECT: read tokens [B], the inputs of step `place`, and leave the logits in the scratch.

    first_phase _ADOPT: cache the groups in the scratch from slot `place` on, in layer tokens[0]. One function does
    both, because each function that Python calls has the kernels compiled for itself.
    """
    p, step = plan[0], place
    slot = p.compressed + step % (p.memory + p.window)
    num_phases = p.num_layers * _HEAD + 1
    if first_phase == _ADOPT:
        num_phases, slot = 1, place
    else:
        put(p.num_used, slot // _SLOTS, get(p.num_used, slot // _SLOTS, I64) + 1)
        put(p.mask, slot, np.float32(0))
        for b in range(p.num_rows):
            copy(p.embedding + tokens[b] * p.width * 4, p.x + b * p.width * 4, p.width)
        _begin_layer(0, step, p, kind)
    for i in range(num_phases):
        layer, phase = i // _HEAD, i % _HEAD
        if first_phase == _ADOPT:
            layer, phase = tokens[0], _ADOPT
        elif layer == p.num_layers:
            layer, phase = 0, _HEAD
        _share_out(phase, layer, slot, plan, kind)
        _between(phase, layer, step, p, kind)


class CompiledDecoder:
    """Steps an fp32 CompressiveTransformer on the CPU; all rows are equally far.

    int8: weights and cached keys and values are kept in 8 bits, with a scale for each output, or slot and head.
    """

    @torch.inference_mode()
    def __init__(self, model: CompressiveTransformer, state: CompressiveState, *, int8: bool = False) -> None:
        config = self._config = model.config
        self._model, self._int8 = model, int8
        self._num_steps = int(state.steps[0])
        self._batch = len(state.steps)
        self._ring = config.memory + config.window
        self._history_ring = config.compression_rate - 1 + self._ring if config.compressed else 0
        self._num_blocks = -(-(config.compressed + self._ring) // _SLOTS)
        self._layers = list(model.layers)
        self._weights = self._lay_out_weights()
        self._memory = self._lay_out_memory(state)
        self._sizes = self._measure()
        self._scratch = self._make_scratch()
        self._kind = np.int8(0) if int8 else np.float32(0)
        self._plan = make_plan(self._weights, self._memory, self._scratch, self._sizes)
        self._logits = torch.from_numpy(self._scratch.logits)[:, : config.vocab_size]
        self.bytes_per_step = self._count_bytes()
        self._begin_window()

    def _count_bytes(self) -> int:
        """Bytes that a step reads when every slot is in use: all weights, keys and values."""
        m = self._memory
        cache = (m.keys, m.values, *((m.key_scales, m.value_scales) if self._int8 else ()))
        return sum(array.nbytes for array in (*self._weights[1:], *cache))

    def _measure(self) -> _Sizes:
        config = self._config
        heads, width = config.num_heads, padded(config.d_model)
        d_head = config.d_model // heads
        read = sum(array.size for array in (*self._weights, self._memory.keys, self._memory.values))
        return _Sizes(
            num_threads=num_threads_for(self._batch * read, num_phases=_HEAD * config.num_layers + 1),
            num_rows=self._batch,
            num_layers=config.num_layers,
            d_model=config.d_model,
            width=width,
            num_heads=heads,
            d_head=d_head,
            d_padded=padded(d_head),
            num_features=config.num_position_features,
            num_projected=3 * width + padded(heads * config.num_position_features),
            num_inner=padded(config.d_feedforward),
            num_logits=padded(config.vocab_size),
            num_blocks=self._num_blocks,
            num_parts=-(-self._num_blocks // _PART),
            history_ring=self._history_ring,
            tracks_usage=self._memory.usage.shape[2] > 0,
            pre_norm=config.norm == "pre",
            quantised=self._int8,
            compressed=config.compressed,
            memory=config.memory,
            window=config.window,
            epsilon=self._layers[0].attention_norm.eps,
        )

    def _lay_out_weights(self) -> _Weights:
        model, config, layers = self._model, self._config, self._layers
        d_model, heads, features = config.d_model, config.num_heads, config.num_position_features
        d_head = d_model // heads
        scale = d_head**-0.5
        projections, biases, outputs = [], [], []
        for layer in layers:
            a = layer.attention
            w_r = a.position.weight.view(heads, d_head, features)
            by_position = torch.einsum("hdp,hdm->hpm", w_r, a.query.weight.view(heads, d_head, -1))
            constant = torch.einsum("hdp,hd->hp", w_r, a.position_bias)
            # [sines; cosines] of each head -> [cosines; -sines]
            by_position, constant = (
                torch.cat([x[:, features // 2 :], -x[:, : features // 2]], dim=1) for x in (by_position, constant)
            )
            parts = [a.query.weight * scale, a.key.weight, a.value.weight, by_position.flatten(0, 1) * scale]
            projections.append(torch.cat([_pad_first(part) for part in parts]))
            zeros = torch.zeros(d_model)
            parts = [a.content_bias.flatten() * scale, zeros, zeros, constant.flatten() * scale]
            biases.append(torch.cat([pad_last(part) for part in parts]))
            outputs.append(pad_last(a.output.weight.view(d_model, heads, d_head)).flatten(1))
        none = [torch.zeros(d_model)] * len(layers)
        feed_in_bias = [layer.feedforward_in.bias for layer in layers]
        feed_out_bias = [layer.feedforward_out.bias for layer in layers]
        projection = DenseWeights(projections, biases, int8=self._int8)
        output = DenseWeights(outputs, none, int8=self._int8)
        feed_in = DenseWeights([layer.feedforward_in.weight for layer in layers], feed_in_bias, int8=self._int8)
        feed_out = DenseWeights([layer.feedforward_out.weight for layer in layers], feed_out_bias, int8=self._int8)
        assert isinstance(model.head, SoftmaxHead) and isinstance(model.embedding, nn.Embedding)
        head = DenseWeights([model.head.projection.weight], [model.head.projection.bias], int8=self._int8)

        def vectors(rows: list[Tensor]) -> np.ndarray:
            return pad_last(torch.stack([row.detach().float() for row in rows])).contiguous().numpy()

        final = [model.final_norm] if config.norm == "pre" else [layers[0].attention_norm]
        return _Weights(
            pad_last(model.embedding.weight.detach()).clone().numpy(),
            vectors([layer.attention_norm.weight for layer in layers]),
            vectors([layer.attention_norm.bias for layer in layers]),
            vectors([layer.feedforward_norm.weight for layer in layers]),
            vectors([layer.feedforward_norm.bias for layer in layers]),
            vectors([cast(Tensor, norm.weight) for norm in final]),
            vectors([cast(Tensor, norm.bias) for norm in final]),
            *(projection, output, feed_in, feed_out, head),
        )

    def _lay_out_memory(self, state: CompressiveState) -> _Memory:
        config, batch = self._config, self._batch
        num_layers, heads, features = config.num_layers, config.num_heads, config.num_position_features
        d_head, num_slots = config.d_model // heads, self._num_blocks * _SLOTS
        kind = np.int8 if self._int8 else np.float32
        keys = np.zeros((num_layers, batch, heads, self._num_blocks, d_head, _SLOTS), dtype=kind)
        values = np.zeros((num_layers, batch, heads, self._num_blocks, _SLOTS, padded(d_head)), dtype=kind)
        scales = (num_layers, batch, heads, num_slots) if self._int8 else (1, 1, 1, _SLOTS)
        key_scales, value_scales = np.ones(scales, dtype=np.float32), np.ones(scales, dtype=np.float32)
        tracks_usage = state.usage[0].shape[1] > 0
        history = np.zeros((num_layers, batch, self._history_ring, padded(config.d_model)), dtype=np.float32)
        usage = np.zeros((num_layers, batch, self._history_ring if tracks_usage else 0), dtype=np.float32)

        # Where those slots of [compressed; memory; window] go that hold something; the other places are masked.
        start = self._num_steps // config.window * config.window
        fill = fill_at(config, state.steps[:1])
        num_groups = int(fill.groups)
        first_group, first_step = config.compressed - int(fill.compressed), config.memory - int(fill.memory)
        groups = np.arange(num_groups - int(fill.compressed), num_groups) % max(config.compressed, 1)
        steps = np.arange(start - int(fill.memory), self._num_steps)
        places = torch.from_numpy(np.concatenate([groups, config.compressed + steps % self._ring]))
        for i, layer in enumerate(self._layers):
            for b in range(batch):  # one by one: products of other sizes may round otherwise
                row = slice(b, b + 1)
                compressed, memory = state.compressed[i][row, first_group:], state.memory[i][row, first_step:]
                slots = torch.cat([compressed, memory, state.window[i][row, : int(fill.phase)]], dim=1).float()
                if not slots.shape[1]:
                    continue
                for projection, cache, cache_scales in (
                    (layer.attention.key, keys, key_scales),
                    (layer.attention.value, values, value_scales),
                ):
                    x = torch.zeros(heads, num_slots, d_head)
                    x[:, places] = layer.frozen_projection(slots, projection)[0]
                    if self._int8:
                        x, found = quantise(x)
                        cache_scales[i, b] = found.numpy()
                    blocks = x.unflatten(1, (-1, _SLOTS))
                    if projection is layer.attention.key:
                        cache[i, b] = blocks.transpose(2, 3).numpy()
                    else:
                        cache[i, b, ..., :d_head] = blocks.numpy()
            if self._history_ring:
                waiting = np.arange(start - config.memory - config.compression_rate + 1, start + config.window)
                fields = (state.pending, state.memory, state.window)
                past = torch.cat([field[i] for field in fields], dim=1).float()
                history[i][:, waiting % self._history_ring, : config.d_model] = past.numpy()
                if tracks_usage:
                    usage[i][:, waiting[: -config.window] % self._history_ring] = state.usage[i].float().numpy()

        angles = self._angles(torch.arange(config.window, dtype=torch.float64))
        return _Memory(
            keys=keys,
            values=values,
            key_scales=key_scales,
            value_scales=value_scales,
            history=history,
            usage=usage,
            slot_encoding=np.zeros((self._num_blocks, features, _SLOTS), dtype=np.float32),
            mask=np.zeros(num_slots, dtype=np.float32),
            num_used=np.zeros(self._num_blocks, dtype=np.int64),
            rotations=angles,
        )

    def _angles(self, times: Tensor) -> np.ndarray:
        """times [n], fp64 -> cosines, then sines, of w t [n, P], rounded once."""
        angles = times[:, None] * attention.frequencies(self._config.num_position_features)
        return torch.cat([angles.cos(), angles.sin()], dim=1).float().numpy()

    def _make_scratch(self) -> _Scratch:
        z = self._sizes
        rows, heads, parts = z.num_rows, z.num_heads, z.num_parts
        return _Scratch(
            x=zeros(rows, z.width),
            normed=zeros(rows, z.width),
            projected=zeros(rows, z.num_projected),
            rotated=zeros(rows, heads, z.num_features),
            weights=zeros(rows, heads, z.num_blocks * _SLOTS),
            peaks=zeros(rows, heads, parts),
            sums=zeros(rows, heads, parts),
            parts=zeros(rows, heads, parts, z.d_padded),
            mixed=zeros(rows, heads * z.d_padded),
            inner=zeros(rows, z.num_inner),
            logits=zeros(rows, z.num_logits),
            groups=zeros(0),
            group_keys=zeros(0),
        )

    def _begin_window(self) -> None:
        """Which slots are in use, and where they stand in time, at the step that comes."""
        config, memory = self._config, self._memory
        steps = torch.tensor([self._num_steps])
        fill = fill_at(config, steps)
        start = self._num_steps - int(fill.phase)
        num_groups = int(fill.groups)
        groups = np.arange(num_groups - config.compressed, num_groups) % max(config.compressed, 1)
        ring = config.compressed + np.arange(start - config.memory, start + config.window) % self._ring
        places = np.concatenate([groups, ring])
        times = slot_times(
            config, fill.pending, num_compressed=config.compressed, num_memory=config.memory, end=config.window
        )
        encoding = memory.slot_encoding.transpose(0, 2, 1)
        encoding[places // _SLOTS, places % _SLOTS] = self._angles(times[0])
        memory.mask[:] = _UNUSED
        newest = config.compressed + config.memory
        used = np.concatenate(
            [
                places[config.compressed - int(fill.compressed) : config.compressed],
                places[newest - int(fill.memory) : newest + int(fill.phase)],
            ]
        )
        memory.mask[used] = 0
        memory.num_used[:] = np.bincount(used // _SLOTS, minlength=self._num_blocks)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V] of the token that follows; overwritten by the next step."""
        if self._sizes.num_threads > 1:
            numba.set_num_threads(self._sizes.num_threads)
        _run(tokens.contiguous().numpy(), _PROJECT, self._num_steps, self._plan, self._kind)
        self._num_steps += 1
        if self._num_steps % self._config.window == 0:
            self._end_window()
        return self._logits

    def _end_window(self) -> None:
        """Compress what leaves memory."""
        config = self._config
        rate = config.compression_rate
        if config.compressed:
            before, after = (max(0, n - config.memory) for n in (self._num_steps - config.window, self._num_steps))
            evicted = np.arange(before, after)
            if self._sizes.tracks_usage and len(evicted):
                # From sums to averages over the steps that saw a slot, before slots of other windows join it.
                steps_seen = ((evicted + config.memory) // config.window - evicted // config.window) * config.window
                self._memory.usage[:, :, evicted % self._history_ring] /= steps_seen.astype(np.float32)
            if after // rate > before // rate:
                self._compress(before // rate, after // rate)
        self._begin_window()

    def _compress(self, first_group: int, last_group: int) -> None:
        config, memory, sizes = self._config, self._memory, self._sizes
        rate = config.compression_rate
        places = np.arange(first_group * rate, last_group * rate) % self._history_ring
        num_kept = min(last_group - first_group, config.compressed)
        groups = np.zeros((self._batch, num_kept, sizes.width), dtype=np.float32)
        projected = np.zeros((self._batch, num_kept, sizes.num_projected), dtype=np.float32)
        self._plan["groups"], self._plan["group_keys"] = address(groups), address(projected)
        self._plan["num_groups"] = num_kept
        for i, layer in enumerate(self._layers):
            consumed = torch.from_numpy(memory.history[i][:, places, : config.d_model])
            use = torch.from_numpy(memory.usage[i][:, places]) if sizes.tracks_usage else None
            for b in range(self._batch):  # one by one: products of other sizes may round otherwise
                made = layer.compressor(consumed[b : b + 1], None if use is None else use[b : b + 1])
                groups[b, :, : config.d_model] = made[0, -num_kept:].numpy()
            first_slot = (last_group - num_kept) % config.compressed
            _run(np.array([i]), _ADOPT, first_slot, self._plan, self._kind)


def _pad_first(x: Tensor) -> Tensor:
    """Rows of zeros behind x [N, K], to whole vectors."""
    return torch.nn.functional.pad(x, (0, 0, 0, padded(x.shape[0]) - x.shape[0]))
