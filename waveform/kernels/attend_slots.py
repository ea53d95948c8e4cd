"""Attention of one compiled step: kernels that cache keys and values, attend to them, and combine the parts of a head.

A task attends to PART blocks of one head's slots (slots.py), so that threads can share a head. The parts are combined
in an order that depends on the model alone, so the number of threads changes no bit.
"""

import numpy as np

from waveform.kernels import vectors as v
from waveform.kernels.compiling import kernel
from waveform.kernels.product import group_row, vector_of_product
from waveform.kernels.rows import zero
from waveform.kernels.slots import SLOTS, UNUSED

PART = 8  # blocks that one task attends to


@kernel
def append(projected, layer, b, head, slot, p, kind):
    """Cache the key and the value of one head in a slot; `projected`: address of a row."""
    cache = (layer * p.num_rows + b) * p.num_heads + head
    block, lane = cache * p.num_blocks + slot // SLOTS, slot % SLOTS
    key, value = v.at(projected, p.width + head * p.d_head), v.at(projected, 2 * p.width + head * p.d_head)
    key_scale = value_scale = np.float32(1)
    if p.quantised:
        key_scale, value_scale = _scale_of(key, p.d_head), _scale_of(value, p.d_head)
        v.put(p.key_scales, block * SLOTS + lane, key_scale)
        v.put(p.value_scales, block * SLOTS + lane, value_scale)
    for i in range(p.d_head):
        v.put(p.keys, (block * p.d_head + i) * SLOTS + lane, v.convert(v.get(key, i) / key_scale, kind))
        v.put(p.values, (block * SLOTS + lane) * p.d_padded + i, v.convert(v.get(value, i) / value_scale, kind))


@kernel
def _scale_of(x, num):
    largest_size = np.float32(0)
    for i in range(num):
        largest_size = max(largest_size, abs(v.get(x, i)))
    return largest_size / np.float32(127) if largest_size > 0 else np.float32(1)


@kernel
def attend(layer, b, head, part, slot, p, kind):
    """Attend from one head of one row to one part of the slots, after caching the new `slot` if it is in this part."""
    row_head = b * p.num_heads + head
    first, last = part * PART, min((part + 1) * PART, p.num_blocks)
    projected = v.at(p.projected, b * p.num_projected)
    if first <= slot // SLOTS < last:
        append(projected, layer, b, head, slot, p, kind)
    query, position_query = v.at(projected, head * p.d_head), v.at(p.rotated, row_head * p.num_features)
    cache = (layer * p.num_rows * p.num_heads + row_head) * p.num_blocks
    view = v.get_int64(p.views, layer) * p.num_blocks
    peaks, by_content = v.fill(np.float32(UNUSED)), v.stack_tile()
    for block in range(first, last):
        if v.get_int64(p.num_used, view + block) == 0:
            continue
        weights = v.at(p.weights, (row_head * p.num_blocks + block) * SLOTS)
        encoding = v.at(p.slot_encoding, (view + block) * p.num_features * SLOTS)
        mask = v.at(p.mask, (view + block) * SLOTS)
        group_row(position_query, 0, 1, encoding, SLOTS, weights, 0, p.num_features, False, v.F32)
        keys = p.keys + (cache + block) * p.d_head * SLOTS * v.bytes_of(kind)
        group_row(query, 0, 1, keys, SLOTS, by_content, 0, p.d_head, False, kind)
        scales = v.at(p.key_scales, (cache + block) * SLOTS * p.quantised)
        for i in range(0, SLOTS, v.LANES):
            logits = v.fma(v.load(by_content, i), v.load(scales, i), v.load(weights, i) + v.load(mask, i))
            peaks = v.maximum(peaks, logits)
            v.store(weights, i, logits)
    peak = v.largest(peaks)
    sums, mix = v.fill(np.float32(0)), v.at(p.parts, (row_head * p.num_parts + part) * p.d_padded)
    zero(mix, p.d_padded)
    for block in range(first, last):
        if v.get_int64(p.num_used, view + block) == 0:
            continue
        weights = v.at(p.weights, (row_head * p.num_blocks + block) * SLOTS)
        scales = v.at(p.value_scales, (cache + block) * SLOTS * p.quantised)
        for i in range(0, SLOTS, v.LANES):
            shares = v.exp(v.load(weights, i) - v.fill(peak))
            sums = sums + shares
            v.store(weights, i, shares * v.load(scales, i))
        values = p.values + (cache + block) * SLOTS * p.d_padded * v.bytes_of(kind)
        _mix(weights, values, mix, p.d_padded, kind)
    v.put(p.peaks, row_head * p.num_parts + part, peak)
    v.put(p.sums, row_head * p.num_parts + part, v.total(sums))


@kernel
def _mix(weights, values, mix, width, kind):
    """mix [width] += weights [64] @ values [64, width]."""
    first_left_over = width // SLOTS * SLOTS
    for i in range(0, first_left_over, SLOTS):
        group_row(weights, 0, 1, values + i * v.bytes_of(kind), width, v.at(mix, i), 0, SLOTS, True, kind)
    for i in range(first_left_over, width, v.LANES):
        mixed = vector_of_product(weights, values + i * v.bytes_of(kind), width, SLOTS, kind)
        v.store(mix, i, v.load(mix, i) + mixed)


@kernel
def combine(p):
    """Combine the parts of each head, which have softmaxes of their own, into one softmax over all slots."""
    for row_head in range(p.num_rows * p.num_heads):
        first = row_head * p.num_parts
        peak = v.get(p.peaks, first)
        for part in range(first + 1, first + p.num_parts):
            peak = max(peak, v.get(p.peaks, part))
        whole = np.float32(0)
        for part in range(first, first + p.num_parts):
            factor = v.largest(v.exp(v.fill(v.get(p.peaks, part) - peak)))
            v.put(p.peaks, part, factor)
            whole += factor * v.get(p.sums, part)
        for part in range(first, first + p.num_parts):
            v.put(p.peaks, part, v.get(p.peaks, part) / whole)
        for i in range(0, p.d_padded, v.LANES):
            mixed = v.fill(np.float32(0))
            for part in range(first, first + p.num_parts):
                mixed = v.fma(v.fill(v.get(p.peaks, part)), v.load(p.parts, part * p.d_padded + i), mixed)
            v.store(p.mixed, row_head * p.d_padded + i, mixed)


@kernel
def rotate(phase, p):
    """Turn each position query to its time: (a_c - i a_s) e^{i w t}, real parts first."""
    half = p.num_features // 2
    rotation = v.at(p.rotations, phase * p.num_features)
    for b in range(p.num_rows):
        for head in range(p.num_heads):
            source = v.at(p.projected, b * p.num_projected + 3 * p.width + head * p.num_features)
            target = v.at(p.rotated, (b * p.num_heads + head) * p.num_features)
            for i in range(half):
                real, imaginary = v.get(source, i), v.get(source, half + i)
                cosine, sine = v.get(rotation, i), v.get(rotation, half + i)
                v.put(target, i, real * cosine - imaginary * sine)
                v.put(target, half + i, real * sine + imaginary * cosine)
