"""One compiled step of a Compressive Transformer: its phases, from a row's token to its logits.

Layer by layer: project the input to queries, keys and values; attend; project the output; feed forward. Each of these
is shared among the threads (threads.py); the small operations between them are not worth sharing.

Shape letters: B rows, D model width, H heads, d = D / H head width, P position features, F feed-forward width, V
classes; D', d', ... padded to whole vectors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from waveform.kernels.attend_slots import PART, append, attend, combine, rotate
from waveform.kernels.compiling import kernel
from waveform.kernels.dense import ADD, GELU, SET, dense, zeros
from waveform.kernels.draw import drawing
from waveform.kernels.product import GROUP
from waveform.kernels.row_inputs import embed_rows, predict_logits
from waveform.kernels.rows import copy, layer_norm
from waveform.kernels.slots import SLOTS
from waveform.kernels.threads import share, share_vectors, shared_out
from waveform.kernels.vectors import F32, LANES, at, get_int64, padded, put
from waveform.models.transformer_config import LayerKind

# int64, because for a plain int numba would compile everything that a call reaches once more
PROJECT, _ATTEND, _OUTPUT, _FEED_IN, _FEED_OUT, _HEAD, CACHE_GROUPS = np.arange(7)
PHASES_PER_LAYER = 5  # PROJECT to _FEED_OUT


def lay_out_step(
    kinds: Sequence[LayerKind], weights: Mapping[str, Any], memory: Mapping[str, Any], *, epsilon: float
) -> dict[str, Any]:
    """The sizes of a step, and arrays for its intermediate values; epsilon: of the norms."""
    config = kinds[0].config  # that of every layer, except for the sizes of memories
    num_layers, rows, heads, num_blocks, d_head, _ = memory["keys"].shape
    width, d_padded, num_parts = padded(config.d_model), padded(d_head), -(-num_blocks // PART)
    num_projected, num_inner = weights["projection"].num_outputs, weights["feed_in"].num_outputs
    compressing = [(min(each.groups, each.compressed), each.compression_rate) for each, _ in kinds]
    most_groups = max(num_groups for num_groups, _ in compressing)  # made at a window's end
    most_consumed = max(num_groups * rate for num_groups, rate in compressing)
    return {
        "num_layers": num_layers,
        "d_model": config.d_model,
        "num_heads": heads,
        "d_head": d_head,
        "d_padded": d_padded,  # d'
        "num_features": config.num_position_features,  # P
        "num_projected": num_projected,  # 3 D' + (H P)'
        "num_inner": num_inner,  # F'
        "num_parts": num_parts,
        "window": config.window,
        "epsilon": epsilon,
        "normed": zeros(rows, width),
        "projected": zeros(rows, num_projected),
        "rotated": zeros(rows, heads, config.num_position_features),
        "weights": zeros(rows, heads, num_blocks * SLOTS),  # of attention, up to a factor for each part
        "peaks": zeros(rows, heads, num_parts),  # largest logit; then the factor
        "sums": zeros(rows, heads, num_parts),
        "parts": zeros(rows, heads, num_parts, d_padded),
        "mixed": zeros(rows, heads * d_padded),
        "inner": zeros(rows, num_inner),
        # Of the layers that compress at a window's end, which have the same sizes
        "num_groups": 0,  # new compressed slots of a row
        "first_consumed": 0,  # the first step that they cover
        "compression_rate": 0,
        "compressed": 0,  # slots
        "consumed": zeros(rows, most_consumed, width),  # what the convolution compresses
        "groups": zeros(rows, most_groups, width),  # of one layer
        "group_keys": zeros(rows, most_groups, num_projected),  # their projection
    }


@kernel
def _compress(first, last, layer, p):
    """Compress by convolution, for a range of [rows, groups]."""
    rate = p.compression_rate
    for row in range(first, last):
        for i in range(rate):
            step = p.first_consumed + row % p.num_groups * rate + i
            copy(_history(layer, row // p.num_groups, step, p), at(p.consumed, (row * rate + i) * p.width), p.width)
    vectors = (np.int64(0), p.width // LANES)
    shape = (rate * p.width, p.width)
    convolution = get_int64(p.convolutions, layer)
    dense(convolution, np.int64(0), p.consumed, p.groups, shape, (first, last), vectors, np.int64(SET), F32)


@kernel
def _history(layer, b, step, p):
    """Where a layer's input of row b at a step is remembered."""
    return at(p.history, ((layer * p.num_rows + b) * p.history_ring + step % p.history_ring) * p.width)


@kernel
def _cache_groups(first, last, layer, first_slot, p, kind):
    """Make new compressed slots and cache their keys and values, for a range of [rows, groups]."""
    _compress(first, last, layer, p)
    gain, bias = at(p.attention_gain, layer * p.width), at(p.attention_bias, layer * p.width)
    for row in range(first, last):
        x = at(p.groups, row * p.width)
        layer_norm(x, x, gain, bias, p.width, p.d_model, p.epsilon)
    first_group, last_group = p.width // LANES // GROUP, -(-3 * p.width // LANES // GROUP)  # that hold keys and values
    vectors = (first_group * GROUP, min(last_group * GROUP, p.num_projected // LANES))
    shape = (p.width, p.num_projected)
    dense(p.projection, layer, p.groups, p.group_keys, shape, (first, last), vectors, np.int64(SET), kind)
    for row in range(first, last):
        slot = (first_slot + row % p.num_groups) % p.compressed
        for head in range(p.num_heads):
            append(at(p.group_keys, row * p.num_projected), layer, row // p.num_groups, head, slot, p, kind)


@kernel
def _work(phase, part, num_parts, layer, slot, p, kind):
    """A thread's share of one phase of a layer."""
    if phase == _ATTEND:
        first, last = share(p.num_rows * p.num_heads * p.num_parts, part, num_parts)
        for task in range(first, last):
            row_head = task // p.num_parts
            attend(layer, row_head // p.num_heads, row_head % p.num_heads, task % p.num_parts, slot, p, kind)
        return
    if phase == CACHE_GROUPS:
        first, last = share(p.num_rows * p.num_groups, part, num_parts)
        _cache_groups(first, last, layer, slot, p, kind)
        return
    if phase == PROJECT:
        weights, x, out, shape, mode = p.projection, p.normed, p.projected, (p.width, p.num_projected), SET
    elif phase == _OUTPUT:
        weights, x, out, shape, mode = p.output, p.mixed, p.x, (p.num_heads * p.d_padded, p.width), ADD
    elif phase == _FEED_IN:
        weights, x, out, shape, mode = p.feed_in, p.normed, p.inner, (p.width, p.num_inner), GELU
    elif phase == _FEED_OUT:
        weights, x, out, shape, mode = p.feed_out, p.inner, p.x, (p.num_inner, p.width), ADD
    else:
        weights, x, out, shape, mode = p.head, p.normed, p.logits, (p.width, p.num_logits), SET
    vectors = share_vectors(shape[1], part, num_parts)
    dense(weights, layer, x, out, shape, (np.int64(0), p.num_rows), vectors, mode, kind)


_share_out = shared_out(_work)


@kernel
def _norm(gain, bias, layer, p):
    """normed = the norm of x."""
    offset = layer * p.width
    for b in range(p.num_rows):
        x, normed = at(p.x, b * p.width), at(p.normed, b * p.width)
        layer_norm(x, normed, at(gain, offset), at(bias, offset), p.width, p.d_model, p.epsilon)


@kernel
def _step(tokens, step, sound, plan, kind):
    p = plan[0]
    slot = p.first_step_slot + step % p.step_ring
    for view in range(p.num_views):
        block = view * p.num_blocks + slot // SLOTS
        put(p.num_used, block, get_int64(p.num_used, block) + 1)
        put(p.mask, view * p.num_blocks * SLOTS + slot, np.float32(0))
    embed_rows(tokens, sound, p)
    for layer in range(p.num_layers):
        for b in range(p.num_rows if p.history_ring else 0):
            copy(at(p.x, b * p.width), _history(layer, b, step, p), p.width)
        _norm(p.attention_gain, p.attention_bias, layer, p)
        _share_out(PROJECT, layer, slot, plan, kind)
        rotate(step % p.window, p)
        _share_out(_ATTEND, layer, slot, plan, kind)
        combine(p)
        _share_out(_OUTPUT, layer, slot, plan, kind)
        _norm(p.feedforward_gain, p.feedforward_bias, layer, p)
        _share_out(_FEED_IN, layer, slot, plan, kind)
        _share_out(_FEED_OUT, layer, slot, plan, kind)
    _norm(p.final_gain, p.final_bias, np.int64(0), p)
    _share_out(_HEAD, np.int64(0), slot, plan, kind)
    predict_logits(sound, p)


_steps = drawing(_step)


@kernel(entry=True)
def run(first_phase, tokens_or_layers, step_or_slot, draws, sound, plan, kind):
    """first_phase PROJECT: take the given step of the streams, with inputs tokens [B]; or several steps, see `drawing`.

    first_phase CACHE_GROUPS: compress, and cache the new slots from the given slot on, in the given layers. One
    function does both, because numba compiles all kernels anew for each function that Python calls.
    """
    if first_phase == PROJECT:
        _steps(tokens_or_layers, step_or_slot, draws, sound, plan, kind)
    else:
        for layer in tokens_or_layers:
            _share_out(CACHE_GROUPS, layer, step_or_slot, plan, kind)
