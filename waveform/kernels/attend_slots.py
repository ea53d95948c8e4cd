"""Attention of one compiled step: kernels that cache keys and values, attend to them, and combine the parts of a head.

A task attends to PART blocks of one head's slots (slots.py), so that threads can share a head. The parts are combined
in an order that depends on the model alone, so the number of threads changes no bit.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

import numpy as np

from waveform.kernels.slots import SLOTS, UNUSED
from waveform.kernels.vectors import (
    F32,
    add,
    convert,
    exp,
    fill,
    fma,
    get,
    kernel,
    largest,
    load,
    maximum,
    put,
    store,
    total,
)

I64 = np.int64(0)  # says which type to load
PART = 8  # blocks that one task attends to


@kernel
def append(projected, layer, b, head, slot, p, kind):
    """Cache the key and the value of one head in a slot; `projected`: address of a row."""
    cache = (layer * p.num_rows + b) * p.num_heads + head
    block, lane = cache * p.num_blocks + slot // SLOTS, slot % SLOTS
    key, value = projected + (p.width + head * p.d_head) * 4, projected + (2 * p.width + head * p.d_head) * 4
    key_scale = value_scale = np.float32(1)
    if p.quantised:
        key_scale, value_scale = _scale_of(key, p.d_head), _scale_of(value, p.d_head)
        put(p.key_scales, block * SLOTS + lane, key_scale)
        put(p.value_scales, block * SLOTS + lane, value_scale)
    for i in range(p.d_head):
        put(p.keys, (block * p.d_head + i) * SLOTS + lane, convert(get(key, i, F32) / key_scale, kind))
        put(p.values, (block * SLOTS + lane) * p.d_padded + i, convert(get(value, i, F32) / value_scale, kind))


@kernel
def _scale_of(x, num):
    largest_size = np.float32(0)
    for i in range(num):
        largest_size = max(largest_size, abs(get(x, i, F32)))
    return largest_size / np.float32(127) if largest_size > 0 else np.float32(1)


@kernel
def attend(layer, b, head, part, slot, p, kind):
    """Attend from one head of one row to one part of the slots; first cache `slot`, if it is in the part."""
    row_head = b * p.num_heads + head
    first, last = part * PART, min((part + 1) * PART, p.num_blocks)
    projected = p.projected + b * p.num_projected * 4
    if first <= slot // SLOTS < last:
        append(projected, layer, b, head, slot, p, kind)
    head_weights = row_head * p.num_blocks * SLOTS  # where this head's begin in `weights`
    cache = (layer * p.num_rows * p.num_heads + row_head) * p.num_blocks
    scaled = 1 if p.quantised else 0
    peaks = fill(np.float32(UNUSED))
    for block in range(first, last):
        if get(p.num_used, block, I64) == 0:
            continue
        p0 = load(p.mask, block * SLOTS, F32)
        p1 = load(p.mask, block * SLOTS + 16, F32)
        p2 = load(p.mask, block * SLOTS + 32, F32)
        p3 = load(p.mask, block * SLOTS + 48, F32)
        at = block * p.num_features * SLOTS
        for i in range(p.num_features):
            a = fill(get(p.rotated, row_head * p.num_features + i, F32))
            p0 = fma(a, load(p.slot_encoding, at, F32), p0)
            p1 = fma(a, load(p.slot_encoding, at + 16, F32), p1)
            p2 = fma(a, load(p.slot_encoding, at + 32, F32), p2)
            p3 = fma(a, load(p.slot_encoding, at + 48, F32), p3)
            at += SLOTS
        c0 = c1 = c2 = c3 = fill(np.float32(0))
        at = (cache + block) * p.d_head * SLOTS
        for i in range(p.d_head):
            q = fill(get(projected, head * p.d_head + i, F32))
            c0 = fma(q, load(p.keys, at, kind), c0)
            c1 = fma(q, load(p.keys, at + 16, kind), c1)
            c2 = fma(q, load(p.keys, at + 32, kind), c2)
            c3 = fma(q, load(p.keys, at + 48, kind), c3)
            at += SLOTS
        at = (cache + block) * SLOTS * scaled
        p0 = fma(c0, load(p.key_scales, at, F32), p0)
        p1 = fma(c1, load(p.key_scales, at + 16, F32), p1)
        p2 = fma(c2, load(p.key_scales, at + 32, F32), p2)
        p3 = fma(c3, load(p.key_scales, at + 48, F32), p3)
        peaks = maximum(peaks, maximum(maximum(p0, p1), maximum(p2, p3)))
        at = head_weights + block * SLOTS
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
        weights_at, scales_at = head_weights + block * SLOTS, (cache + block) * SLOTS * scaled
        for i in range(0, SLOTS, 16):
            weights = exp(add(load(p.weights, weights_at + i, F32), away))
            sums = add(sums, weights)
            store(p.weights, weights_at + i, weights)
        _mix((cache + block) * SLOTS * p.d_padded, weights_at, scales_at, mix, p, kind)
    put(p.peaks, row_head * p.num_parts + part, peak)
    put(p.sums, row_head * p.num_parts + part, total(sums))


@kernel
def _mix(values_at, weights_at, scales_at, mix, p, kind):
    """Add a block's values, weighted, to a part's sum."""
    width, i = p.d_padded, 0
    while i + 64 <= width:
        a, b, c, d = load(mix, i, F32), load(mix, i + 16, F32), load(mix, i + 32, F32), load(mix, i + 48, F32)
        at = values_at + i
        for slot in range(SLOTS):
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
        for slot in range(0, SLOTS, 4):
            a = _add_weighted(weights_at + slot, scales_at + slot, at, a, p, kind)
            b = _add_weighted(weights_at + slot + 1, scales_at + slot + 1, at + width, b, p, kind)
            c = _add_weighted(weights_at + slot + 2, scales_at + slot + 2, at + 2 * width, c, p, kind)
            d = _add_weighted(weights_at + slot + 3, scales_at + slot + 3, at + 3 * width, d, p, kind)
            at += 4 * width
        store(mix, i, add(sums, add(add(a, b), add(c, d))))
        i += 16


@kernel
def _add_weighted(weight, scale, at, sums, p, kind):
    w = fill(get(p.weights, weight, F32) * get(p.value_scales, scale, F32))
    return fma(w, load(p.values, at, kind), sums)


@kernel
def combine(p):
    """Combine the parts of each head."""
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


@kernel
def rotate(phase, p):
    """Turn each position query to its time: (a_c - i a_s) e^{i w t}, real parts first."""
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
