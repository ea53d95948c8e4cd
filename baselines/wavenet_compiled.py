"""Steps a WaveNet on a CPU with compiled kernels: a step reads every weight once, for all rows.

Rows are computed alike whatever their number (waveform/decoding/kernels.py).

Shape letters: B rows, L layers, K taps, H = (K - 1) * D steps of a layer's history, C residual channels, G gate
channels, S skip channels, E end channels; C', G', ... padded to whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

from typing import NamedTuple, cast

import numba
import numpy as np
import torch
from torch import Tensor, nn

from baselines.wavenet import WaveNet, WaveNetConfig, WaveNetState
from waveform.compiled.simd import (
    F32,
    LANES,
    compiled,
    fill,
    get,
    load,
    maximum,
    multiply,
    padded,
    sigmoid,
    store,
    tanh,
)
from waveform.decoding.draw import Draws, KernelDecoder, draw_row, make_draw_scratch
from waveform.decoding.kernels import ADD, SET, DenseWeights, copy, dense, of_layer, pad_last, zeros
from waveform.decoding.plan import make_plan, num_threads_for, share_vectors, shared_out
from waveform.decoding.row_inputs import embed_rows, lay_out_labels
from waveform.decoding.row_predictions import (
    head_for_kernels,
    lay_out_predictions,
    num_head_outputs,
    predict_logits,
)

_I64 = np.int64(0)

_CONVOLVE, _RESIDUAL, _SKIP, _MIX, _HEAD = range(5)


class _Weights(NamedTuple):
    embedding: np.ndarray  # [V + 1, C']
    convolution: DenseWeights  # [L, 2 G', K C']: vectors of tanh's and of sigmoid's half alternate; taps oldest first
    residual: DenseWeights  # [L - 1, C', G']
    skip: DenseWeights  # [S', L G']
    mix: DenseWeights  # [E', S']
    head: DenseWeights  # [V', E']

    @property
    def matrices(self) -> tuple[DenseWeights, ...]:
        return self.convolution, self.residual, self.skip, self.mix, self.head


class _State(NamedTuple):
    rings: np.ndarray  # [sum of H, B, C']: step n of a layer at its start + n mod H
    starts: np.ndarray  # [L] int64
    dilations: np.ndarray  # [L] int64


class _Scratch(NamedTuple):
    """Intermediate values of a step."""

    x: np.ndarray  # [B, C'] residual stream
    taps: np.ndarray  # [B, K C'] input of a convolution
    z: np.ndarray  # [B, 2 G']
    gate: np.ndarray  # [B, G']
    gates: np.ndarray  # [B, L G']
    hidden: np.ndarray  # [B, S']
    mixed: np.ndarray  # [B, E']
    logits: np.ndarray  # [B, V']


class _Sizes(NamedTuple):
    num_threads: int
    num_rows: int
    num_layers: int
    num_taps: int
    width: int  # C'
    num_gates: int  # G'
    num_skip: int  # S'
    num_end: int  # E'
    num_logits: int  # V'
    num_classes: int  # V


@compiled
def _gate(rows_of_vectors, layer, p):
    """tanh * sigmoid for a range of vectors of gates."""
    for b in range(p.num_rows):
        for i in range(rows_of_vectors[0], rows_of_vectors[1]):
            at = b * 2 * p.num_gates + 32 * i
            gate = multiply(tanh(load(p.z, at, F32)), sigmoid(load(p.z, at + 16, F32)))
            store(p.gate, b * p.num_gates + 16 * i, gate)
            store(p.gates, (b * p.num_layers + layer) * p.num_gates + 16 * i, gate)


@compiled
def _work(phase, part, num_parts, layer, step, p, kind):
    """A thread's share of one phase of a layer."""
    if phase == _CONVOLVE:
        x, out, num_inputs, num_outputs, mode = p.taps, p.z, p.num_taps * p.width, 2 * p.num_gates, SET
        matrix = (p.convolution, p.convolution_scales, p.convolution_biases)
    elif phase == _RESIDUAL:
        x, out, num_inputs, num_outputs, mode = p.gate, p.x, p.num_gates, p.width, ADD
        matrix = (p.residual, p.residual_scales, p.residual_biases)
    elif phase == _SKIP:
        x, out, num_inputs, num_outputs, mode = p.gates, p.hidden, p.num_layers * p.num_gates, p.num_skip, SET
        matrix = (p.skip, p.skip_scales, p.skip_biases)
    elif phase == _MIX:
        x, out, num_inputs, num_outputs, mode = p.hidden, p.mixed, p.num_skip, p.num_end, SET
        matrix = (p.mix, p.mix_scales, p.mix_biases)
    else:
        x, out, num_inputs, num_outputs, mode = p.mixed, p.logits, p.num_end, p.num_logits, SET
        matrix = (p.head, p.head_scales, p.head_biases)
    matrix = of_layer(matrix, layer, num_inputs, num_outputs, kind)
    first, last = share_vectors(num_outputs, part, num_parts)
    dense(matrix, x, out, num_inputs, num_outputs, (np.int64(0), p.num_rows), (first, last), mode, kind)
    if phase == _CONVOLVE:  # a group has both halves of its gates
        _gate((first // 2, last // 2), layer, p)


_share_out = shared_out(_work)


@compiled
def _gather_taps(layer, step, p):
    """Gather the convolution's input; this step then replaces the oldest tap in the ring."""
    start, dilation = get(p.starts, layer, _I64), get(p.dilations, layer, _I64)
    older = p.num_taps - 1
    for b in range(p.num_rows):
        x, taps = p.x + b * p.width * 4, p.taps + b * p.num_taps * p.width * 4
        for tap in range(older):
            at = start + (step + tap * dilation) % (older * dilation)
            copy(p.rings + (at * p.num_rows + b) * p.width * 4, taps + tap * p.width * 4, p.width)
        copy(x, taps + older * p.width * 4, p.width)
        at = start + step % (older * dilation)
        copy(x, p.rings + (at * p.num_rows + b) * p.width * 4, p.width)


@compiled
def _relu(x, width):
    for i in range(0, width, 16):
        store(x, i, maximum(load(x, i, F32), fill(np.float32(0))))


@compiled
def _step(tokens, step, plan, kind):
    p = plan[0]
    embed_rows(tokens, p)
    num_phases = 2 * p.num_layers + 2
    for i in range(num_phases):
        # Two phases per layer, but one for the last: nothing reads its residual stream.
        layer, phase = i // 2, i % 2
        if i > 2 * p.num_layers - 2:
            layer, phase = 0, _SKIP + i - (2 * p.num_layers - 1)
        if phase == _CONVOLVE:
            _gather_taps(layer, step, p)
        _share_out(phase, layer, step, plan, kind)
        if phase == _SKIP:
            _relu(p.hidden, p.num_rows * p.num_skip)
        elif phase == _MIX:
            _relu(p.mixed, p.num_rows * p.num_end)
    if p.predicts:
        for b in range(p.num_rows):
            predict_logits(b, p)


@compiled(entry=True)
def _run(tokens, step, draws, plan, kind):
    """Take a step with inputs tokens [B], number `step` of their streams; writes the logits.

    Or take n steps, if `draws` asks for [n, B] tokens: each step's are drawn, and become the next one's inputs.
    """
    for t in range(max(1, len(draws.drawn))):
        _step(tokens, step + t, plan, kind)
        if t < len(draws.drawn):
            draw_row(t, tokens, draws, plan[0])


class CompiledWaveNetDecoder(KernelDecoder):
    """Steps an fp32 WaveNet on the CPU. int8: weights are kept in 8 bits, with a scale for each output."""

    @torch.inference_mode()
    def __init__(self, model: WaveNet, state: WaveNetState, *, int8: bool = False) -> None:
        config = model.config
        num_layers, num_rows = len(config.dilations), state.fifos[0].shape[0]
        self._weights = _lay_out_weights(model, int8=int8)
        self._state = _lay_out_state(state, config)
        matrices = self._weights.matrices
        self.bytes_per_step = sum(matrix.nbytes for matrix in matrices)
        work = num_rows * sum(matrix.weights.size for matrix in matrices)
        self._sizes = _Sizes(
            num_threads=num_threads_for(work, num_phases=2 * num_layers + 2),
            num_rows=num_rows,
            num_layers=num_layers,
            num_taps=config.kernel_size,
            width=padded(config.residual_channels),
            num_gates=padded(config.gate_channels),
            num_skip=padded(config.skip_channels),
            num_end=padded(config.head_width),
            num_logits=num_head_outputs(model.head.softmax, config.vocab_size),
            num_classes=config.vocab_size,
        )
        self._scratch = _make_scratch(self._sizes)
        self._draw_scratch = make_draw_scratch(config.vocab_size)
        self._labels = lay_out_labels(model.label_embedding, state.labels, num_rows=num_rows, width=self._sizes.width)
        self._predictions = lay_out_predictions(
            model.linear_prediction, state.predictors, num_rows=num_rows, width=self._sizes.width
        )
        work_on = (self._weights, self._labels, self._predictions, self._state, self._scratch, self._draw_scratch)
        self._plan = make_plan(*work_on, self._sizes)
        self._kind = np.int8(0) if int8 else np.float32(0)
        self._logits = torch.from_numpy(self._scratch.logits)[:, : config.vocab_size]
        self._num_steps = 0

    def _take(self, tokens: np.ndarray, draws: Draws) -> None:
        if self._sizes.num_threads > 1:
            numba.set_num_threads(self._sizes.num_threads)
        _run(tokens, self._num_steps, draws, self._plan, self._kind)
        self._num_steps += max(1, len(draws.drawn))


def _lay_out_weights(model: WaveNet, *, int8: bool) -> _Weights:
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
    mix, softmax = model.head.mix, model.head.softmax
    return _Weights(
        embedding=pad_last(model.embedding.weight.detach()).clone().numpy(),
        convolution=DenseWeights(kernels, [alternate(conv.bias) for conv in convolutions], int8=int8),
        residual=DenseWeights(residual, int8=int8),
        skip=DenseWeights([skip], [model.skip.bias], int8=int8),
        mix=DenseWeights([mix.weight], [mix.bias], int8=int8),
        head=DenseWeights(
            *([each] for each in head_for_kernels(softmax.projection, softmax)), int8=int8, padding=-np.inf
        ),
    )


def _lay_out_state(state: WaveNetState, config: WaveNetConfig) -> _State:
    fifos = torch.cat([fifo.transpose(0, 1) for fifo in state.fifos]).float()
    return _State(
        rings=pad_last(fifos).contiguous().numpy(),
        starts=np.cumsum([0, *config.histories[:-1]]).astype(np.int64),
        dilations=np.array(config.dilations, dtype=np.int64),
    )


def _make_scratch(z: _Sizes) -> _Scratch:
    return _Scratch(
        x=zeros(z.num_rows, z.width),
        taps=zeros(z.num_rows, z.num_taps * z.width),
        z=zeros(z.num_rows, 2 * z.num_gates),
        gate=zeros(z.num_rows, z.num_gates),
        gates=zeros(z.num_rows, z.num_layers * z.num_gates),
        hidden=zeros(z.num_rows, z.num_skip),
        mixed=zeros(z.num_rows, z.num_end),
        logits=zeros(z.num_rows, z.num_logits),
    )
