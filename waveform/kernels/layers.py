"""Layers of the Compressive Transformer, forward and backward, compiled: for small models on a CPU.

One row at a time goes through all layers, so that what it needs stays in cache, and threads work on rows of their own.
Each thread sums the gradients of weights over its rows; these sums are then added up, in the order of the threads.

p: the record of a layer, with sizes, addresses (0: there is none), and offsets: `p.t_name` in a thread's scratch,
`p.s_name` in its sums.

Shape letters: T queries, S past slots, K = S + T, K_ padded to whole vectors, D model width, H heads, d = D / H, F
feed-forward width, P position features: sines, padded to whole vectors, then cosines; G new compressed slots, c rate.
"""

import numpy as np

from waveform.kernels import rows
from waveform.kernels.compiling import kernel
from waveform.kernels.product import ROWS, product
from waveform.kernels.threads import share
from waveform.kernels.vectors import at, get, padded, put

PACK, FORWARD, BACKWARD, UNPACK = range(4)


def saved_parts(z) -> dict[str, int]:
    """Floats of what a forward pass keeps for the backward pass, for sizes `z` (kernels/layers_op.py)."""
    num_saved_rows = z.num_rows if z.keeps else z.num_threads
    rows = z.num_rows * z.num_queries
    D, F, H, P = z.d_model, z.d_feedforward, z.num_heads, z.num_features
    return {
        "slots": num_saved_rows * (z.num_past + z.num_queries) * D,  # standardised
        "factors": rows,
        "queries": rows * D,
        "keys_values": num_saved_rows * z.num_slots_padded * 2 * D,
        "rotated": rows * H * P,
        "weights": rows * H * z.num_slots_padded,
        "mixed": rows * D,
        "after": rows * D,
        "normed": rows * D,
        "normed_factors": rows,
        "inner": rows * F,
        "active": rows * F,
        "grad_groups": num_saved_rows * z.num_groups * D,
        "projection": 3 * D * D,  # weights: norms folded in, and transposed (_t)
        "projection_t": 3 * D * D,
        "projection_bias": 3 * D,
        "position_t": D * P,  # of each head
        "output_t": D * D,
        "folded_in": F * D,
        "folded_in_t": F * D,
        "folded_in_bias": F,
        "feed_out_t": D * F,
        "compression_t": z.rate * D * D if z.num_groups else 0,
    }


def scratch_parts(z) -> dict[str, int]:
    """Floats of what a thread uses while it works on a row."""
    T, D, P, G, padded_slots = z.num_queries, z.d_model, z.num_features, z.num_groups, z.num_slots_padded
    return {
        "t_factors": max(z.num_past, G),
        "t_qu": T * z.d_head,
        "t_qv": T * z.d_head,
        "t_a": T * P,
        "t_transposed": z.d_head * padded_slots,
        "t_inner": T * z.d_feedforward,
        "t_normed": T * D,
        "t_mixed": max(T, G) * D,
        "t_grads": (z.num_past + T) * 3 * D,
        "t_scores": T * padded_slots,
        "t_rotated": T * P,
        "t_by_position": T * z.d_head,
        "t_group_normed": G * D,
        "t_group_keys_values": (G + 15) * 2 * D,
        "t_group_weights": T * (G + 15),
        "t_group_grads": G * 2 * D,
    }


def sum_parts(z) -> dict[str, int]:
    """Floats of the gradients that a thread sums over its rows."""
    D, F = z.d_model, z.d_feedforward
    return {
        **dict.fromkeys(("s_query", "s_key", "s_value"), D * D),  # together one matrix of 3 D rows
        "s_projection_bias": 3 * D,
        **dict.fromkeys(("s_gain", "s_shift", "s_content_bias", "s_position_bias"), D),
        "s_position": D * z.num_features,
        "s_output": D * D,
        **dict.fromkeys(("s_feed_gain", "s_feed_shift"), D),
        "s_feed_in": F * D,
        "s_feed_in_bias": F,
        "s_feed_out": D * F,
        "s_feed_out_bias": D,
        "s_compression": z.rate * D * D if z.num_groups else 0,  # [D, c, D]
        "s_compression_bias": D if z.num_groups else 0,
    }


@kernel
def _attend(row, kept, scratch, p):
    """after = x + attention of x over [past; x]. kept: this row's place among the rows whose values are kept."""
    T, S, D, d, P = p.num_queries, p.num_past, p.d_model, p.d_head, p.num_features
    K, K_ = S + T, p.num_slots_padded
    x, past = at(p.x, row * T * D), at(p.past, row * S * D)
    slots, factors = at(p.slots, kept * (S + T) * D), at(p.factors, kept * T)
    rows.standardise(past, slots, at(scratch, p.t_factors), S, D, p.epsilon)
    x_slots = at(slots, S * D)
    rows.standardise(x, x_slots, factors, T, D, p.epsilon)
    q, kv = at(p.queries, kept * T * D), at(p.keys_values, kept * K_ * 2 * D)
    rows.repeat_row(p.projection_bias, q, T, D)
    product(x_slots, D, 1, p.projection_t, 3 * D, q, D, T, D, D, True)
    rows.repeat_row(at(p.projection_bias, D), kv, K, 2 * D)
    rows.zero(at(kv, K * 2 * D), (K_ - K) * 2 * D)
    product(slots, D, 1, at(p.projection_t, D), 3 * D, kv, 2 * D, K, 2 * D, D, True)
    mixed = at(p.mixed, kept * T * D)
    q_u, q_v, a, keys_t = at(scratch, p.t_qu), at(scratch, p.t_qv), at(scratch, p.t_a), at(scratch, p.t_transposed)
    for head in range(p.num_heads):
        column = head * d
        rows.add_rows(at(q, column), D, at(p.content_bias, column), 0, q_u, d, T, d)
        rows.add_rows(at(q, column), D, at(p.position_bias, column), 0, q_v, d, T, d)
        product(q_v, d, 1, at(p.position, head * d * P), P, a, P, T, P, d, False)
        rotated = at(p.rotated, (kept * p.num_heads + head) * T * P)
        rows.rotate_rows(a, p.query_encoding, rotated, T, P // 2)
        rows.transpose(at(kv, column), 2 * D, keys_t, K_, d)
        scores = at(p.weights, (kept * p.num_heads + head) * T * K_)
        values = at(kv, D + column)
        for t in range(0, T, ROWS):
            n = min(ROWS, T - t)  # queries whose scores end at the same slot
            seen = S + t + n
            tile = at(scores, t * K_)
            product(at(q_u, t * d), d, 1, keys_t, K_, tile, K_, n, padded(seen), d, False)
            product(at(rotated, t * P), P, 1, p.slot_encoding_t, K_, tile, K_, n, padded(seen), P, True)
            rows.softmax_rows(tile, K_, n, S + t + 1, True, K_, p.scale)
            product(tile, K_, 1, values, 2 * D, at(mixed, t * D + column), D, n, d, seen, False)
    after = at(p.after, kept * T * D)
    if p.mixed_factors:
        product(mixed, D, 1, p.output_t, D, after, D, T, D, D, False)
        rows.multiply(after, at(p.mixed_factors, row * T * D), after, T * D)
        rows.add_rows(after, 0, x, 0, after, 0, 1, T * D)
    else:
        rows.copy(x, after, T * D)
        product(mixed, D, 1, p.output_t, D, after, D, T, D, D, True)


@kernel
def _feed_forward(row, kept, p):
    """out = after + feed-forward(after)."""
    T, D, F = p.num_queries, p.d_model, p.d_feedforward
    after, normed = at(p.after, kept * T * D), at(p.normed, kept * T * D)
    inner, active = at(p.inner, kept * T * F), at(p.active, kept * T * F)
    rows.standardise(after, normed, at(p.normed_factors, kept * T), T, D, p.epsilon)
    rows.repeat_row(p.folded_in_bias, inner, T, F)
    product(normed, D, 1, p.folded_in_t, F, inner, F, T, F, D, True)
    rows.gelu_rows(inner, active, T * F)
    out = at(p.out, row * T * D)
    if p.inner_factors:
        rows.multiply(active, at(p.inner_factors, row * T * F), active, T * F)
        rows.repeat_row(p.feed_out_bias, out, T, D)
    else:
        rows.add_rows(after, D, p.feed_out_bias, 0, out, D, T, D)
    product(active, F, 1, p.feed_out_t, D, out, D, T, D, F, True)
    if p.out_factors:
        rows.multiply(out, at(p.out_factors, row * T * D), out, T * D)
        rows.add_rows(out, 0, after, 0, out, 0, 1, T * D)


@kernel
def _compress(row, kept, scratch, p):
    """The new compressed slots, and their loss with its gradient (Algorithm 2)."""
    T, D, d, G = p.num_queries, p.d_model, p.d_head, p.num_groups
    n = G * p.rate
    G_, n_ = padded(G), padded(n)
    consumed = at(p.past, (row * p.num_past + p.first_consumed) * D)
    groups = at(p.groups, row * G * D)
    rows.repeat_row(p.compression_bias, groups, G, D)
    product(consumed, p.rate * D, 1, p.compression_t, D, groups, D, G, D, p.rate * D, True)
    if not p.losses:
        return
    normed, factors, kv = at(scratch, p.t_group_normed), at(scratch, p.t_factors), at(scratch, p.t_group_keys_values)
    rows.standardise(groups, normed, factors, G, D, p.epsilon)
    rows.repeat_row(at(p.projection_bias, D), kv, G, 2 * D)
    rows.zero(at(kv, G * 2 * D), (G_ - G) * 2 * D)
    product(normed, D, 1, at(p.projection_t, D), 3 * D, kv, 2 * D, G, 2 * D, D, True)
    q = at(p.queries, kept * T * D)
    old = at(p.keys_values, (kept * p.num_slots_padded + p.first_consumed) * 2 * D)
    keys_t, scores, difference = at(scratch, p.t_transposed), at(scratch, p.t_scores), at(scratch, p.t_qu)
    weights, grad_kv = at(scratch, p.t_group_weights), at(scratch, p.t_group_grads)
    loss = np.float32(0)
    factor = np.float32(2) / np.float32(T * D)
    for head in range(p.num_heads):
        column = head * d
        # What is read from the old slots, negated.
        rows.transpose(at(old, column), 2 * D, keys_t, n_, d)
        product(at(q, column), D, 1, keys_t, n_, scores, n_, T, n_, d, False)
        rows.softmax_rows(scores, n_, T, n, False, n_, p.scale)
        rows.scale_by(np.float32(-1), scores, T * n_)
        product(scores, n_, 1, at(old, D + column), 2 * D, difference, d, T, d, n, False)
        rows.transpose(at(kv, column), 2 * D, keys_t, G_, d)
        product(at(q, column), D, 1, keys_t, G_, weights, G_, T, G_, d, False)
        rows.softmax_rows(weights, G_, T, G, False, G_, p.scale)
        product(weights, G_, 1, at(kv, D + column), 2 * D, difference, d, T, d, G, True)
        loss += rows.sum_of_squares(difference, T * d)
        rows.scale_by(factor, difference, T * d)
        product(weights, 1, G_, difference, d, at(grad_kv, D + column), 2 * D, G, d, T, False)
        rows.transpose(at(kv, D + column), 2 * D, keys_t, G_, d)
        product(difference, d, 1, keys_t, G_, scores, G_, T, G_, d, False)
        rows.softmax_rows_gradient(weights, scores, G_, T, G, False, G_, p.scale)
        product(scores, 1, G_, at(q, column), D, at(grad_kv, column), 2 * D, G, d, T, False)
    put(p.losses, row, loss / np.float32(T * D))
    grad_normed = at(scratch, p.t_mixed)
    product(grad_kv, 2 * D, 1, at(p.projection, D * D), D, grad_normed, D, G, D, 2 * D, False)
    grad_groups = at(p.grad_groups, kept * G * D)
    rows.zero(grad_groups, G * D)
    rows.add_standardise_gradient(grad_normed, normed, factors, grad_groups, G, D)


@kernel
def _feed_forward_backward(row, scratch, sums, p):
    """Compute the gradient of after, in `grad_x`, from that of out."""
    T, D, F = p.num_queries, p.d_model, p.d_feedforward
    grad_out = at(p.grad_out, row * T * D)
    normed, inner, active = at(p.normed, row * T * D), at(p.inner, row * T * F), at(p.active, row * T * F)
    grad_fed = grad_out
    if p.out_factors:
        grad_fed = at(scratch, p.t_mixed)
        rows.multiply(grad_out, at(p.out_factors, row * T * D), grad_fed, T * D)
    product(grad_fed, 1, D, active, F, at(sums, p.s_feed_out), F, D, F, T, True)
    rows.add_column_sums(grad_fed, D, at(sums, p.s_feed_out_bias), T, D)
    grad_inner, grad_normed = at(scratch, p.t_inner), at(scratch, p.t_normed)
    product(grad_fed, D, 1, p.feed_out, F, grad_inner, F, T, F, D, False)
    if p.inner_factors:
        rows.multiply(grad_inner, at(p.inner_factors, row * T * F), grad_inner, T * F)
    rows.multiply_by_gelu_slope(inner, grad_inner, T * F)
    product(grad_inner, 1, F, normed, D, at(sums, p.s_feed_in), D, F, D, T, True)
    rows.add_column_sums(grad_inner, F, at(sums, p.s_feed_in_bias), T, F)
    product(grad_inner, F, 1, p.folded_in, D, grad_normed, D, T, D, F, False)
    grad_after = at(p.grad_x, row * T * D)
    rows.copy(grad_out, grad_after, T * D)
    rows.add_standardise_gradient(grad_normed, normed, at(p.normed_factors, row * T), grad_after, T, D)


@kernel
def _attend_backward(row, scratch, sums, p):
    """Turn the gradient of after into that of x, both in `grad_x`."""
    T, S, D, d, P = p.num_queries, p.num_past, p.d_model, p.d_head, p.num_features
    K, K_ = S + T, p.num_slots_padded
    grad_after, grad_normed = at(p.grad_x, row * T * D), at(scratch, p.t_normed)
    mixed, q, kv = at(p.mixed, row * T * D), at(p.queries, row * T * D), at(p.keys_values, row * K_ * 2 * D)
    grad_attended = grad_after
    if p.mixed_factors:
        grad_attended = at(scratch, p.t_normed)
        rows.multiply(grad_after, at(p.mixed_factors, row * T * D), grad_attended, T * D)
    product(grad_attended, 1, D, mixed, D, at(sums, p.s_output), D, D, D, T, True)
    grad_mixed, grads = at(scratch, p.t_mixed), at(scratch, p.t_grads)  # grads [K, 3 D]: queries, keys, values
    product(grad_attended, D, 1, p.output, D, grad_mixed, D, T, D, D, False)
    own = at(grads, S * 3 * D)
    q_u, q_v, a = at(scratch, p.t_qu), at(scratch, p.t_qv), at(scratch, p.t_a)
    values_t, grad_scores = at(scratch, p.t_transposed), at(scratch, p.t_scores)
    grad_rotated, by_position = at(scratch, p.t_rotated), at(scratch, p.t_by_position)
    for head in range(p.num_heads):
        column = head * d
        rows.add_rows(at(q, column), D, at(p.content_bias, column), 0, q_u, d, T, d)
        rows.add_rows(at(q, column), D, at(p.position_bias, column), 0, q_v, d, T, d)
        weights = at(p.weights, (row * p.num_heads + head) * T * K_)
        rows.transpose(at(kv, D + column), 2 * D, values_t, K_, d)
        grad_q = at(own, column)
        for t in range(0, T, ROWS):
            n = min(ROWS, T - t)
            seen = S + t + n
            tile = at(grad_scores, t * K_)
            product(at(grad_mixed, t * D + column), D, 1, values_t, K_, tile, K_, n, padded(seen), d, False)
            rows.softmax_rows_gradient(at(weights, t * K_), tile, K_, n, S + t + 1, True, K_, p.scale)
            product(tile, K_, 1, at(kv, column), 2 * D, at(grad_q, t * 3 * D), 3 * D, n, d, seen, False)
            product(tile, K_, 1, p.slot_encoding, P, at(grad_rotated, t * P), P, n, P, seen, False)
        product(weights, 1, K_, at(grad_mixed, column), D, at(grads, 2 * D + column), 3 * D, K, d, T, False)
        product(grad_scores, 1, K_, q_u, d, at(grads, D + column), 3 * D, K, d, T, False)
        rows.add_column_sums(grad_q, 3 * D, at(sums, p.s_content_bias + column), T, d)
        # The rotation is its own inverse.
        rows.rotate_rows(grad_rotated, p.query_encoding, a, T, P // 2)
        product(q_v, 1, d, a, P, at(sums, p.s_position + head * d * P), P, d, P, T, True)
        product(a, P, 1, at(p.position_t, head * d * P), d, by_position, d, T, d, P, False)
        rows.add_column_sums(by_position, d, at(sums, p.s_position_bias + column), T, d)
        rows.add_rows(grad_q, 3 * D, by_position, d, grad_q, 3 * D, T, d)
    slots = at(p.slots, row * (S + T) * D)
    x_slots = at(slots, S * D)
    product(own, 1, 3 * D, x_slots, D, at(sums, p.s_query), D, D, D, T, True)
    product(at(grads, D), 1, 3 * D, slots, D, at(sums, p.s_key), D, 2 * D, D, K, True)
    rows.add_column_sums(own, 3 * D, at(sums, p.s_projection_bias), T, D)
    rows.add_column_sums(at(grads, D), 3 * D, at(sums, p.s_projection_bias + D), K, 2 * D)
    product(own, 3 * D, 1, p.projection, D, grad_normed, D, T, D, 3 * D, False)
    rows.add_standardise_gradient(grad_normed, x_slots, at(p.factors, row * T), grad_after, T, D)


@kernel
def _compress_backward(row, scratch, sums, p):
    D, G = p.d_model, p.num_groups
    consumed = at(p.past, (row * p.num_past + p.first_consumed) * D)
    grad_groups = at(scratch, p.t_mixed)
    rows.copy(at(p.grad_groups, row * G * D), grad_groups, G * D)
    rows.scale_by(get(p.grad_losses, row), grad_groups, G * D)
    product(grad_groups, 1, D, consumed, p.rate * D, at(sums, p.s_compression), p.rate * D, D, p.rate * D, G, True)
    rows.add_column_sums(grad_groups, D, at(sums, p.s_compression_bias), G, D)


@kernel
def _pack(p):
    """Fold the norms into the weights after them, and transpose."""
    D, F, d, P = p.d_model, p.d_feedforward, p.d_head, p.num_features
    folded, biases, no_bias = p.projection, p.projection_bias, np.int64(0)
    rows.fold(p.query, no_bias, p.gain, p.shift, folded, biases, D, D)
    rows.fold(p.key, no_bias, p.gain, p.shift, at(folded, D * D), at(biases, D), D, D)
    rows.fold(p.value, no_bias, p.gain, p.shift, at(folded, 2 * D * D), at(biases, 2 * D), D, D)
    rows.transpose(p.projection, D, p.projection_t, 3 * D, D)
    for head in range(p.num_heads):
        rows.transpose(at(p.position, head * d * P), P, at(p.position_t, head * d * P), d, P)
    rows.transpose(p.output, D, p.output_t, D, D)
    rows.fold(p.feed_in, p.feed_in_bias, p.feed_gain, p.feed_shift, p.folded_in, p.folded_in_bias, F, D)
    rows.transpose(p.folded_in, D, p.folded_in_t, F, D)
    rows.transpose(p.feed_out, F, p.feed_out_t, D, F)
    if p.num_groups:
        c = p.rate
        for o in range(D):
            for i in range(D):
                for j in range(c):
                    put(p.compression_t, (j * D + i) * D + o, get(p.compression, (o * D + i) * c + j))


@kernel
def _unpack_gradients(p):
    """Add up the threads' gradients of what `_pack` made, and turn them into the weights', in the first one's sums."""
    D, sums = p.d_model, p.sums
    for part in range(1, p.num_threads):
        rows.add_rows(sums, 0, at(p.sums, part * p.sums_size), 0, sums, 0, 1, p.sums_size)
    gain, shift, biases = at(sums, p.s_gain), at(sums, p.s_shift), at(sums, p.s_projection_bias)
    rows.unfold(at(sums, p.s_query), biases, p.query, p.gain, p.shift, gain, shift, D, D)
    rows.unfold(at(sums, p.s_key), at(biases, D), p.key, p.gain, p.shift, gain, shift, D, D)
    rows.unfold(at(sums, p.s_value), at(biases, 2 * D), p.value, p.gain, p.shift, gain, shift, D, D)
    gain, shift = at(sums, p.s_feed_gain), at(sums, p.s_feed_shift)
    bias = at(sums, p.s_feed_in_bias)
    rows.unfold(at(sums, p.s_feed_in), bias, p.feed_in, p.feed_gain, p.feed_shift, gain, shift, p.d_feedforward, D)


@kernel(entry=True)
def run(phase, part, plans):
    """PACK, then FORWARD of every part of the rows; or BACKWARD of every part, then UNPACK. Parts may run side by side.

    plans: a record for each layer, as kernels/layers_op.py makes them. One function does all, because numba compiles
    all kernels anew for each function that Python calls.
    """
    num_layers, p = len(plans), plans[0]
    if phase == PACK:
        for layer in range(num_layers):
            _pack(plans[layer])
        return
    if phase == UNPACK:
        for layer in range(num_layers):
            _unpack_gradients(plans[layer])
        return
    first, last = share(p.num_rows, part, p.num_threads)
    scratch = at(p.scratch, part * p.scratch_size)
    if phase == FORWARD:
        for row in range(first, last):
            for layer in range(num_layers):
                kept = row if p.keeps else part
                _attend(row, kept, scratch, plans[layer])
                _feed_forward(row, kept, plans[layer])
                if p.num_groups:
                    _compress(row, kept, scratch, plans[layer])
        return
    for layer in range(num_layers):
        rows.zero(at(plans[layer].sums, part * p.sums_size), p.sums_size)
    for row in range(first, last):
        for layer in range(num_layers - 1, -1, -1):
            sums = at(plans[layer].sums, part * p.sums_size)
            _feed_forward_backward(row, scratch, sums, plans[layer])
            _attend_backward(row, scratch, sums, plans[layer])
            if p.grad_losses:
                _compress_backward(row, scratch, sums, plans[layer])
