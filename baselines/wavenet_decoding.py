"""Steps a WaveNet on a CPU with compiled kernels: every weight is read once a step, for all rows.

Rows are computed alike whatever their number (see waveform/models/kernels.py).

Shape letters: B rows, L layers, K taps, H = (K - 1) * D steps of a layer's history, C residual channels, G gate
channels, S skip channels; C', G', ... padded to whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

from typing import Any, NamedTuple, cast

import numba
import numpy as np
import torch
from torch import Tensor, nn

from baselines.wavenet import WaveNet, WaveNetState
from waveform.decoding.kernels import (
    ADD,
    F32,
    SET,
    DenseWeights,
    copy,
    dense,
    num_threads_for,
    of_layer,
    pad_last,
    padded,
    share,
)
from waveform.decoding.simd import address, compiled, fill, get, load, maximum, multiply, sigmoid, store, tanh

_I64 = np.int64(0)

_CONVOLVE, _RESIDUAL, _SKIP, _MIX, _HEAD = range(5)


class _Arrays(NamedTuple):
    """Weights, each matrix with its scales and biases as `DenseWeights` has them; state; values of a step."""

    embedding: Any  # [V + 1, C']
    convolution: Any  # [L, 2 G', K C']: vectors of tanh's and of sigmoid's half in turn; taps oldest first
    convolution_scales: Any
    convolution_biases: Any
    residual: Any  # [L - 1, C', G']
    residual_scales: Any
    residual_biases: Any
    skip: Any  # [S', L G']
    skip_scales: Any
    skip_biases: Any
    mix: Any  # [S', S']
    mix_scales: Any
    mix_biases: Any
    head: Any  # [V', S']
    head_scales: Any
    head_biases: Any
    rings: Any  # [sum of H, B, C']: step n of a layer at its start + n mod H
    starts: Any  # [L] int64
    dilations: Any  # [L] int64
    x: Any  # [B, C'] residual stream
    taps: Any  # [B, K C'] input of a convolution
    z: Any  # [B, 2 G']
    gate: Any  # [B, G']
    gates: Any  # [B, L G']
    hidden: Any  # [B, S']
    mixed: Any  # [B, S']
    logits: Any  # [B, V']


class _Sizes(NamedTuple):
    """Numbers that a step needs."""

    num_threads: int
    num_rows: int
    num_layers: int
    num_taps: int
    width: int  # C'
    num_gates: int  # G'
    num_skip: int  # S'
    num_logits: int  # V'


# Kernels get addresses and sizes in one record, `p`, and a number whose type, `kind`, is that of the weights.
_PLAN = np.dtype([(name, np.int64) for part in (_Arrays, _Sizes) for name in part._fields])


@compiled
def _gate(rows_of_vectors, layer, p):
    """tanh times sigmoid of a range of vectors of gates."""
    for b in range(p.num_rows):
        for i in range(rows_of_vectors[0], rows_of_vectors[1]):
            at = b * 2 * p.num_gates + 32 * i
            gate = multiply(tanh(load(p.z, at, F32)), sigmoid(load(p.z, at + 16, F32)))
            store(p.gate, b * p.num_gates + 16 * i, gate)
            store(p.gates, (b * p.num_layers + layer) * p.num_gates + 16 * i, gate)


@compiled
def _work(phase, part, num_parts, layer, p, kind):
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
        x, out, num_inputs, num_outputs, mode = p.hidden, p.mixed, p.num_skip, p.num_skip, SET
        matrix = (p.mix, p.mix_scales, p.mix_biases)
    else:
        x, out, num_inputs, num_outputs, mode = p.mixed, p.logits, p.num_skip, p.num_logits, SET
        matrix = (p.head, p.head_scales, p.head_biases)
    matrix = of_layer(matrix, layer, num_inputs, num_outputs, kind)
    first, last = share(num_outputs // 16, part, num_parts)
    if phase == _CONVOLVE:  # both halves of a gate fall to one thread
        pairs = share(p.num_gates // 16, part, num_parts)
        first, last = 2 * pairs[0], 2 * pairs[1]
    dense(matrix, x, out, num_inputs, num_outputs, (np.int64(0), p.num_rows), (first, last), mode, kind)
    if phase == _CONVOLVE:
        _gate((first // 2, last // 2), layer, p)


@compiled(parallel=True)
def _in_parallel(phase, layer, plan, kind):
    num_threads = plan[0].num_threads
    for part in numba.prange(num_threads):
        # numba counts in unsigned numbers here; for another type everything below would be compiled again.
        _work(phase, np.int64(part), num_threads, layer, plan[0], kind)


@compiled
def _share_out(phase, layer, plan, kind):
    if plan[0].num_threads > 1:
        _in_parallel(phase, layer, plan, kind)
    else:
        _work(phase, np.int64(0), np.int64(1), layer, plan[0], kind)


@compiled
def _gather_taps(layer, step, p):
    """The convolution's input, and this step into the ring in place of the oldest tap."""
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


@compiled(entry=True)
def _run(tokens, step, plan, kind):
    """Read tokens [B], the inputs of `step`; leaves the logits in their array."""
    p = plan[0]
    for b in range(p.num_rows):
        copy(p.embedding + tokens[b] * p.width * 4, p.x + b * p.width * 4, p.width)
    num_phases = 2 * p.num_layers + 2
    for i in range(num_phases):
        # Of each layer two, but of the last only the first: nothing reads its residual stream.
        layer, phase = i // 2, i % 2
        if i > 2 * p.num_layers - 2:
            layer, phase = 0, _SKIP + i - (2 * p.num_layers - 1)
        if phase == _CONVOLVE:
            _gather_taps(layer, step, p)
        _share_out(phase, layer, plan, kind)
        if phase == _SKIP:
            _relu(p.hidden, p.num_rows * p.num_skip)
        elif phase == _MIX:
            _relu(p.mixed, p.num_rows * p.num_skip)


class CompiledWaveNetDecoder:
    """Steps an fp32 WaveNet on the CPU. int8: weights are kept in 8 bits, with a scale for each output."""

    @torch.inference_mode()
    def __init__(self, model: WaveNet, state: WaveNetState, *, int8: bool = False) -> None:
        config = model.config
        c, g, taps = config.residual_channels, config.gate_channels, config.kernel_size
        num_layers, num_rows = len(config.dilations), state.fifos[0].shape[0]
        width, num_gates, num_skip = padded(c), padded(g), padded(config.skip_channels)
        convolutions, residuals = cast(list[nn.Linear], model.convolutions), cast(list[nn.Linear], model.residuals)

        def in_turn(x: Tensor) -> Tensor:  # [2 G, ...] -> [2 G', ...], a vector of each half in turn
            halves = torch.zeros(2, num_gates, *x.shape[1:])
            halves[:, :g] = x.unflatten(0, (2, g))
            return halves.unflatten(1, (-1, 16)).transpose(0, 1).flatten(0, 2)

        kernels = [in_turn(pad_last(conv.weight.unflatten(1, (taps, c))).flatten(1)) for conv in convolutions]
        skip = pad_last(model.skip.weight.unflatten(1, (num_layers, g))).flatten(1)
        # With one layer there is no residual; the kernel wants an address all the same.
        residual = [layer.weight for layer in residuals] or [torch.zeros(c, g)]
        mix, last = model.head.mix, model.head.softmax.projection
        matrices = (
            DenseWeights(kernels, [in_turn(conv.bias) for conv in convolutions], int8=int8),
            DenseWeights(residual, int8=int8),
            DenseWeights([skip], [model.skip.bias], int8=int8),
            DenseWeights([mix.weight], [mix.bias], int8=int8),
            DenseWeights([last.weight], [last.bias], int8=int8),
        )
        starts = np.cumsum([0, *config.histories[:-1]])

        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.float32)

        fifos = torch.cat([fifo.transpose(0, 1) for fifo in state.fifos]).float()
        kept = {
            "rings": pad_last(fifos).contiguous().numpy(),
            "starts": starts.astype(np.int64),
            "dilations": np.array(config.dilations, dtype=np.int64),
            "x": zeros(num_rows, width),
            "taps": zeros(num_rows, taps * width),
            "z": zeros(num_rows, 2 * num_gates),
            "gate": zeros(num_rows, num_gates),
            "gates": zeros(num_rows, num_layers * num_gates),
            "hidden": zeros(num_rows, num_skip),
            "mixed": zeros(num_rows, num_skip),
            "logits": zeros(num_rows, padded(config.vocab_size)),
        }
        embedding = pad_last(model.embedding.weight.detach()).clone().numpy()
        self._arrays = _Arrays(embedding, *(array for matrix in matrices for array in matrix.arrays), **kept)
        self.bytes_per_step = sum(array.nbytes for matrix in matrices for array in matrix.arrays)
        work = num_rows * sum(matrix.weights.size for matrix in matrices)
        self._num_threads = num_threads_for(work, num_phases=2 * num_layers + 2)
        sizes = _Sizes(
            num_threads=self._num_threads,
            num_rows=num_rows,
            num_layers=num_layers,
            num_taps=taps,
            width=width,
            num_gates=num_gates,
            num_skip=num_skip,
            num_logits=padded(config.vocab_size),
        )
        self._plan = np.array([(*(address(array) for array in self._arrays), *sizes)], dtype=_PLAN)
        self._kind = np.int8(0) if int8 else np.float32(0)
        self._logits = torch.from_numpy(self._arrays.logits)[:, : config.vocab_size]
        self._num_steps = 0

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V] of the token that follows; overwritten by the next step."""
        if self._num_threads > 1:
            numba.set_num_threads(self._num_threads)
        _run(tokens.contiguous().numpy(), self._num_steps, self._plan, self._kind)
        self._num_steps += 1
        return self._logits
