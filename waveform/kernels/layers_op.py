"""The layers of a small model on a CPU as one operation of autograd: the kernels of waveform/kernels/layers.py.

Torch takes some 250 operations for a layer of 64 features and its gradient, each of a few microseconds, most of which
is not arithmetic. Here all layers are two calls, and threads work on rows of their own.

Shape letters: L layers, B rows, T queries, S past slots, K = S + T, K' padded to whole vectors, D model width, H heads,
d = D / H head width, F feed-forward width, P position features, P' padded, G new compressed slots, c compression rate.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from waveform.kernels.layers import BACKWARD, FORWARD, PACK, UNPACK, run, saved_parts, scratch_parts, sum_parts
from waveform.kernels.record import make_record
from waveform.kernels.vectors import padded
from waveform.models.attention import VECTOR, Slots
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


class Compression(NamedTuple):
    """What the layers' convolutions compress at the end of the window."""

    rate: int  # c
    num_groups: int  # G
    first_consumed: int  # the first slot that is compressed, of the past
    has_loss: bool


_NOTHING_COMPRESSED = Compression(rate=1, num_groups=0, first_consumed=0, has_loss=False)


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
    queries: Tensor | None  # [L, B, H, T, d] without biases; only if gradients are enabled, as the next two
    keys: Tensor | None  # [L, B, H, K, d]
    values: Tensor | None  # [L, B, H, K, d]


class PackedEncodings(NamedTuple):
    """R of the times of queries and slots, for kernels; the same for every layer."""

    query_encoding: Tensor  # [T, P']
    slot_encoding: Tensor  # [K, P']
    slot_encoding_t: Tensor  # [P', K']


def parameters_of(layer: Any, *, compresses: bool) -> LayerParameters:
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


def dropout_factors(layer: Any, h_BTD: Tensor) -> DropoutFactors:
    """What the layer's dropout multiplies with, drawn in the order in which `Layer.step` draws."""
    widths = (layer.config.d_model, layer.config.d_feedforward, layer.config.d_model)
    return DropoutFactors(*(layer.dropout(h_BTD.new_ones(*h_BTD.shape[:2], width)) for width in widths))


def pack_encodings(slots: Slots) -> PackedEncodings:
    """Of rows that are all equally far."""
    of_queries, of_slots = _pack_features(slots.query_encoding[0]), _pack_features(slots.slot_encoding[0])
    num_slots = len(of_slots)
    return PackedEncodings(of_queries, of_slots, F.pad(of_slots.t(), (0, padded(num_slots) - num_slots)).contiguous())


def _pack_features(x: Tensor) -> Tensor:
    """[..., P] -> [..., P']: sines and cosines, each padded to whole vectors."""
    half = x.shape[-1] // 2
    return F.pad(x.unflatten(-1, (2, half)), (0, padded(half) - half)).flatten(-2).contiguous()


def layers_in_kernels(
    x_BTD: Tensor,
    pasts: Sequence[Tensor | None],
    encodings: PackedEncodings,
    parameters: Sequence[LayerParameters],
    compression: Compression | None,
    dropout: Sequence[DropoutFactors] | None,
    *,
    epsilon: float,
) -> KernelOutput:
    """The layers' output and, at a window's end, new compressed slots and their losses. fp32, on a CPU, widths of whole
    vectors, rows equally far.

    pasts: L x [B, S, D], the slots before the queries' own; None: there are none. dropout: of each layer. Gradients
    reach x and the parameters.
    """
    weights = [weight for of_layer in parameters for weight in of_layer]
    given = [x_BTD[:, :0] if past is None else past for past in pasts]
    return KernelOutput(
        *_Layers.apply(x_BTD, given, encodings, compression, dropout, epsilon, torch.is_grad_enabled(), *weights)
    )


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
    rate: int
    num_groups: int
    first_consumed: int
    has_loss: int
    has_dropout: int
    num_threads: int
    epsilon: float
    scale: float


# What kernels get the address of, of each layer, or 0
_GRADIENTS = tuple(f"grad_{name}" for name in LayerParameters._fields)
_INPUTS = ("x", "past", *PackedEncodings._fields, *DropoutFactors._fields, *LayerParameters._fields, "scratch")
_RESULTS = ("out", "groups", "losses", "sums", "grad_out", "grad_losses", "grad_x", *_GRADIENTS)


class _Layout:
    """Where everything lies for some sizes, and the record of it all that the kernels take."""

    def __init__(self, sizes: _Sizes) -> None:
        self.saved, self.saved_size = _offsets(saved_parts(sizes))
        scratch, self.scratch_size = _offsets(scratch_parts(sizes))
        sums, self.sums_size = _offsets(sum_parts(sizes))
        self._saved_bytes = 4 * np.array(list(self.saved.values()))
        addresses = dict.fromkeys((*self.saved, *_INPUTS, *_RESULTS), 0)
        sized = {"scratch_size": self.scratch_size, "sums_size": self.sums_size}
        self.template = make_record({**addresses, **sizes._asdict(), **scratch, **sums, **sized})

    def records(self, saved_LN: Tensor, tensors: Mapping[str, Iterable[Tensor | None]]) -> np.ndarray:
        """One for each layer, with the addresses of one call's `tensors`, each of all layers."""
        num_layers, num_saved = len(saved_LN), len(self.saved)
        none = [0] * num_layers
        columns = [
            [0 if tensor is None else tensor.data_ptr() for tensor in tensors[name]] if name in tensors else none
            for name in (*_INPUTS, *_RESULTS)
        ]
        records = self.template.repeat(num_layers)
        addresses = records.view(np.int64).reshape(num_layers, -1)
        addresses[:, :num_saved] = [saved.data_ptr() + self._saved_bytes for saved in saved_LN]
        addresses[:, num_saved : num_saved + len(columns)] = np.array(columns).T
        return records


@functools.lru_cache(maxsize=64)
def _layout(sizes: _Sizes) -> _Layout:
    return _Layout(sizes)


def compile_kernels() -> None:
    """Compile the kernels, or load them from disk, before their first use: calls them for no layers."""
    run(PACK, 0, _layout(_Sizes._make([*[VECTOR] * 17, 1e-5, 1.0])).template[:0])


def _offsets(parts: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each part begins, and the end of the last."""
    offsets, end = {}, 0
    for name, size in parts.items():
        offsets[name] = end
        end += padded(size)
    return offsets, end


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        pasts: list[Tensor],
        encodings: PackedEncodings,
        compression: Compression | None,
        dropout: Sequence[DropoutFactors] | None,
        epsilon: float,
        keeps: bool,
        *weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        p = LayerParameters._make(cast(Sequence[Tensor], weights[: len(LayerParameters._fields)]))
        (B, T, D), S, (H, d), L = x_BTD.shape, pasts[0].shape[1], p.content_bias.shape, len(pasts)
        num_threads = min(kernel_threads(), B)
        sizes = _Sizes(
            num_rows=B,
            num_saved_rows=B if keeps else num_threads,
            num_queries=T,
            num_past=S,
            num_slots_padded=padded(S + T),
            d_model=D,
            d_feedforward=len(p.feed_in),
            num_heads=H,
            d_head=d,
            num_position_features=p.position.shape[1],
            num_features=encodings.query_encoding.shape[1],
            **(compression or _NOTHING_COMPRESSED)._asdict(),
            has_dropout=int(dropout is not None),
            num_threads=num_threads,
            epsilon=epsilon,
            scale=d**-0.5,
        )
        layout = _layout(sizes)
        hidden = x_BTD.new_empty(L, B, T, D)  # the inputs of all layers; the output of the last is apart
        hidden[0] = x_BTD
        out = torch.empty_like(hidden[0])
        groups = x_BTD.new_empty(L, B, sizes.num_groups, D) if sizes.num_groups else None
        losses = x_BTD.new_empty(L, B) if sizes.has_loss else None
        saved = x_BTD.new_empty(L, layout.saved_size)
        ctx.call = _Call(sizes, hidden, [past.contiguous() for past in pasts], encodings, dropout, weights, saved)
        ctx.call.forward(out, groups, losses)
        queries = keys = values = None
        if keeps:
            queries = _part(saved, layout.saved["queries"], B, T, H, d).transpose(2, 3)
            keys_values = _part(saved, layout.saved["keys_values"], B, sizes.num_slots_padded, 2, H, d)
            keys, values = keys_values[:, :, : S + T].permute(3, 0, 1, 4, 2, 5)
        ctx.mark_non_differentiable(*(x for x in (hidden, groups, queries, keys, values) if x is not None))
        ctx.set_materialize_grads(False)
        return out, losses, hidden, groups, queries, keys, values

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_losses: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        grad_x, gradients = ctx.call.backward(grad_out, grad_losses)
        return (grad_x, None, None, None, None, None, None, *gradients)


@dataclass(frozen=True)
class _Call:
    """One forward pass, and what its backward pass needs."""

    sizes: _Sizes
    hidden_LBTD: Tensor
    pasts: list[Tensor]
    encodings: PackedEncodings
    dropout: Sequence[DropoutFactors] | None  # of all layers
    weights: tuple[Tensor | None, ...]  # of all layers
    saved_LN: Tensor

    def forward(self, out_BTD: Tensor, groups: Tensor | None, losses: Tensor | None) -> None:
        scratch = self._scratch()
        plans = self._records(scratch, out=[*self.hidden_LBTD[1:], out_BTD], groups=groups, losses=losses)
        with record_function("waveform::layers"):
            run(PACK, 0, plans)
            run_parts(run, self.sizes.num_threads, FORWARD, plans)

    def backward(self, grad_out: Tensor | None, grad_losses: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the first layer's input and of all weights."""
        grad_out = torch.zeros_like(self.hidden_LBTD[0]) if grad_out is None else grad_out.contiguous()
        grad_losses = None if grad_losses is None else grad_losses.contiguous()
        gradients = [None if weight is None else torch.empty_like(weight) for weight in self.weights]
        if grad_losses is None:
            for i in range(0, len(gradients), len(_GRADIENTS)):
                gradients[i + len(_GRADIENTS) - 2 : i + len(_GRADIENTS)] = None, None
        grads_LBTD, scratch = torch.empty_like(self.hidden_LBTD), self._scratch()
        sums = scratch.new_empty(len(grads_LBTD), self.sizes.num_threads, _layout(self.sizes).sums_size)
        plans = self._records(
            scratch,
            sums=sums,
            grad_out=[*grads_LBTD[1:], grad_out],
            grad_losses=grad_losses,
            grad_x=grads_LBTD,
            **_by_name(_GRADIENTS, gradients),
        )
        with record_function("waveform::layers_backward"):
            run_parts(run, self.sizes.num_threads, BACKWARD, plans)
            run(UNPACK, 0, plans)
        return grads_LBTD[0], gradients

    def _scratch(self) -> Tensor:
        return self.hidden_LBTD.new_empty(self.sizes.num_threads, _layout(self.sizes).scratch_size)

    def _records(self, scratch: Tensor, **results: Iterable[Tensor | None] | None) -> np.ndarray:
        """results: of all layers. The caller must keep all of it alive."""
        shared = {"scratch": scratch, **self.encodings._asdict()}
        tensors: dict[str, Iterable[Tensor | None]] = {
            "x": self.hidden_LBTD,
            "past": self.pasts,
            **_by_name(DropoutFactors._fields, [factors for of_layer in self.dropout or () for factors in of_layer]),
            **_by_name(LayerParameters._fields, self.weights),
            **{name: [tensor] * len(self.hidden_LBTD) for name, tensor in shared.items()},
            **{name: of_layers for name, of_layers in results.items() if of_layers is not None},
        }
        return _layout(self.sizes).records(self.saved_LN, tensors)


def _by_name(names: Sequence[str], of_layers: Sequence[Tensor | None]) -> dict[str, Sequence[Tensor | None]]:
    """of_layers: all of the first layer, in the order of `names`, then all of the second."""
    return {name: of_layers[i :: len(names)] for i, name in enumerate(names)} if of_layers else {}


def _part(saved_LN: Tensor, offset: int, *shape: int) -> Tensor:
    return saved_LN[:, offset : offset + math.prod(shape)].view(-1, *shape)
