"""The layers of a small model on a CPU as one operation of autograd: the kernels of waveform/kernels/layers.py.

Torch takes some 250 operations for a layer of 64 features and its gradient, each of a few microseconds, most of which
is not arithmetic. Here all layers are two calls, and threads work on rows of their own.

Shape letters: L layers, B rows, T queries, S past slots, K = S + T, K' padded to whole vectors, D model width, H heads,
d = D / H head width, F feed-forward width, P position features, P' padded, G new compressed slots, c compression rate.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from waveform.kernels.dense import pad_last
from waveform.kernels.layers import BACKWARD, FORWARD, PACK, UNPACK, run, saved_parts, scratch_parts, sum_parts
from waveform.kernels.record import make_record
from waveform.kernels.vectors import padded
from waveform.models.attention import VECTOR, AttentionOutput, Slots
from waveform.system.threads import kernel_threads, run_parts


class LayerParameters(NamedTuple):
    """Of one layer, in the order in which `_Layers` takes them."""

    gain: Tensor  # [D] of the attention's norm
    shift: Tensor  # [D]
    query: Tensor  # [D, D]
    key: Tensor  # [D, D]
    value: Tensor  # [D, D]
    content_bias: Tensor  # [H, d]
    position_bias: Tensor  # [H, d]
    position: Tensor  # [D, P]
    output: Tensor  # [D, D]
    feed_gain: Tensor  # [D] of the feed-forward network's norm
    feed_shift: Tensor  # [D]
    feed_in: Tensor  # [F, D]
    feed_in_bias: Tensor  # [F]
    feed_out: Tensor  # [D, F]
    feed_out_bias: Tensor  # [D]
    compression: Tensor | None  # [D, D, c] of the convolution, if kernels compress
    compression_bias: Tensor | None  # [D]


class DropoutFactors(NamedTuple):
    """What dropout multiplies with in one layer: 0, or 1 / (1 - its share)."""

    mixed_factors: Tensor  # [B, T, D], of what attention read
    inner_factors: Tensor  # [B, T, F], of the feed-forward network
    out_factors: Tensor  # [B, T, D] of it


class KernelOutput(NamedTuple):
    """What layers make of a piece; without gradient, but for `out` and `losses`."""

    out: Tensor  # [B, T, D]
    losses: Tensor | None  # [L, B] compression losses
    inputs: Tensor  # [L, B, T, D] of each layer
    groups: Tensor | None  # [L, B, G, D] new compressed slots
    attended: list[AttentionOutput] | None  # of each layer, with `out` for what is mixed; only if gradients are enabled


class PackedEncodings(NamedTuple):
    """R of the times of queries and slots, for kernels; the same for every layer."""

    query_encoding: Tensor  # [T, P']
    slot_encoding: Tensor  # [K, P']
    slot_encoding_t: Tensor  # [P', K']


def _parameters_of(layer: Any, *, compresses: bool) -> LayerParameters:
    """The weights of a layer; compresses: by kernels, with its convolution."""
    convolution = layer.compressor.convolution if compresses else None
    attention, norm = layer.attention, layer.attention_norm
    feed_norm, feed_in, feed_out = layer.feedforward_norm, layer.feedforward_in, layer.feedforward_out
    return LayerParameters(
        *(norm.weight, norm.bias, attention.query.weight, attention.key.weight, attention.value.weight),
        *(attention.content_bias, attention.position_bias, attention.position.weight, attention.output.weight),
        *(feed_norm.weight, feed_norm.bias, feed_in.weight, feed_in.bias, feed_out.weight, feed_out.bias),
        *((convolution.weight, convolution.bias) if convolution is not None else (None, None)),
    )


def _dropout_factors(layer: Any, h_BTD: Tensor) -> DropoutFactors:
    """What the layer's dropout multiplies with, drawn in the order in which `Layer.step` draws."""
    widths = (layer.config.d_model, layer.config.d_feedforward, layer.config.d_model)
    return DropoutFactors(*(layer.dropout(h_BTD.new_ones(*h_BTD.shape[:2], width)) for width in widths))


def _pack_encodings(slots: Slots) -> PackedEncodings:
    """Of rows that are all equally far."""
    of_queries, of_slots = _pack_features(slots.query_encoding[0]), _pack_features(slots.slot_encoding[0])
    return PackedEncodings(of_queries, of_slots, pad_last(of_slots.t()).contiguous())


def _pack_features(x: Tensor) -> Tensor:
    """[..., P] -> [..., P']: sines and cosines, each padded to whole vectors."""
    return pad_last(x.unflatten(-1, (2, -1))).flatten(-2).contiguous()


def layers_in_kernels(
    layers: Sequence[Any], x_BTD: Tensor, pasts: Sequence[Tensor | None], slots: Slots, compression: dict[str, int]
) -> KernelOutput:
    """The layers' output and, at a window's end, new compressed slots and their losses. fp32, on a CPU, widths of whole
    vectors, rows equally far.

    pasts: L x [B, S, D], the slots before the queries' own; None: there are none. compression: what the convolutions
    compress at the end of the window, as in `_Sizes`; empty: nothing. Gradients reach x and the parameters.
    """
    encodings = _pack_encodings(slots)
    parameters = [_parameters_of(layer, compresses=bool(compression)) for layer in layers]
    drops = layers[0].training and layers[0].config.dropout
    dropout = [_dropout_factors(layer, x_BTD) for layer in layers] if drops else None
    (B, T, D), p = x_BTD.shape, parameters[0]
    (H, d), num_threads, keeps = p.content_bias.shape, min(kernel_threads(), B), torch.is_grad_enabled()
    given = [x_BTD[:, :0] if past is None else past.contiguous() for past in pasts]
    sizes = _Sizes(
        num_rows=B,
        num_saved_rows=B if keeps else num_threads,
        num_queries=T,
        num_past=given[0].shape[1],
        num_slots_padded=padded(given[0].shape[1] + T),
        d_model=D,
        d_feedforward=len(p.feed_in),
        num_heads=H,
        d_head=d,
        num_position_features=p.position.shape[1],
        num_features=encodings.query_encoding.shape[1],
        has_loss=int(keeps and bool(compression)),
        has_dropout=int(dropout is not None),
        num_threads=num_threads,
        epsilon=layers[0].attention_norm.eps,
        scale=d**-0.5,
        **compression,
    )
    call = _Call(given, encodings, parameters, dropout, sizes, keeps)
    out, losses, inputs, groups, *kept = _Layers.apply(x_BTD, call, *(x for of_layer in parameters for x in of_layer))
    attended = [AttentionOutput(out, *of_layer) for of_layer in zip(*kept, strict=True)] if keeps else None
    return KernelOutput(out, losses, inputs, groups, attended)


class _Sizes(NamedTuple):
    num_rows: int
    num_saved_rows: int  # all, or if there is no backward pass one for each thread, overwritten by its next row
    num_queries: int
    num_past: int
    num_slots_padded: int
    d_model: int
    d_feedforward: int
    num_heads: int
    d_head: int
    num_position_features: int
    num_features: int  # P'
    has_loss: int
    has_dropout: int
    num_threads: int
    epsilon: float
    scale: float
    rate: int = 1  # c
    num_groups: int = 0  # G
    first_consumed: int = 0  # the first slot that is compressed, of the past


# What kernels get the address of, of each layer, or 0
_GIVEN = ("x", "past", *PackedEncodings._fields, *DropoutFactors._fields, *LayerParameters._fields, "scratch")
_MADE = ("out", "groups", "losses", "sums", "grad_out", "grad_losses", "grad_x")


class _Layout:
    """Where everything lies for some sizes, and the record of it all that the kernels take."""

    def __init__(self, sizes: _Sizes) -> None:
        self.saved, self.saved_size = _offsets(saved_parts(sizes))
        scratch, self.scratch_size = _offsets(scratch_parts(sizes))
        self.sums, self.sums_size = _offsets(sum_parts(sizes))
        addresses = dict.fromkeys((*self.saved, *_GIVEN, *_MADE), 0)
        sized = {"scratch_size": self.scratch_size, "sums_size": self.sums_size}
        self.template = make_record({**addresses, **sizes._asdict(), **scratch, **self.sums, **sized})

    def records(self, saved_LN: Tensor) -> np.ndarray:
        """One for each layer, with the addresses of what is kept for the backward pass."""
        records = self.template.repeat(len(saved_LN))
        first = saved_LN.data_ptr() + saved_LN.stride(0) * 4 * np.arange(len(saved_LN))
        for name, offset in self.saved.items():
            records[name] = first + 4 * offset
        return records


_layout = functools.lru_cache(maxsize=64)(_Layout)


def _point(records: np.ndarray, **of_layers: Iterable[Tensor | None] | None) -> None:
    """Tell the kernels where these tensors of all layers are; the caller must keep them alive."""
    for name, tensors in of_layers.items():
        if tensors is not None:
            records[name] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def compile_kernels() -> None:
    """Compile the kernels, or load them from disk, before their first use: calls them for no layers."""
    run(PACK, 0, _layout(_Sizes._make([*[VECTOR] * 14, 1e-5, 1.0, *[VECTOR] * 3])).template[:0])


def _offsets(parts: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each part begins, and the end of the last."""
    offsets, end = {}, 0
    for name, size in parts.items():
        offsets[name] = end
        end += padded(size)
    return offsets, end


class _Call(NamedTuple):
    """What layers are given besides their input."""

    pasts: list[Tensor]
    encodings: PackedEncodings
    parameters: Sequence[LayerParameters]
    dropout: Sequence[DropoutFactors] | None  # of all layers
    sizes: _Sizes
    keeps: bool  # what the backward pass needs


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, call: _Call, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """weights: the parameters of `call`, of the first layer, of the second, ..., for autograd."""
        sizes, L = call.sizes, len(call.parameters)
        layout = _layout(sizes)
        hidden = x_BTD.new_empty(L, *x_BTD.shape)  # the inputs of all layers; the output of the last is apart
        hidden[0] = x_BTD
        out, saved = torch.empty_like(hidden[0]), x_BTD.new_empty(L, layout.saved_size)
        groups = x_BTD.new_empty(L, len(x_BTD), sizes.num_groups, sizes.d_model) if sizes.num_groups else None
        losses = x_BTD.new_empty(L, len(x_BTD)) if sizes.has_loss else None
        scratch, records = x_BTD.new_empty(sizes.num_threads, layout.scratch_size), layout.records(saved)
        _point(records, x=hidden, past=call.pasts, **_columns([call.encodings] * L), **_columns(call.parameters))
        _point(records, scratch=[scratch] * L, **_columns(call.dropout) if call.dropout else {})
        _point(records, out=[*hidden[1:], out], groups=groups, losses=losses)
        with record_function("waveform::layers"):
            run(PACK, 0, records)
            run_parts(run, sizes.num_threads, FORWARD, records)
        ctx.call, ctx.records, ctx.hidden, ctx.saved = call, records, hidden, saved
        queries = keys = values = None
        if call.keeps:
            (B, T), S, H = x_BTD.shape[:2], sizes.num_past, sizes.num_heads
            queries = _part(saved, layout.saved["queries"], B, T, H, sizes.d_head).transpose(2, 3)
            both = _part(saved, layout.saved["keys_values"], B, sizes.num_slots_padded, 2, H, sizes.d_head)
            keys, values = both[:, :, : S + T].permute(3, 0, 1, 4, 2, 5)
        ctx.mark_non_differentiable(*(x for x in (hidden, groups, queries, keys, values) if x is not None))
        ctx.set_materialize_grads(False)
        return out, losses, hidden, groups, queries, keys, values

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_losses: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        sizes, hidden, records = ctx.call.sizes, ctx.hidden, ctx.records.copy()
        layout = _layout(sizes)
        grad_out = torch.zeros_like(hidden[0]) if grad_out is None else grad_out.contiguous()
        grad_losses = None if grad_losses is None else grad_losses.contiguous()
        grads, scratch = torch.empty_like(hidden), hidden.new_empty(sizes.num_threads, layout.scratch_size)
        sums = hidden.new_empty(len(hidden), sizes.num_threads, layout.sums_size)
        _point(records, scratch=[scratch] * len(hidden), sums=sums, grad_losses=grad_losses)
        _point(records, grad_out=[*grads[1:], grad_out], grad_x=grads)
        with record_function("waveform::layers_backward"):
            run_parts(run, sizes.num_threads, BACKWARD, records)
            run(UNPACK, 0, records)
        of = functools.partial(_gradient, sums[:, 0], sizes, compresses=grad_losses is not None)
        gradients = map(of, LayerParameters._fields, ctx.call.parameters[0])
        return grads[0], None, *(gradient for of_layer in zip(*gradients, strict=True) for gradient in of_layer)


def _gradient(
    sums_LN: Tensor, sizes: _Sizes, name: str, weight: Tensor | None, *, compresses: bool
) -> Tensor | list[None]:
    """Of this parameter of all layers, [L, ...]."""
    if weight is None or (name.startswith("compression") and not compresses):
        return [None] * len(sums_LN)
    part, D = functools.partial(_part, sums_LN, _layout(sizes).sums[f"s_{name}"]), sizes.d_model
    if name == "position":
        padded_halves = part(D, 2, sizes.num_features // 2)
        return padded_halves[..., : sizes.num_position_features // 2].flatten(-2)
    return part(D, sizes.rate, D).transpose(2, 3) if name == "compression" else part(*weight.shape)


def _columns(of_layers: Sequence[Any]) -> dict[str, tuple[Tensor | None, ...]]:
    """Named tuples of tensors, one for each layer -> by name, the tensors of all layers."""
    return dict(zip(of_layers[0]._fields, zip(*of_layers, strict=True), strict=True))


def _part(of_layers_LN: Tensor, offset: int, *shape: int) -> Tensor:
    return of_layers_LN[:, offset : offset + math.prod(shape)].view(-1, *shape)
