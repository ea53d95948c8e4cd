"""The layers of a small model on a CPU as one operation of autograd: the kernels of waveform/kernels/layers.py.

Torch takes some 250 operations for a layer of 64 features and its gradient, each of a few microseconds, most of which
is not arithmetic. Here all layers are two calls, and threads work on rows of their own.

Shape letters: L layers, B rows, T queries, S past slots, K = S + T, K' padded to whole vectors, D model width, H heads,
d = D / H head width, F feed-forward width, P position features, P' padded, G new compressed slots, c compression rate.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
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

# A layer's weights, in the order in which `_Layers` takes them: the kernels' name of each, and the layer's attribute.
_WEIGHTS = {
    "gain": "attention_norm.weight",  # [D]
    "shift": "attention_norm.bias",  # [D]
    "query": "attention.query.weight",  # [D, D]
    "key": "attention.key.weight",  # [D, D]
    "value": "attention.value.weight",  # [D, D]
    "content_bias": "attention.content_bias",  # [H, d]
    "position_bias": "attention.position_bias",  # [H, d]
    "position": "attention.position.weight",  # [D, P]; kernels are given [D, P']
    "output": "attention.output.weight",  # [D, D]
    "feed_gain": "feedforward_norm.weight",  # [D]
    "feed_shift": "feedforward_norm.bias",  # [D]
    "feed_in": "feedforward_in.weight",  # [F, D]
    "feed_in_bias": "feedforward_in.bias",  # [F]
    "feed_out": "feedforward_out.weight",  # [D, F]
    "feed_out_bias": "feedforward_out.bias",  # [D]
}
_CONVOLUTION = {  # if kernels compress
    "compression": "compressor.convolution.weight",  # [D, D, c]
    "compression_bias": "compressor.convolution.bias",  # [D]
}
# What dropout multiplies with, [B, T, D] or, within the feed-forward network, [B, T, F]: 0, or 1 / (1 - its share)
_DROPOUT = ("mixed_factors", "inner_factors", "out_factors")
# R of the times of queries [T, P'] and of slots [K, P'], and the latter transposed [P', K']
_ENCODINGS = ("query_encoding", "slot_encoding", "slot_encoding_t")
# What kernels are given and make, as addresses for each layer; 0: absent
_GIVEN = ("x", "past", *_ENCODINGS, *_DROPOUT, *_WEIGHTS, *_CONVOLUTION, "scratch")
_MADE = ("out", "groups", "losses", "sums", "grad_out", "grad_losses", "grad_x")


class KernelOutput(NamedTuple):
    """What the layers compute; only `out` and `losses` carry gradient."""

    out: Tensor  # [B, T, D]
    losses: Tensor | None  # [L, B] compression losses
    inputs: Tensor  # [L, B, T, D] of each layer
    groups: Tensor | None  # [L, B, G, D] new compressed slots
    attended: list[AttentionOutput] | None  # of each layer, with `out` for what is mixed; only if gradients are enabled


class _Sizes(NamedTuple):
    num_rows: int
    keeps: int  # 1: values of all rows, for a backward pass; 0: each thread overwrites those of its last row
    num_queries: int
    num_past: int
    num_slots_padded: int
    d_model: int
    d_feedforward: int
    num_heads: int
    d_head: int
    num_position_features: int
    num_features: int  # P'
    num_threads: int
    epsilon: float
    scale: float
    rate: int = 1  # c
    num_groups: int = 0  # G
    first_consumed: int = 0  # index in the past of the first slot that is compressed


def layers_in_kernels(
    layers: Sequence[Any], x_BTD: Tensor, pasts: Sequence[Tensor | None], slots: Slots, compression: dict[str, int]
) -> KernelOutput:
    """The layers' output and, at a window's end, new compressed slots and their losses. Needs fp32 on a CPU, widths of
    whole vectors, and rows that are equally far in their windows and memories.

    pasts: L x [B, S, D], the slots before the queries' own; None: there are none. compression: what the convolutions
    compress at the end of the window, as in `_Sizes`; empty: nothing. Gradients reach x and the parameters.
    """
    paths = {**_WEIGHTS, **_CONVOLUTION} if compression else _WEIGHTS
    weights = {name: [attrgetter(path)(layer) for layer in layers] for name, path in paths.items()}
    of_queries, of_slots = _pack_features(slots.query_encoding[0]), _pack_features(slots.slot_encoding[0])
    encodings = (of_queries, of_slots, pad_last(of_slots.t()).contiguous())
    given = {"past": [x_BTD[:, :0] if past is None else past.contiguous() for past in pasts], **weights}
    given |= {name: [encoding] * len(layers) for name, encoding in zip(_ENCODINGS, encodings, strict=True)}
    given["position"] = [_pack_features(weight.detach()) for weight in weights["position"]]
    if layers[0].training and layers[0].config.dropout:
        factors = [_dropout_factors(layer, x_BTD) for layer in layers]
        given |= {name: list(of_layers) for name, of_layers in zip(_DROPOUT, zip(*factors, strict=True), strict=True)}
    (B, T, D), keeps, config = x_BTD.shape, torch.is_grad_enabled(), layers[0].config
    num_past, d_head = given["past"][0].shape[1], D // config.num_heads
    sizes = _Sizes(
        num_rows=B,
        keeps=int(keeps),
        num_queries=T,
        num_past=num_past,
        num_slots_padded=padded(num_past + T),
        d_model=D,
        d_feedforward=config.d_feedforward,
        num_heads=config.num_heads,
        d_head=d_head,
        num_position_features=config.num_position_features,
        num_features=of_queries.shape[1],
        num_threads=min(kernel_threads(), B),
        epsilon=layers[0].attention_norm.eps,
        scale=d_head**-0.5,
        **compression,
    )
    flat = _by_layer(weights.values())
    out, losses, inputs, groups, *kept = _Layers.apply(x_BTD, given, sizes, tuple(weights), *flat)
    attended = [AttentionOutput(out, *of_layer) for of_layer in zip(*kept, strict=True)] if keeps else None
    return KernelOutput(out, losses, inputs, groups, attended)


def _by_layer(by_name: Iterable[Iterable[Any]]) -> list[Any]:
    """Lists by name -> one list, layer by layer: the order in which gradients lie in memory, for autograd to copy."""
    return [one for of_layer in zip(*by_name, strict=True) for one in of_layer]


def _dropout_factors(layer: Any, h_BTD: Tensor) -> list[Tensor]:
    """As `_DROPOUT` has them, drawn in the order in which `Layer.step` draws."""
    widths = (layer.config.d_model, layer.config.d_feedforward, layer.config.d_model)
    return [layer.dropout(h_BTD.new_ones(*h_BTD.shape[:2], width)) for width in widths]


def _pack_features(x: Tensor) -> Tensor:
    """[..., P] -> [..., P']: sines and cosines, each padded to whole vectors."""
    return pad_last(x.unflatten(-1, (2, -1))).flatten(-2).contiguous()


class _Layout:
    """Where everything lies in memory for given sizes, and the record of it that the kernels take."""

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


def _point(records: np.ndarray, of_layers: Mapping[str, Iterable[Tensor] | None]) -> None:
    """Tell the kernels where these tensors of all layers are, by name; the caller must keep them alive."""
    for name, tensors in of_layers.items():
        if tensors is not None:
            records[name] = [tensor.data_ptr() for tensor in tensors]


def compile_kernels() -> None:
    """Compile the kernels, or load them from disk, before their first use: calls them for no layers."""
    run(PACK, 0, _layout(_Sizes._make([*[VECTOR] * 12, 1e-5, 1.0, *[VECTOR] * 3])).template[:0])


def _offsets(parts: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each part begins, and the end of the last."""
    *offsets, end = accumulate(map(padded, parts.values()), initial=0)
    return dict(zip(parts, offsets, strict=True)), end


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, given: dict[str, Sequence[Tensor]], sizes: _Sizes, names: Sequence[str], *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        """given: what layers are given besides their input, by name, for each layer. names: those of the weights in it,
        which also follow as arguments, for autograd: all of the first layer, all of the second, ...
        """
        L, layout = len(given["past"]), _layout(sizes)
        hidden = x_BTD.new_empty(L, *x_BTD.shape)  # the inputs of all layers; the last one's output has its own tensor
        hidden[0] = x_BTD
        out, saved = torch.empty_like(hidden[0]), x_BTD.new_empty(L, layout.saved_size)
        groups = x_BTD.new_empty(L, len(x_BTD), sizes.num_groups, sizes.d_model) if sizes.num_groups else None
        losses = x_BTD.new_empty(L, len(x_BTD)) if sizes.keeps and sizes.num_groups else None
        scratch, records = x_BTD.new_empty(sizes.num_threads, layout.scratch_size), layout.records(saved)
        _point(records, {**given, "x": hidden, "scratch": [scratch] * L})
        _point(records, {"out": [*hidden[1:], out], "groups": groups, "losses": losses})
        with record_function("waveform::layers"):
            run(PACK, 0, records)
            run_parts(run, sizes.num_threads, FORWARD, records)
        ctx.given, ctx.sizes, ctx.names = given, sizes, names
        ctx.records, ctx.hidden, ctx.saved = records, hidden, saved
        queries = keys = values = None
        if sizes.keeps:
            (B, T), S, H = x_BTD.shape[:2], sizes.num_past, sizes.num_heads
            queries = _part(saved, layout.saved["queries"], B, T, H, sizes.d_head).transpose(2, 3)
            both = _part(saved, layout.saved["keys_values"], B, sizes.num_slots_padded, 2, H, sizes.d_head)
            keys, values = both[:, :, : S + T].permute(3, 0, 1, 4, 2, 5)
        ctx.mark_non_differentiable(*(x for x in (hidden, groups, queries, keys, values) if x is not None))
        ctx.set_materialize_grads(False)
        return out, losses, hidden, groups, queries, keys, values

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_losses: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        sizes, hidden, records = ctx.sizes, ctx.hidden, ctx.records.copy()
        L, layout = len(hidden), _layout(sizes)
        grad_out = torch.zeros_like(hidden[0]) if grad_out is None else grad_out.contiguous()
        grad_losses = None if grad_losses is None else grad_losses.contiguous()
        grads, scratch = torch.empty_like(hidden), hidden.new_empty(sizes.num_threads, layout.scratch_size)
        sums = hidden.new_empty(L, sizes.num_threads, layout.sums_size)
        _point(records, {"scratch": [scratch] * L, "sums": sums, "grad_losses": grad_losses})
        _point(records, {"grad_out": [*grads[1:], grad_out], "grad_x": grads})
        with record_function("waveform::layers_backward"):
            run_parts(run, sizes.num_threads, BACKWARD, records)
            run(UNPACK, 0, records)
        gradients = []
        for name in ctx.names:
            absent = name in _CONVOLUTION and grad_losses is None
            gradients.append([None] * L if absent else _gradient(sums[:, 0], sizes, name, ctx.given[name][0].shape))
        return grads[0], None, None, None, *_by_layer(gradients)


def _gradient(sums_LN: Tensor, sizes: _Sizes, name: str, shape: Sequence[int]) -> Tensor:
    """The gradient of the weight `name` in all layers, [L, ...]."""
    part, D = functools.partial(_part, sums_LN, _layout(sizes).sums[f"s_{name}"]), sizes.d_model
    if name == "position":
        padded_halves = part(D, 2, sizes.num_features // 2)
        return padded_halves[..., : sizes.num_position_features // 2].flatten(-2)
    return part(D, sizes.rate, D).transpose(2, 3) if name == "compression" else part(*shape)


def _part(of_layers_LN: Tensor, offset: int, *shape: int) -> Tensor:
    return of_layers_LN[:, offset : offset + math.prod(shape)].view(-1, *shape)
