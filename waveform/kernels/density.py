"""The density of `PredictionHead` in kernels: the NLL of a batch and its gradient, and what decoders add to logits.

Two passes over the classes for both, instead of a dozen operations of torch on [N, V] tensors.

Shape letters: N tokens, V classes (whole vectors), K predictors; y: what the head's linear layer gives, V + K + 3.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from waveform.kernels import vectors as v
from waveform.kernels.compiling import kernel
from waveform.models.linear_prediction import FARTHEST, LOG_LEAST_SCALE, NUM_PREDICTORS

_K = NUM_PREDICTORS


class PredictedNll(torch.autograd.Function):
    """y [N, V + K + 3], what is expected [N, NUM_HEAD_INPUTS], targets [N] -> NLL [N] in nats; all fp32, contiguous.

    The cross-entropy of `PredictionHead.logits`. The forward pass computes the gradient too.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """tensors: y, what is expected, targets, and the values and log widths [V] of the classes."""
        y, *others = (tensor.detach() for tensor in tensors)
        nll, of_y = torch.empty(len(y)), torch.zeros(len(y), v.padded(y.shape[1]))  # rows of whole vectors
        trained = ctx.needs_input_grad[0]
        _nll(*(tensor.numpy() for tensor in (y, *others, nll, of_y)), trained)
        if trained:
            ctx.save_for_backward(of_y)
            ctx.width = y.shape[1]
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of y; nothing else here is trained."""
        (of_y,) = ctx.saved_tensors
        return (of_y * grad[:, None])[:, : ctx.width], None, None, None, None


def compile_kernel() -> None:
    """Compile the NLL, or load it from disk, before its first use: calls it for no tokens and no classes."""
    no_tokens, no_classes = torch.empty(0, 0), torch.empty(0)
    PredictedNll.apply(no_tokens, no_tokens, no_classes.long(), no_classes, no_classes)


@kernel
def mixed(y, expected):
    """y: address of the K + 3 numbers of a density -> weight, centre, log scale before and after its lower bound."""
    peak = max(max(v.get(y, 0), v.get(y, 1)), v.get(y, 2))
    whole, centre, log_scale = 0.0, 0.0, 0.0
    for k in range(_K):
        share = math.exp(np.float64(v.get(y, k) - peak))
        whole += share
        centre += share * expected[k]
        log_scale += share * expected[_K + k]
    free = log_scale / whole + v.get(y, _K + 1)
    least = expected[2 * _K] + LOG_LEAST_SCALE
    larger = max(free, least)
    log_scale = larger + math.log1p(math.exp(-2 * abs(free - least))) / 2
    return np.float64(v.get(y, _K)), centre / whole + v.get(y, _K + 2) * math.exp(log_scale), free, log_scale


@kernel
def _standardised(values, i, centre, per_scale):
    return (v.load(values, i) - centre) * per_scale


@kernel
def _log_density(z, log_scale, log_widths, i):
    return v.maximum(v.log_logistic(z), v.fill(np.float32(-FARTHEST))) - log_scale + v.load(log_widths, i)


@kernel
def add_density(logits, y, expected, values, log_widths, num_classes, out):
    """logits [V] plus the weighted log of a density -> out [V]; all but `expected` are addresses."""
    weight, centre, _, log_scale = mixed(y, expected)
    weights, per_scale = v.fill(np.float32(weight)), v.fill(np.float32(math.exp(-log_scale)))
    centres, log_scales = v.fill(np.float32(centre)), v.fill(np.float32(log_scale))
    for i in range(0, num_classes, v.LANES):
        z = _standardised(values, i, centres, per_scale)
        v.store(out, i, v.fma(_log_density(z, log_scales, log_widths, i), weights, v.load(logits, i)))


@kernel(entry=True)
def _nll(y, expected, targets, values, log_widths, nll, of_y, trained):
    num_classes, nothing = len(values), v.fill(np.float32(0))
    scratch = np.empty((2, num_classes), dtype=np.float32)
    logits, densities = scratch.ctypes.data, scratch[1].ctypes.data
    classes, widths = values.ctypes.data, log_widths.ctypes.data
    for n in range(len(y)):
        row, out = v.at(y.ctypes.data, n * y.shape[1]), v.at(of_y.ctypes.data, n * of_y.shape[1])
        tail, target = v.at(row, num_classes), targets[n]
        weight, centre, free, log_scale = mixed(tail, expected[n])
        scale = math.exp(log_scale)
        weights, per_scale = v.fill(np.float32(weight)), v.fill(np.float32(1 / scale))
        centres, log_scales = v.fill(np.float32(centre)), v.fill(np.float32(log_scale))
        peaks = v.fill(np.float32(-np.inf))
        for i in range(0, num_classes, v.LANES):
            z = _standardised(classes, i, centres, per_scale)
            log_density = _log_density(z, log_scales, widths, i)
            logit = v.fma(log_density, weights, v.load(row, i))
            v.store(densities, i, log_density)
            v.store(logits, i, logit)
            peaks = v.maximum(peaks, logit)
        peak = v.largest(peaks)
        sums, of_density, of_centre, of_scale = nothing, nothing, nothing, nothing
        for i in range(0, num_classes, v.LANES):
            share = v.exp(v.load(logits, i) - v.fill(peak))
            sums = sums + share
            if trained:
                v.store(out, i, share)
                z = _standardised(classes, i, centres, per_scale)
                pull = share * v.tanh(z * v.fill(np.float32(0.5))) * v.above(v.fill(np.float32(FARTHEST**2)), z * z)
                of_density = v.fma(share, v.load(densities, i), of_density)
                of_centre, of_scale = of_centre + pull, v.fma(pull, z, of_scale)
        whole = np.float64(v.total(sums))
        nll[n] = peak + np.float32(math.log(whole)) - scratch[0, target]
        if trained:
            for i in range(0, num_classes, v.LANES):
                slope = v.load(out, i) * v.fill(np.float32(1 / whole))
                # Below 1e-19 it becomes zero: far from what is expected it would be subnormal, and products slow.
                v.store(out, i, slope + v.fill(np.float32(1e-12)) - v.fill(np.float32(1e-12)))
            v.put(out, target, v.get(out, target) - np.float32(1))
            z_of_target = (values[target] - centre) / scale
            pull_of_target = math.tanh(z_of_target / 2) * (abs(z_of_target) < FARTHEST)
            to_centre = weight / scale * (v.total(of_centre) / whole - pull_of_target)
            # The sum of slopes over all classes is zero, and with it what the log scale itself adds.
            to_scale = weight * (v.total(of_scale) / whole - pull_of_target * z_of_target)
            to_scale += to_centre * v.get(tail, _K + 2) * scale
            to_density = v.total(of_density) / whole - scratch[1, target]
            _slope_of_mix(tail, expected[n], to_density, to_centre, to_scale, free, log_scale, v.at(out, num_classes))


@kernel
def _slope_of_mix(y, expected, to_density, to_centre, to_scale, free, log_scale, out):
    """The slope of the K + 3 numbers from which `mixed` makes a density."""
    to_free = to_scale * math.exp(2 * (free - log_scale))
    v.put(out, _K, np.float32(to_density))
    v.put(out, _K + 1, np.float32(to_free))
    v.put(out, _K + 2, np.float32(to_centre * math.exp(log_scale)))
    peak = max(max(v.get(y, 0), v.get(y, 1)), v.get(y, 2))
    whole, mean = 0.0, 0.0
    for k in range(_K):
        share = math.exp(np.float64(v.get(y, k) - peak))
        whole += share
        mean += share * (to_centre * expected[k] + to_free * expected[_K + k])
    for k in range(_K):
        share = math.exp(np.float64(v.get(y, k) - peak)) / whole
        of_one = to_centre * expected[k] + to_free * expected[_K + k]
        v.put(out, k, np.float32(share * (of_one - mean / whole)))
