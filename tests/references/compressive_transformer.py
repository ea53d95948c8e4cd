"""The Compressive Transformer (Rae et al. 2019) as slow, plain loops: the oracle of the real model.

One row at a time, one query at a time; memories are Python lists of slots that know their own time, so there are no
masks, no counters, no shifts and no batch. Every query computes R(t_i - t_j) afresh for every slot that it sees. Only
parameters are taken from the model under test; not one of its methods is called. `position` of a config, if it has one,
is that of Transformer-XL's ablations.

Shape letters: D model width, H heads, d = D / H, P position features, N slots, c compression rate.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Slot:
    """One vector to attend to."""

    vector: Tensor  # [D]
    time: float
    received: list[Tensor] = field(default_factory=list)  # attention, mean over heads, of each query while in memory


@dataclass
class LayerMemory:
    """What one layer of one row remembers; every list is oldest first."""

    memory: list[Slot]
    compressed: list[Slot]
    num_evicted: int  # positions before this one have left the memory


@dataclass
class Reference:
    """What the naive model computes for a stream."""

    hidden: Tensor  # [B, T, D]
    aux: Tensor  # [B, complete windows]: the compression loss of each boundary, zero if nothing is compressed


def run(model: Any, config: Any, tokens: Tensor, *, cut_gradient: bool = True) -> Reference:
    """Run every row of `tokens` [B, T] from a fresh state.

    cut_gradient: no gradient crosses a window boundary, as when every call is one window; otherwise all of the stream
    is one graph (which includes the compressor only if it has no loss of its own).
    """
    hiddens, losses = [], []
    for row in tokens:
        hidden, aux = _run_row(model, config, row, cut_gradient=cut_gradient)
        hiddens.append(torch.stack(hidden))
        losses.append(torch.stack(aux) if aux else hidden[0].new_zeros(0))
    return Reference(torch.stack(hiddens), torch.stack(losses))


def _run_row(model: Any, config: Any, tokens: Tensor, *, cut_gradient: bool) -> tuple[list[Tensor], list[Tensor]]:
    configs = [_of_layer(config, i) for i in range(config.num_layers)]
    memories = [_initial_memory(model, of_layer) for of_layer in configs]
    hidden: list[Tensor] = []
    aux: list[Tensor] = []
    for start in range(0, len(tokens), config.window):
        window = tokens[start : start + config.window]
        vectors = [model.embedding.weight[token] for token in window]
        if _position(config) == "absolute":
            encoding = SimpleNamespace(num_position_features=config.d_model, clamp_len=0)
            vectors = [vector + vector.new_tensor(_r(place, encoding)) for place, vector in enumerate(vectors)]
        inputs = []
        for layer, of_layer, memory in zip(model.layers, configs, memories, strict=True):
            if _position(config) == "learned":
                vectors = [v + layer.attention.encoding.vectors[place] for place, v in enumerate(vectors)]
            inputs.append([Slot(vector, float(start + i)) for i, vector in enumerate(vectors)])
            vectors = _layer(layer, of_layer, inputs[-1], memory)
        hidden += [_normalise(model.final_norm, vector) if config.norm == "pre" else vector for vector in vectors]
        if len(window) == config.window:
            losses = [
                _end_window(layer, of_layer, slots, memory, cut_gradient=cut_gradient)
                for layer, of_layer, slots, memory in zip(model.layers, configs, inputs, memories, strict=True)
            ]
            aux.append(sum(losses, torch.zeros_like(losses[0])) / len(losses))
    return hidden, aux


def _position(config: Any) -> str:
    return getattr(config, "position", "relative")


def _of_layer(config: Any, layer: int) -> Any:
    """The configuration with the sizes of one layer."""
    sizes = {name: getattr(config, name) for name in ("memory", "compressed", "compression_rate")}
    own = {name: value[layer] if isinstance(value, list) else value for name, value in sizes.items()}
    return SimpleNamespace(**{**vars(config), **own})


def _initial_memory(model: Any, config: Any) -> LayerMemory:
    if config.empty_memory == "mask":
        return LayerMemory([], [], num_evicted=0)
    # A stream of zero vectors that began long ago: negative times.
    c, num_groups = config.compression_rate, config.window // config.compression_rate
    zero = torch.zeros_like(model.embedding.weight[0])
    starts = range(-config.memory - config.window * config.compressed, -config.memory, config.window)
    times = [float(start + c * group + (c - 1) / 2) for start in starts for group in range(num_groups)]
    compressed = [Slot(zero, time) for time in times[-config.compressed :]]
    # The zeros before the first token attended to nothing.
    unused = {time: [zero[0]] * config.window * (-1 - time // config.window) for time in range(-config.memory, 0)}
    memory = [Slot(zero, float(time), received) for time, received in unused.items()]
    return LayerMemory(memory, compressed, num_evicted=-config.memory)


# The layer


def _layer(layer: Any, config: Any, window: list[Slot], memory: LayerMemory) -> list[Tensor]:
    if config.compressed_position == "contiguous":
        for age, slot in enumerate(reversed(memory.compressed)):
            slot.time = float(memory.num_evicted - 1 - age)
    outputs = []
    for i, query in enumerate(window):
        h = query.vector
        attended = _attend(layer, config, query, memory, window[: i + 1])
        if config.norm == "pre":
            a = h + attended
            outputs.append(a + _feedforward(layer, config, _normalise(layer.feedforward_norm, a)))
        else:
            a = _normalise(layer.attention_norm, h + attended)
            outputs.append(_normalise(layer.feedforward_norm, a + _feedforward(layer, config, a)))
    return outputs


def _attend(layer: Any, config: Any, query: Slot, memory: LayerMemory, window: list[Slot]) -> Tensor:
    attention, num_heads = layer.attention, config.num_heads
    seen = memory.compressed + memory.memory + window
    if config.same_length:
        seen = [slot for slot in seen if query.time - slot.time < config.memory]
    q = (attention.query.weight @ _attention_input(layer, config, query.vector)).view(num_heads, -1)
    vectors = _attention_input(layer, config, torch.stack([slot.vector for slot in seen]))
    k, v = vectors @ attention.key.weight.T, vectors @ attention.value.weight.T
    distances, encoding = [query.time - slot.time for slot in seen], _position(config)
    if encoding == "relative":
        r = q.new_tensor([_r(distance, config) for distance in distances]) @ attention.position.weight.T
    heads, received = [], []
    for head in range(num_heads):
        part = slice(head * q.shape[1], (head + 1) * q.shape[1])
        scores = k[:, part] @ q[head]
        if encoding == "relative":
            position = r[:, part] @ (q[head] + attention.position_bias[head])
            scores = scores + k[:, part] @ attention.content_bias[head] + position
        elif encoding == "shaw":
            places = [min(int(distance), config.max_distance - 1) for distance in distances]
            scores = scores + q[head] @ attention.encoding.vectors[head][:, places]
        weights = torch.softmax(scores / math.sqrt(q.shape[1]), 0)
        heads.append(weights @ v[:, part])
        received.append(weights.detach())
    for slot, weight in zip(seen, sum(received) / num_heads, strict=True):
        slot.received.append(weight)
    return attention.output.weight @ torch.cat(heads)


def _r(distance: float, config: Any) -> list[float]:
    """The P sinusoids of one distance: sines, then cosines."""
    features = config.num_position_features
    distance = min(distance, config.clamp_len or distance)
    angles = [distance * 10000 ** (-2 * m / features) for m in range(features // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def _attention_input(layer: Any, config: Any, vector: Tensor) -> Tensor:
    return _normalise(layer.attention_norm, vector) if config.norm == "pre" else vector


def _feedforward(layer: Any, config: Any, vector: Tensor) -> Tensor:
    inner = layer.feedforward_in.weight @ vector + layer.feedforward_in.bias
    share = inner > 0 if config.activation == "relu" else (1 + torch.erf(inner / math.sqrt(2))) / 2
    return layer.feedforward_out.weight @ (inner * share) + layer.feedforward_out.bias


def _normalise(norm: nn.LayerNorm, vector: Tensor, *, cut_parameters: bool = False) -> Tensor:
    weight, bias = (norm.weight.detach(), norm.bias.detach()) if cut_parameters else (norm.weight, norm.bias)
    centred = vector - vector.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + norm.eps) * weight + bias


# The end of a window


def _end_window(layer: Any, config: Any, window: list[Slot], memory: LayerMemory, *, cut_gradient: bool) -> Tensor:
    """Shift the window into the memory and compress what falls out; returns this layer's compression loss."""
    # A most-used slot's attention counts while it is in memory, not while it is in the window.
    entering = [Slot(slot.vector.detach() if cut_gradient else slot.vector, slot.time) for slot in window]
    kept = memory.memory + entering
    num_leaving = max(0, len(kept) - config.memory)
    leaving, memory.memory = kept[:num_leaving], kept[num_leaving:]
    memory.num_evicted += num_leaving
    no_loss = window[0].vector.new_zeros(())
    if config.compressed == 0:
        return no_loss

    if num_leaving < config.window:
        return no_loss  # the first window to leave does so in part, and is dropped
    num_groups = config.window // config.compression_rate
    consumed = leaving[: num_groups * config.compression_rate]  # the rest fills no group, and is dropped
    # A compressor with a loss of its own learns from nothing else: other gradients neither reach nor pass it.
    apart = cut_gradient or config.compression_loss != "none"
    old = [slot.vector.detach() if apart else slot.vector for slot in consumed]
    new = _compress(layer, config, consumed, old)
    assert len(new) == num_groups
    c = config.compression_rate
    times = [consumed[i * c].time + (c - 1) / 2 for i in range(num_groups)]
    for vector, time in zip(new, times, strict=True):
        memory.compressed.append(Slot(vector.detach() if apart else vector, time))
    memory.compressed = memory.compressed[-config.compressed :]
    if config.compression not in ("conv", "dilated"):
        return no_loss  # a compressor without parameters has nothing to learn
    if config.compression_loss == "attention":
        return _attention_loss(layer, config, window, old, new)
    if config.compression_loss == "autoencode":
        return _autoencode_loss(layer, config, old, new)
    return no_loss


def _compress(layer: Any, config: Any, slots: list[Slot], vectors: list[Tensor]) -> list[Tensor]:
    c = config.compression_rate
    groups = [vectors[i : i + c] for i in range(0, len(vectors), c)]
    match config.compression:
        case "max":
            return [torch.stack(group).max(0).values for group in groups]
        case "mean":
            return [torch.stack(group).mean(0) for group in groups]
        case "most_used":
            return [vectors[i] for i in _most_used(slots, len(groups))]
        case "conv":
            return [_strided(layer.compressor.convolution, group) for group in groups]
        case "dilated":
            for convolution in layer.compressor.convolutions:
                vectors = [torch.relu(vector) for vector in _same(convolution, vectors)]
            groups = [vectors[i : i + c] for i in range(0, len(vectors), c)]
            return [_strided(layer.compressor.convolution, group) for group in groups]
    raise AssertionError(config.compression)


def _most_used(slots: list[Slot], num_kept: int) -> list[int]:
    """Which slots received most attention on average, in the order of time."""
    average = [float(sum(slot.received) / len(slot.received)) for slot in slots]
    return sorted(sorted(range(len(slots)), key=lambda i: average[i], reverse=True)[:num_kept])


def _strided(convolution: nn.Conv1d, group: list[Tensor]) -> Tensor:
    """One output of a convolution whose kernel and stride are the length of `group`."""
    total = convolution.bias
    for j, vector in enumerate(group):
        total = total + convolution.weight[:, :, j] @ vector
    return total


def _same(convolution: nn.Conv1d, vectors: list[Tensor]) -> list[Tensor]:
    """A dilated convolution with kernel 3, centred, with zeros on both sides."""
    (dilation,) = convolution.dilation
    outputs = []
    for i in range(len(vectors)):
        total = convolution.bias
        for j, place in enumerate((i - dilation, i, i + dilation)):
            if 0 <= place < len(vectors):
                total = total + convolution.weight[:, :, j] @ vectors[place]
        outputs.append(total)
    return outputs


# Compression losses: gradient reaches the compressor through `new`, and nothing else


def _attention_loss(layer: Any, config: Any, window: list[Slot], old: list[Tensor], new: list[Tensor]) -> Tensor:
    """Algorithm 2's attention reconstruction: content-only attention over exactly the slots just compressed."""

    def attention_input(vector: Tensor) -> Tensor:
        return _normalise(layer.attention_norm, vector, cut_parameters=True) if config.norm == "pre" else vector

    attention = layer.attention
    queries = [attention.query.weight.detach() @ attention_input(slot.vector.detach()) for slot in window]

    def outputs(vectors: list[Tensor]) -> Tensor:
        inputs = attention_input(torch.stack(vectors))
        k, v = inputs @ attention.key.weight.detach().T, inputs @ attention.value.weight.detach().T
        d = config.d_model // config.num_heads
        results = []
        for q in queries:
            for head in range(config.num_heads):
                part = slice(head * d, (head + 1) * d)
                weights = torch.softmax(k[:, part] @ q[part] / math.sqrt(d), 0)
                results.append(weights @ v[:, part])
        return torch.stack(results)

    return F.mse_loss(outputs(new), outputs([vector.detach() for vector in old]))


def _autoencode_loss(layer: Any, config: Any, old: list[Tensor], new: list[Tensor]) -> Tensor:
    decoder = layer.compressor.decoder
    decoded = [
        decoder.bias + vector @ decoder.weight[:, :, j] for vector in new for j in range(config.compression_rate)
    ]
    return F.mse_loss(torch.stack(decoded), torch.stack([vector.detach() for vector in old]))
