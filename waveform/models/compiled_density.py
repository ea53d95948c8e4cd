"""The density of `PredictionHead` in kernels: the NLL of a batch and its gradient, and what decoders add to logits.

One pass over the classes forward and one backward, instead of a dozen operations of torch on [N, V] tensors.

Shape letters: N tokens, V classes (whole vectors), K predictors; y: what the head's linear layer gives, V + K + 3.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from waveform.compiled.simd import (
    F32,
    LANES,
    add,
    at,
    compiled,
    exp,
    fill,
    fma,
    get,
    largest,
    load,
    log_logistic,
    maximum,
    multiply,
    put,
    store,
    tanh,
    total,
)
from waveform.models.linear_prediction import LOG_LEAST_SCALE, NUM_PREDICTORS

_K = NUM_PREDICTORS


class PredictedNll(torch.autograd.Function):
    """y [N, V + K + 3], what is expected [N, NUM_HEAD_INPUTS], targets [N] -> NLL [N] in nats; all fp32, contiguous.

    As the cross-entropy of `PredictionHead.logits`.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """tensors: y, what is expected, targets, and the values and log widths [V] of the classes."""
        y, *others = (tensor.detach() for tensor in tensors)
        nll, log_whole = torch.empty(len(y)), torch.empty(len(y))
        _nll(*(tensor.numpy() for tensor in (y, *others, nll, log_whole)))
        ctx.save_for_backward(y, *others, log_whole)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of y; nothing else here is trained."""
        saved = ctx.saved_tensors
        of_y = torch.empty_like(saved[0])
        _slope(*(tensor.numpy() for tensor in saved), grad.contiguous().numpy(), of_y.numpy())
        return of_y, None, None, None, None


@compiled
def mixed(y, expected):
    """y: address of the K + 3 numbers of a density -> weight, centre, log scale before and after its lower bound."""
    peak = max(max(get(y, 0, F32), get(y, 1, F32)), get(y, 2, F32))
    whole, centre, log_scale = 0.0, 0.0, 0.0
    for k in range(_K):
        share = math.exp(np.float64(get(y, k, F32) - peak))
        whole += share
        centre += share * expected[k]
        log_scale += share * expected[_K + k]
    free = log_scale / whole + get(y, _K + 1, F32)
    least = expected[2 * _K] + LOG_LEAST_SCALE
    larger = max(free, least)
    log_scale = larger + math.log1p(math.exp(-2 * abs(free - least))) / 2
    return np.float64(get(y, _K, F32)), centre / whole + get(y, _K + 2, F32) * math.exp(log_scale), free, log_scale


@compiled
def _standardised(values, i, centre, per_scale):
    return multiply(add(load(values, i, F32), centre), per_scale)


@compiled
def _log_density(z, log_scale, log_widths, i):
    return add(add(log_logistic(z), log_scale), load(log_widths, i, F32))


@compiled
def add_density(logits, y, expected, values, log_widths, num_classes, out):
    """logits [V] plus the weighted log of a density -> out [V]; all but `expected` are addresses."""
    weight, centre, _, log_scale = mixed(y, expected)
    weights, per_scale = fill(np.float32(weight)), fill(np.float32(math.exp(-log_scale)))
    minus_centre, minus_log_scale = fill(np.float32(-centre)), fill(np.float32(-log_scale))
    for i in range(0, num_classes, LANES):
        z = _standardised(values, i, minus_centre, per_scale)
        store(out, i, fma(_log_density(z, minus_log_scale, log_widths, i), weights, load(logits, i, F32)))


@compiled(entry=True)
def _nll(y, expected, targets, values, log_widths, nll, log_whole):
    num_classes = len(values)
    logits = np.empty(num_classes, dtype=np.float32)
    out, classes, widths = logits.ctypes.data, values.ctypes.data, log_widths.ctypes.data
    for n in range(len(y)):
        row = y.ctypes.data + n * y.shape[1] * 4
        add_density(row, at(row, num_classes), expected[n], classes, widths, num_classes, out)
        peaks = load(out, 0, F32)
        for i in range(LANES, num_classes, LANES):
            peaks = maximum(peaks, load(out, i, F32))
        peak = largest(peaks)
        sums = fill(np.float32(0))
        for i in range(0, num_classes, LANES):
            sums = add(sums, exp(add(load(out, i, F32), fill(-peak))))
        log_whole[n] = peak + np.float32(math.log(np.float64(total(sums))))
        nll[n] = log_whole[n] - logits[targets[n]]


@compiled(entry=True)
def _slope(y, expected, targets, values, log_widths, log_whole, grad, of_y):
    num_classes, nothing = len(values), fill(np.float32(0))
    classes, widths = values.ctypes.data, log_widths.ctypes.data
    for n in range(len(y)):
        row, out = y.ctypes.data + n * y.shape[1] * 4, of_y.ctypes.data + n * y.shape[1] * 4
        weight, centre, free, log_scale = mixed(at(row, num_classes), expected[n])
        scale = math.exp(log_scale)
        weights, per_scale = fill(np.float32(weight)), fill(np.float32(1 / scale))
        minus_centre, minus_log_scale = fill(np.float32(-centre)), fill(np.float32(-log_scale))
        of_density, of_centre, of_scale = nothing, nothing, nothing
        for i in range(0, num_classes, LANES):
            z = _standardised(classes, i, minus_centre, per_scale)
            log_density = _log_density(z, minus_log_scale, widths, i)
            logit = fma(log_density, weights, load(row, i, F32))
            slope = multiply(exp(add(logit, fill(-log_whole[n]))), fill(grad[n]))
            store(out, i, slope)
            if i == targets[n] // LANES * LANES:
                put(out, targets[n], get(out, targets[n], F32) - grad[n])
                slope = load(out, i, F32)
            of_density = fma(slope, log_density, of_density)
            pull = multiply(slope, tanh(multiply(z, fill(np.float32(0.5)))))
            of_centre, of_scale = add(of_centre, pull), fma(pull, z, of_scale)
        to_centre = weight / scale * total(of_centre)
        # The sum of slopes over all classes is zero, and with it what the log scale itself adds.
        to_scale = weight * total(of_scale) + to_centre * get(at(row, num_classes), _K + 2, F32) * scale
        to_free = to_scale * math.exp(2 * (free - log_scale))
        of_mix, tail = at(out, num_classes), at(row, num_classes)
        put(of_mix, _K, total(of_density))
        put(of_mix, _K + 1, np.float32(to_free))
        put(of_mix, _K + 2, np.float32(to_centre * scale))
        peak = max(max(get(tail, 0, F32), get(tail, 1, F32)), get(tail, 2, F32))
        whole, mean = 0.0, 0.0
        for k in range(_K):
            share = math.exp(np.float64(get(tail, k, F32) - peak))
            whole += share
            mean += share * (to_centre * expected[n, k] + to_free * expected[n, _K + k])
        for k in range(_K):
            share = math.exp(np.float64(get(tail, k, F32) - peak)) / whole
            of_one = to_centre * expected[n, k] + to_free * expected[n, _K + k]
            put(of_mix, k, np.float32(share * (of_one - mean / whole)))
