"""One compiled step of a Compressive Transformer: its phases, from a row's token to its logits.

Layer by layer: project the input to queries, keys and values; attend; project the output; feed forward. Each of these
is shared among the threads (plan.py); the small operations between them are not worth sharing.

Shape letters: B rows, L layers, C compressed slots, M memory slots, W window, D model width, H heads, d = D / H head
width, P position features, F feed-forward width, V classes; D', d', ... padded to whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

from typing import NamedTuple

import numpy as np

from waveform.compiled.record import share
from waveform.compiled.simd import F32, compiled, get, padded, put
from waveform.decoding.attend import I64, PART, append, attend, combine, rotate
from waveform.decoding.draw import draw_row
from waveform.decoding.kernels import ADD, GELU, GROUP, SET, copy, dense, layer_norm, of_layer, zeros
from waveform.decoding.plan import num_threads_for, share_vectors, shared_out
from waveform.decoding.row_inputs import embed_rows
from waveform.decoding.row_predictions import num_head_outputs, predict_logits
from waveform.decoding.slots import SLOTS, Memory
from waveform.decoding.weights import Weights, convolves
from waveform.models.compressive_transformer import CompressiveTransformer

PROJECT, _ATTEND, _OUTPUT, _FEED_IN, _FEED_OUT, _HEAD, ADOPT = range(7)
PHASES_PER_LAYER = _HEAD


class Scratch(NamedTuple):
    """Intermediate values of a step."""

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
    consumed: np.ndarray  # [B, groups, c D'] what a convolution compresses
    groups: np.ndarray  # [B, groups, D'] new compressed slots of a layer
    group_keys: np.ndarray  # [B, groups, 3 D' + (H P)'] their projection


class Sizes(NamedTuple):
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
    num_classes: int
    num_blocks: int
    num_parts: int
    history_ring: int  # 0 without compressed memory
    tracks_usage: bool
    own_encodings: int  # 1 if each layer and row has an encoding of its slots' times, 0 if all share one
    pre_norm: bool
    quantised: bool
    compressed: int
    compression_rate: int
    convolves: bool  # kernels compress
    memory: int
    window: int
    epsilon: float
    num_groups: int = 0  # new compressed slots of a row in `groups` of the scratch
    first_consumed: int = 0  # the first step that they cover


def sizes_of(model: CompressiveTransformer, weights: Weights, memory: Memory) -> Sizes:
    """The sizes of a step; num_threads: as many as it is worth."""
    config = model.config
    num_layers, num_rows, heads, num_blocks, d_head, _ = memory.keys.shape
    width = padded(config.d_model)
    read = sum(array.size for array in (*weights, memory.keys, memory.values))
    return Sizes(
        num_threads=num_threads_for(num_rows * read, num_phases=PHASES_PER_LAYER * num_layers + 1),
        num_rows=num_rows,
        num_layers=num_layers,
        d_model=config.d_model,
        width=width,
        num_heads=heads,
        d_head=d_head,
        d_padded=padded(d_head),
        num_features=config.num_position_features,
        num_projected=3 * width + padded(heads * config.num_position_features),
        num_inner=padded(config.d_feedforward),
        num_logits=num_head_outputs(model.head, config.vocab_size),
        num_classes=config.vocab_size,
        num_blocks=num_blocks,
        num_parts=-(-num_blocks // PART),
        history_ring=memory.history.shape[2],
        tracks_usage=memory.usage.shape[2] > 0,
        own_encodings=int(config.keeps_times),
        pre_norm=config.norm == "pre",
        quantised=memory.keys.dtype == np.int8,
        compressed=config.compressed,
        compression_rate=config.compression_rate,
        convolves=convolves(model),
        memory=config.memory,
        window=config.window,
        epsilon=model.layers[0].attention_norm.eps,
    )


def make_scratch(z: Sizes) -> Scratch:
    """Arrays for the intermediate values of a step."""
    rows, heads, parts = z.num_rows, z.num_heads, z.num_parts
    return Scratch(
        x=zeros(rows, z.width),
        normed=zeros(rows, z.width),
        projected=zeros(rows, z.num_projected),
        rotated=zeros(rows, heads, z.num_features),
        weights=zeros(rows, heads, z.num_blocks * SLOTS),
        peaks=zeros(rows, heads, parts),
        sums=zeros(rows, heads, parts),
        parts=zeros(rows, heads, parts, z.d_padded),
        mixed=zeros(rows, heads * z.d_padded),
        inner=zeros(rows, z.num_inner),
        logits=zeros(rows, z.num_logits),
        consumed=zeros(0),
        groups=zeros(0),
        group_keys=zeros(0),
    )


@compiled
def _compress(first, last, layer, p):
    """Compress by convolution, for a range of [rows, groups]."""
    rate = p.compression_rate
    for row in range(first, last):
        history = p.history + (layer * p.num_rows + row // p.num_groups) * p.history_ring * p.width * 4
        for i in range(rate):
            step = (p.first_consumed + row % p.num_groups * rate + i) % p.history_ring
            copy(history + step * p.width * 4, p.consumed + (row * rate + i) * p.width * 4, p.width)
    matrix = (p.convolution, p.convolution_scales, p.convolution_biases)
    matrix = of_layer(matrix, layer, rate * p.width, p.width, F32)
    vectors = (np.int64(0), p.width // 16)
    dense(matrix, p.consumed, p.groups, rate * p.width, p.width, (first, last), vectors, np.int64(SET), F32)


@compiled
def _adopt(first, last, layer, first_slot, p, kind):
    """Cache the keys and values of new compressed slots, for a range of [rows, groups]; first make them, if it can."""
    if p.convolves:
        _compress(first, last, layer, p)
    for row in range(first, last):
        x = p.groups + row * p.width * 4
        if p.pre_norm:
            gain, bias = p.attention_gain + layer * p.width * 4, p.attention_bias + layer * p.width * 4
            layer_norm(x, x, gain, bias, p.width, p.d_model, p.epsilon)
    matrix = (p.projection, p.projection_scales, p.projection_biases)
    matrix = of_layer(matrix, layer, p.width, p.num_projected, kind)
    first_group, last_group = p.width // 16 // GROUP, -(-3 * p.width // 16 // GROUP)  # that hold keys and values
    vectors = (first_group * GROUP, min(last_group * GROUP, p.num_projected // 16))
    dense(matrix, p.groups, p.group_keys, p.width, p.num_projected, (first, last), vectors, np.int64(SET), kind)
    for row in range(first, last):
        slot = (first_slot + row % p.num_groups) % p.compressed
        for head in range(p.num_heads):
            append(p.group_keys + row * p.num_projected * 4, layer, row // p.num_groups, head, slot, p, kind)


@compiled
def _work(phase, part, num_parts, layer, slot, p, kind):
    """A thread's share of one phase of a layer."""
    if phase == _ATTEND:
        first, last = share(p.num_rows * p.num_heads * p.num_parts, part, num_parts)
        for task in range(first, last):
            row_head = task // p.num_parts
            attend(layer, row_head // p.num_heads, row_head % p.num_heads, task % p.num_parts, slot, p, kind)
        return
    if phase == ADOPT:
        first, last = share(p.num_rows * p.num_groups, part, num_parts)
        _adopt(first, last, layer, slot, p, kind)
        return
    if phase == PROJECT:
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
    vectors = share_vectors(num_outputs, part, num_parts)
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
    """Before a layer's projection: remember its input, and norm it."""
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
    """Run the small unshared work after a phase."""
    if phase == PROJECT:
        rotate(num_steps % p.window, p, kind)
    elif phase == _ATTEND:
        combine(layer, num_steps - num_steps % p.window, p, kind)
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


@compiled
def _run_phases(tokens, first_phase, step_or_slot, plan, kind):
    """Run a step's phases, or the one phase ADOPT; see `run`."""
    p, step = plan[0], step_or_slot
    slot = p.compressed + step % (p.memory + p.window)
    num_phases = p.num_layers * _HEAD + 1
    if first_phase == ADOPT:
        num_phases, slot = len(tokens), step_or_slot
    else:
        put(p.num_used, slot // SLOTS, get(p.num_used, slot // SLOTS, I64) + 1)
        put(p.mask, slot, np.float32(0))
        embed_rows(tokens, p)
        _begin_layer(0, step, p, kind)
    for i in range(num_phases):
        layer, phase = i // _HEAD, i % _HEAD
        if first_phase == ADOPT:
            layer, phase = tokens[i], ADOPT
        elif layer == p.num_layers:
            layer, phase = 0, _HEAD
        _share_out(phase, layer, slot, plan, kind)
        _between(phase, layer, step, p, kind)
    if p.predicts and first_phase != ADOPT:
        for b in range(p.num_rows):
            predict_logits(b, p)


@compiled(entry=True)
def run(first_phase, tokens, step_or_slot, draws, plan, kind):
    """first_phase PROJECT: take a step with inputs tokens [B], the given step of their streams; writes the logits.

    Or take n steps, if `draws` asks for [n, B] tokens: each step's are drawn, and become the next one's inputs.

    first_phase ADOPT: cache new compressed slots from the given slot on, in the layers tokens. One function does all,
    because every function that Python calls has all kernels compiled again.
    """
    for t in range(max(1, len(draws.drawn))):
        _run_phases(tokens, first_phase, step_or_slot + t, plan, kind)
        if t < len(draws.drawn):
            draw_row(t, tokens, draws, plan[0])
