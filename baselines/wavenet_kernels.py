"""Steps a WaveNet on a CPU with compiled kernels: a step reads every weight once, for all rows.

What a row computes does not depend on the number of rows (waveform/kernels/dense.py).

Shape letters: B rows, L layers, K taps, H = (K - 1) * D steps of a layer's history, C residual channels, G gate
channels, S skip channels, E end channels; C', G', ... padded to whole vectors.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from baselines.wavenet import WaveNet
from waveform.kernels.compiling import kernel
from waveform.kernels.dense import ADD, RELU, SET, DenseWeights, dense, pad_last, zeros
from waveform.kernels.draw import Draws, KernelDecoder, drawing
from waveform.kernels.row_inputs import embed_rows, lay_out_ends, lay_out_head, predict_logits
from waveform.kernels.rows import copy
from waveform.kernels.threads import share_vectors, shared_out
from waveform.kernels.vectors import LANES, at, get_int64, load, padded, sigmoid, store, tanh
from waveform.models.token_model import TokenState

_CONVOLVE, _RESIDUAL, _SKIP, _MIX, _HEAD = range(5)


@kernel
def _gate(first, last, layer, p):
    """tanh * sigmoid for a range of vectors of gates."""
    for b in range(p.num_rows):
        for i in range(first, last):
            halves = 2 * (b * p.num_gates + LANES * i)
            gate = tanh(load(p.z, halves)) * sigmoid(load(p.z, halves + LANES))
            store(p.gate, b * p.num_gates + LANES * i, gate)
            store(p.gates, (b * p.num_layers + layer) * p.num_gates + LANES * i, gate)


@kernel
def _work(phase, part, num_parts, layer, step, p, kind):
    """A thread's share of one phase of a layer."""
    if phase == _CONVOLVE:
        weights, x, out, shape, mode = p.convolution, p.taps, p.z, (p.num_taps * p.width, 2 * p.num_gates), SET
    elif phase == _RESIDUAL:
        weights, x, out, shape, mode = p.residual, p.gate, p.x, (p.num_gates, p.width), ADD
    elif phase == _SKIP:
        weights, x, out, shape, mode = p.skip, p.gates, p.hidden, (p.num_layers * p.num_gates, p.num_skip), RELU
    elif phase == _MIX:
        weights, x, out, shape, mode = p.mix, p.hidden, p.mixed, (p.num_skip, p.num_end), RELU
    else:
        weights, x, out, shape, mode = p.head, p.mixed, p.logits, (p.num_end, p.num_logits), SET
    first, last = share_vectors(shape[1], part, num_parts)
    dense(weights, layer, x, out, shape, (np.int64(0), p.num_rows), (first, last), mode, kind)
    if phase == _CONVOLVE:  # a group has both halves of its gates
        _gate(first // 2, last // 2, layer, p)


_share_out = shared_out(_work)


@kernel
def _gather_taps(layer, step, p):
    """Gather the convolution's input; this step then replaces the oldest tap in the ring."""
    start, dilation, older = get_int64(p.starts, layer), get_int64(p.dilations, layer), p.num_taps - 1
    for b in range(p.num_rows):
        x, taps = at(p.x, b * p.width), at(p.taps, b * p.num_taps * p.width)
        for tap in range(older):
            place = start + (step + tap * dilation) % (older * dilation)
            copy(at(p.rings, (place * p.num_rows + b) * p.width), at(taps, tap * p.width), p.width)
        copy(x, at(taps, older * p.width), p.width)
        place = start + step % (older * dilation)
        copy(x, at(p.rings, (place * p.num_rows + b) * p.width), p.width)


@kernel
def _step(tokens, step, sound, plan, kind):
    p = plan[0]
    embed_rows(tokens, sound, p)
    num_phases = 2 * p.num_layers + 2
    for i in range(num_phases):
        # Two phases per layer, except for the last, which has one: nothing reads its residual stream.
        layer, phase = i // 2, i % 2
        if i > 2 * p.num_layers - 2:
            layer, phase = 0, _SKIP + i - (2 * p.num_layers - 1)
        if phase == _CONVOLVE:
            _gather_taps(layer, step, p)
        _share_out(phase, layer, step, plan, kind)
    predict_logits(sound, p)


_steps = drawing(_step)


@kernel(entry=True)
def _run(tokens, step, draws, sound, plan, kind):
    _steps(tokens, step, draws, sound, plan, kind)


class KernelWaveNetDecoder(KernelDecoder):
    """Steps an fp32 WaveNet on the CPU. int8: weights are kept in 8 bits, with a scale for each output."""

    @torch.inference_mode()
    def __init__(self, model: WaveNet, state: TokenState, *, int8: bool = False) -> None:
        config, weights = model.config, _lay_out_weights(model, int8=int8)
        num_rows, num_layers = len(state.trunk[0]), len(config.dilations)
        width, num_gates = padded(config.residual_channels), padded(config.gate_channels)
        num_skip, num_end = padded(config.skip_channels), padded(config.head_width)
        ends, self._sound = lay_out_ends(model, state, head=weights["head"], num_rows=num_rows)
        fifos = torch.cat([fifo.transpose(0, 1) for fifo in state.trunk]).float()
        fields = {
            **weights,
            **ends,
            "num_layers": num_layers,  # L
            "num_taps": config.kernel_size,  # K
            "num_gates": num_gates,  # G'
            "num_skip": num_skip,  # S'
            "num_end": num_end,  # E'
            # [sum of H, B, C']: step n of a layer at its start + n mod H
            "rings": pad_last(fifos).contiguous().numpy(),
            "starts": np.cumsum([0, *config.histories[:-1]]).astype(np.int64),
            "dilations": np.array(config.dilations, dtype=np.int64),
            "taps": zeros(num_rows, config.kernel_size * width),  # input of a convolution
            "z": zeros(num_rows, 2 * num_gates),
            "gate": zeros(num_rows, num_gates),  # of one layer
            "gates": zeros(num_rows, num_layers * num_gates),
            "hidden": zeros(num_rows, num_skip),
            "mixed": zeros(num_rows, num_end),
        }
        super().__init__(fields, read=tuple(weights.values()), num_phases=2 * num_layers + 2, int8=int8)

    def _run(self, tokens: np.ndarray, draws: Draws) -> None:
        _run(tokens, self._num_steps, draws, self._sound, self._plan, self._kind)


def _lay_out_weights(model: WaveNet, *, int8: bool) -> dict[str, DenseWeights]:
    config = model.config
    c, g, taps, num_layers = config.residual_channels, config.gate_channels, config.kernel_size, len(config.dilations)
    convolutions, residuals = cast(list[nn.Linear], model.convolutions), cast(list[nn.Linear], model.residuals)

    def alternate(x: Tensor) -> Tensor:  # [2 G, ...] -> [2 G', ...], vectors of one half and of the other
        halves = torch.zeros(2, padded(g), *x.shape[1:])
        halves[:, :g] = x.unflatten(0, (2, g))
        return halves.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)

    kernels = [alternate(pad_last(conv.weight.unflatten(1, (taps, c))).flatten(1)) for conv in convolutions]
    # A WaveNet of one layer has no residual, but the kernel needs an address.
    residual = [layer.weight for layer in residuals] or [torch.zeros(c, g)]
    skip = pad_last(model.skip.weight.unflatten(1, (num_layers, g))).flatten(1)
    mix, head = model.head.mix, model.head.softmax.projection
    return {
        # [L, 2 G', K C']: vectors of tanh's and of sigmoid's half alternate; taps oldest first
        "convolution": DenseWeights(kernels, [alternate(conv.bias) for conv in convolutions], int8=int8),
        "residual": DenseWeights(residual, int8=int8),  # [L - 1, C', G']
        "skip": DenseWeights([skip], [model.skip.bias], int8=int8),  # [S', L G']
        "mix": DenseWeights([mix.weight], [mix.bias], int8=int8),  # [E', S']
        "head": lay_out_head(head, num_classes=config.vocab_size, int8=int8),  # [V', E']
    }
