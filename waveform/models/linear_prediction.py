"""What linear filters that adapt to the past expect of the next sample: an input of every model, and of its head.

    tokens -> amplitudes -> K linear predictors -> expectations, and how far off they have been lately -> trunk, head

The filters follow from past samples alone (backward adaptation, as in the ITU's G.728), so nothing has to be sent or
learned, the NLL stays exact, and a sampler computes the same. After every BLOCK samples of a row, each filter is fitted
anew to all samples since its reset, older ones weighing less, by the covariance lattice method (J. Makhoul, "Stable and
efficient lattice methods for linear prediction", 1977): Burg's reflection coefficients from weighted sums of products.
They are below 1 in size by construction, so a filter that runs on its own output stays bounded.

Everything is in fp64, and no gradient flows here: the inputs are tokens. On a CPU a compiled kernel computes it
(kernels/prediction.py); the operations of torch below are for other devices, and the kernel's oracle.

Shape letters: B rows, T steps, K predictors, P order, E speeds at which errors are averaged, V classes, D width.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.engine.interface import fp64_device, map_state, to_device
from waveform.engine.sound_classes import SoundClasses
from waveform.system.linear_layers import Linear

ORDER = 32  # P
BLOCK = 32  # samples between fits
FORGETTING = (0.98, 0.993, 0.998)  # factors by which the predictors shrink the weights of past samples, per sample
ERROR_DECAYS = (0.8, 0.95, 0.995)  # of running means of squared errors, per sample
_SPEED = 1  # index in ERROR_DECAYS of the mean whose square root is a predictor's scale
_NOISE = 1e-9  # added to energies, so that silence is predicted by zeros
FIRST_ENERGY = 1e-5  # mean squared error that is assumed before there are any errors
_MAX_REFLECTION = 0.9999  # rounding could make it 1
CLIP = 5.0  # standard deviations at which features are clipped
HISTORY = 2 * ORDER + BLOCK  # samples that a fit looks back on
NUM_PREDICTORS, NUM_SPEEDS = len(FORGETTING), len(ERROR_DECAYS)
NUM_FEATURES = NUM_PREDICTORS * (NUM_SPEEDS + 3)
NUM_HEAD_INPUTS = 2 * NUM_PREDICTORS + 1  # expectations, log scales, log width of the class of the mean expectation
NUM_DENSITY_OUTPUTS = NUM_PREDICTORS + 3  # outputs of the network, from which `PredictionHead` makes a density
LOG_LEAST_SCALE = math.log(0.3)  # of a density, in widths of its class: narrower ones would fall between values
FARTHEST = 50.0  # scales from a density's centre; beyond, it falls no further: no sample costs thousands of nats
_MOST_STEPS = 1024  # steps that one call of the torch operations reads


class PredictionState(NamedTuple):
    """What the predictors of B rows remember; fp64."""

    steps: Tensor  # [B] int64 on the CPU: inputs since the row's reset
    history: Tensor  # [B, HISTORY] amplitudes, the newest last; zeros before the first
    moments: Tensor  # [B, K, P + 1] weighted sums of x(t) x(t - d), up to t = P samples before the last fit
    coefficients: Tensor  # [B, K, P], that of the newest sample last
    expected: Tensor  # [B, K] of the next sample
    energy: Tensor  # [B, K, E] running means of squared errors


class Prediction(NamedTuple):
    """What the predictors expect of the sample after each input."""

    features: Tensor  # [B, T, NUM_FEATURES]
    centre: Tensor  # [B, T] int64: the class of the mean expectation
    for_head: Tensor  # [B, T, NUM_HEAD_INPUTS]


class Constants(NamedTuple):
    """Numbers that the operations of torch need, on their device; fp64."""

    values: Tensor  # [V + 1] amplitudes; begin-of-utterance counts as silence
    bounds: Tensor  # [V - 1]
    log_widths: Tensor  # [V]
    forgetting: Tensor  # [K]
    decays: Tensor  # [E]
    widening: Tensor  # [P] factors of coefficients, the newest sample's first


class LinearPrediction(nn.Module):
    """The predictors, and the vectors of what they expect, which are added to a model's inputs."""

    def __init__(self, d_model: int, *, classes: SoundClasses, std: float, widening: float) -> None:
        """std: of the vectors; widening: see ModelConfig."""
        super().__init__()
        self.table = nn.Parameter(std * torch.randn(len(classes.values), d_model))  # of the mean expectation's class
        self.features = Linear(NUM_FEATURES, d_model, bias=False)
        nn.init.normal_(self.features.weight, std=std * NUM_FEATURES**-0.5)
        self.values = np.array([*classes.values, 0.0])
        self.bounds, self.log_widths = np.array(classes.bounds), np.log(classes.widths)
        self.widening = widening ** np.arange(1.0, ORDER + 1)
        self._constants: dict[torch.device, Constants] = {}

    def constants(self, device: torch.device) -> Constants:
        """The `Constants` on `device`, made at the first call."""
        if device not in self._constants:
            numbers = (self.values, self.bounds, self.log_widths, FORGETTING, ERROR_DECAYS, self.widening)
            self._constants[device] = Constants(*(to_device(torch.from_numpy(np.array(x)), device) for x in numbers))
        return self._constants[device]

    def init_state(self, batch_size: int, *, device: torch.device | str) -> tuple[PredictionState]:
        """State of rows of which nothing has been read, in a tuple as `RowLabels` are."""

        def full(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full((batch_size, *shape), value, dtype=torch.float64, device=fp64_device(device))

        k = NUM_PREDICTORS
        energy = full(k, NUM_SPEEDS, value=FIRST_ENERGY)
        state = (full(HISTORY), full(k, ORDER + 1), full(k, ORDER), full(k), energy)
        return (PredictionState(torch.zeros(batch_size, dtype=torch.int64), *state),)

    @torch.no_grad()
    def read(self, tokens: Tensor, state: PredictionState) -> tuple[Prediction, PredictionState]:
        """tokens [B, T] in 0..V, any T >= 1 -> what is expected after each of them, and the state after the last."""
        parts = []
        for part in tokens.split(_MOST_STEPS, dim=1):
            prediction, state = _read_by_torch(self.constants(tokens.device), part, state)
            parts.append(prediction)
        return Prediction(*(torch.cat(made, dim=1) for made in zip(*parts, strict=True))), state

    def forward(self, prediction: Prediction) -> Tensor:
        """Vectors [B, T, D] to add to a model's inputs."""
        weight = self.features.weight
        return self.features(prediction.features.to(weight.dtype)) + F.embedding(prediction.centre, self.table)


def with_prediction(hidden: Tensor, prediction: Prediction | None) -> Tensor:
    """hidden [B, T, D] -> what a `PredictionHead` reads, [B, T, D + NUM_HEAD_INPUTS]; `hidden` without a prediction."""
    if prediction is None:
        return hidden
    precise = torch.promote_types(hidden.dtype, torch.float32)
    return torch.cat([hidden.to(precise), prediction.for_head.to(precise)], dim=-1)


# By operations of torch


def _read_by_torch(constants: Constants, tokens: Tensor, state: PredictionState) -> tuple[Prediction, PredictionState]:
    """As `LinearPrediction.read`; rows are read one by one if they are not equally far in their blocks, a rare case."""
    phases = (state.steps % BLOCK).tolist()
    if len(set(phases)) == 1:
        return _read_in_phase(constants, tokens, state, phases[0])
    rows = [
        _read_in_phase(constants, tokens[row : row + 1], map_state(lambda x, row=row: x[row : row + 1], state), phase)
        for row, phase in enumerate(phases)
    ]
    prediction, after = (map_state(lambda *of_rows: torch.cat(of_rows), *each) for each in zip(*rows, strict=True))
    return prediction, after


def _read_in_phase(
    constants: Constants, tokens: Tensor, state: PredictionState, phase: int
) -> tuple[Prediction, PredictionState]:
    num_steps, device = tokens.shape[1], tokens.device
    x = torch.cat([state.history, F.embedding(tokens, constants.values[:, None])[..., 0]], dim=1)
    fits = range(BLOCK - phase, num_steps + 1, BLOCK)  # how many inputs of this call are read before each fit
    moments, coefficients = state.moments, state.coefficients[:, None]
    if fits:
        fitted, moments = fit_blocks(constants, x, moments, ends=[HISTORY + n for n in fits])
        coefficients = torch.cat([coefficients, fitted], dim=1)  # [B, 1 + n, K, P]
    # For each input, the filter that holds after it, and the expectation of what follows.
    block = to_device((torch.arange(num_steps) + phase) // BLOCK, device)
    past = x.unfold(1, ORDER, 1)[:, HISTORY - ORDER + 1 :]  # [B, T, P], the newest last
    expected = (coefficients[:, block] * past[:, :, None]).sum(dim=-1).clamp(-1, 1)  # [B, T, K]
    before = torch.cat([state.expected[:, None], expected[:, :-1]], dim=1)
    errors = x[:, HISTORY:, None] - before
    energy = _running_means(errors**2, state.energy, constants.decays)  # [B, T, K, E]
    prediction = describe(constants, expected, energy, errors)
    after = PredictionState(
        state.steps + num_steps,
        x[:, num_steps:].contiguous(),
        moments,
        coefficients[:, -1].contiguous(),
        expected[:, -1].contiguous(),
        energy[:, -1].contiguous(),
    )
    return prediction, after


def fit_blocks(constants: Constants, x: Tensor, moments: Tensor, *, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Filters [B, n, K, P] fitted to x [B, ...] before each of `ends`, BLOCK apart, and the moments at the last.

    moments [B, K, P + 1]: at the fit before the first.
    """
    last_of_moments = torch.tensor(ends) - ORDER
    added = _weighted_products(x, last_of_moments - BLOCK, constants.forgetting)  # [B, n, K, P + 1]
    fade, sums = constants.forgetting.pow(BLOCK)[:, None], []
    for of_block in added.unbind(dim=1):
        moments = moments * fade + of_block
        sums.append(moments)
    matrix = _products(torch.stack(sums, dim=1), x, last_of_moments, constants.forgetting)
    return lattice(matrix) * constants.widening.flip(0), moments


def _weighted_products(x: Tensor, starts: Tensor, forgetting: Tensor) -> Tensor:
    """Sums of x(t) x(t - d) over BLOCK samples t from each start [n], the last weighing 1: [B, n, K, P + 1]."""
    at = starts[:, None] + torch.arange(-ORDER, BLOCK)
    windows = x[:, to_device(at, x.device)].unfold(-1, ORDER + 1, 1)  # [B, n, BLOCK, P + 1], the newest last
    age = to_device(torch.arange(BLOCK - 1, -1, -1), x.device)
    weights = forgetting[:, None] ** age  # [K, BLOCK]
    weighted = windows[..., -1:] * windows.flip(-1)
    return (weights[:, :, None] * weighted[:, :, None]).sum(dim=-2)


def _products(moments: Tensor, x: Tensor, ends: Tensor, forgetting: Tensor) -> Tensor:
    """R [B, n, K, P + 1, P + 1] of weighted sums of x(t - i) x(t - j), whose diagonals are moments of one lag.

    From moments [B, n, K, P + 1] of x [B, ...] before `ends` [n], which end ORDER samples before each fit, and the
    products of the samples since then.
    """
    device = x.device
    around = to_device(ends[:, None] + torch.arange(-ORDER, ORDER), device)
    windows = x[:, around].unfold(-1, ORDER + 1, 1)  # [B, n, P, P + 1]
    products = windows[..., -1:] * windows.flip(-1)
    of_lag = [moments]  # at each of the last P + 1 samples, the oldest first
    for i in range(ORDER):
        of_lag.append(of_lag[-1] * forgetting[:, None] + products[:, :, None, i])
    sums = torch.stack(of_lag[::-1], dim=-2)  # [B, n, K, P + 1 (i), P + 1 (lag)]
    at = torch.arange(ORDER + 1)
    low, lag = torch.minimum(at[:, None], at), (at[:, None] - at).abs()
    return sums[..., to_device(low, device), to_device(lag, device)]


def lattice(matrix: Tensor) -> Tensor:
    """Coefficients [..., P], the newest sample's last, from R [..., P + 1, P + 1]; |reflection coefficient| < 1.

    forward, backward: the filters of the errors, and `of_forward`, `of_backward` their products with R, from which the
    errors' energies and their correlation follow.
    """
    size = matrix.shape[-1]
    forward = torch.zeros_like(matrix[..., 0])
    forward[..., 0] = 1
    backward = forward.roll(1, dims=-1)
    of_forward = matrix[..., 0]
    for order in range(1, size):
        of_backward = (matrix[..., : order + 1] @ backward[..., : order + 1, None])[..., 0]
        energy = (forward * of_forward).sum(-1) + (backward * of_backward).sum(-1)
        reflection = 2 * (forward * of_backward).sum(-1) / (energy + _NOISE)
        reflection = reflection.clamp(-_MAX_REFLECTION, _MAX_REFLECTION)[..., None]
        forward, backward = forward - reflection * backward, (backward - reflection * forward).roll(1, dims=-1)
        of_forward = of_forward - reflection * of_backward
    return -forward[..., 1:].flip(-1)


def _running_means(x: Tensor, first: Tensor, decays: Tensor) -> Tensor:
    """x [B, T, K], first [B, K, E] -> [B, T, K, E]: y(t) = decay y(t - 1) + (1 - decay) x(t), with y(-1) = first."""
    t = to_device(torch.arange(x.shape[1]), x.device)
    age = t[:, None] - t
    powers = torch.where(age >= 0, decays[:, None, None] ** age.clamp(min=0), 0)  # [E, T, T]
    of_new = torch.einsum("ets,bsk->btke", powers, x) * (1 - decays)
    return of_new + first[:, None] * decays ** (t[:, None, None] + 1)


def describe(constants: Constants, expected: Tensor, energy: Tensor, errors: Tensor) -> Prediction:
    """expected [..., K], energy [..., K, E] and the last errors [..., K] as a `Prediction`."""
    log_scales = energy.log() / 2
    log_scale = log_scales[..., _SPEED]
    scale, mean = log_scale.exp(), expected.mean(dim=-1)
    centre = torch.bucketize(mean, constants.bounds, right=True)
    log_width = constants.log_widths[torch.bucketize(expected, constants.bounds, right=True)]
    features = [
        (log_scales.flatten(-2) + 5) / 2,
        (log_scale - log_width) / 2,
        (errors / scale).clamp(-CLIP, CLIP) / 2,
        ((expected - mean[..., None]) / scale.mean(dim=-1, keepdim=True)).clamp(-CLIP, CLIP) / 2,
    ]
    head = [expected, log_scale, constants.log_widths[centre][..., None]]
    return Prediction(torch.cat(features, dim=-1), centre, torch.cat(head, dim=-1))
