"""Draws a token from logits within a compiled step: what `choose` of engine/drawing.py defines, in kernels.

Apart from the exponential, both do the same operations in fp64, and they sum whole numbers, so their draws agree.

Shape letters: V classes, V' padded to whole vectors.
"""

import math
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from waveform.engine.drawing import LARGEST_WEIGHT, DrawConfig
from waveform.engine.interface import Decoder
from waveform.kernels.compiling import kernel
from waveform.kernels.record import make_record
from waveform.kernels.rows import largest_of
from waveform.kernels.threads import num_threads_for
from waveform.kernels.vectors import at, float_of_bits, get, get_int64, padded, put

_LOG2_E = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # ln 2 in two parts: the first times n is exact
_INVERSE_FACTORIALS = tuple(1 / math.factorial(k) for k in range(14))
_FRACTION_BITS = 53  # of a double between 1/2 and 1
_WEIGHT_BITS = LARGEST_WEIGHT.bit_length() - 1
_WEIGHTLESS = -(_WEIGHT_BITS + 1) * math.log(2)  # e to this power weighs nothing
_INFINITY = 0x7F800000  # the bits of an infinite fp32
_CALL_STEPS = 64  # of one call: Ctrl-C waits for its end


class Draws(NamedTuple):
    """What a compiled call is asked to draw, and by which rule."""

    uniform: np.ndarray  # [n, B] float32
    drawn: np.ndarray  # [n, B] int64: the result
    temperature: float
    top_k: int
    top_p: float
    first_class: int
    last_class: int


def make_draws(uniform: Tensor, config: DrawConfig) -> Draws:
    """Ask for a token for each number of `uniform` [n, B]."""
    first, last = (0, sys.maxsize - 1) if config.classes is None else config.classes  # the kernel adds 1
    return Draws(
        uniform.float().contiguous().numpy(),
        np.empty(uniform.shape, dtype=np.int64),
        float(config.temperature),
        sys.maxsize if config.top_k is None else config.top_k,
        1.0 if config.top_p is None else float(config.top_p),
        first,
        last,
    )


NO_DRAWS = make_draws(torch.empty(0, 1), DrawConfig())


def draw_scratch(num_classes: int) -> dict[str, np.ndarray]:
    """Arrays for the intermediate values of a draw, [V'] int64."""
    size = padded(num_classes)
    return {"class_weights": np.zeros(size, dtype=np.int64), "ones": np.ones(size, dtype=np.int64)}


@kernel
def _weight(x):
    """2^40 e^x, rounded down, for x <= 0.

    e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r by its Taylor series to r^13 / 13!, which is exact to a few 10^-16. No
    branches and no calls, so that LLVM computes several at once.
    """
    x = max(x, _WEIGHTLESS)
    n = np.int64(x * _LOG2_E - 0.5)  # rounded towards 0: the nearest whole number
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    c = _INVERSE_FACTORIALS
    y = ((((c[13] * r + c[12]) * r + c[11]) * r + c[10]) * r + c[9]) * r + c[8]
    y = ((((y * r + c[7]) * r + c[6]) * r + c[5]) * r + c[4]) * r + c[3]
    y = ((y * r + c[2]) * r + c[1]) * r + c[0]
    return np.int64(y * 2.0**_FRACTION_BITS) >> (_FRACTION_BITS - _WEIGHT_BITS - n)


@kernel
def _float_at(rank):
    """The fp32 number of a rank: 0 has rank 0, the next larger number 1, and -0 has rank -1."""
    return float_of_bits(rank if rank >= 0 else rank ^ 0x7FFFFFFF)


@kernel
def _least_kept(logits, amounts, wanted, num_classes):
    """The largest number such that the classes whose logits are not below it amount to `wanted`, by bisection."""
    low, high = np.int64(-_INFINITY - 1), np.int64(_INFINITY)  # ranks
    while low < high:
        middle = high - ((high - low) >> 1)
        least, amount = _float_at(middle), np.int64(0)
        for i in range(num_classes):
            amount += get_int64(amounts, i) if get(logits, i) >= least else 0
        if amount >= wanted:
            low = middle
        else:
            high = middle - 1
    return _float_at(low)


@kernel
def _keep(logits, weights, amounts, wanted, num_classes):
    """Set to 0 the weights of the least probable classes, as long as the others amount to `wanted`; return the sum."""
    least, whole = _least_kept(logits, amounts, wanted, num_classes), np.int64(0)
    for i in range(num_classes):
        weight = get_int64(weights, i) if get(logits, i) >= least else np.int64(0)
        put(weights, i, weight)
        whole += weight
    return whole


@kernel
def _weigh(logits, weights, temperature, peak, num_classes):
    """Write the weights of all classes; return their sum.

    It takes addresses, not the plan that holds them: LLVM would read that again after each store, and then compute one
    weight at a time.
    """
    whole = np.int64(0)
    for i in range(num_classes):
        weight = _weight(np.float64(get(logits, i) - peak) / temperature)
        put(weights, i, weight)
        whole += weight
    return whole


@kernel
def _choose(logits, uniform, rule, p):
    """The next token by the rule of `Draws`, from logits [V'] with -inf as padding and a uniform number in [0, 1).

    Overwrites the logits of classes that the rule leaves out.
    """
    weights, num_classes = p.class_weights, p.num_classes
    for i in range(rule.first_class):
        put(logits, i, np.float32(-math.inf))
    for i in range(rule.last_class + 1, num_classes):
        put(logits, i, np.float32(-math.inf))
    peak = largest_of(logits, num_classes)
    if rule.temperature == 0:
        for i in range(num_classes - 1):
            if get(logits, i) == peak:
                return i
        return num_classes - 1
    whole = _weigh(logits, weights, rule.temperature, peak, num_classes)
    if rule.top_k < num_classes:
        whole = _keep(logits, weights, p.ones, rule.top_k, num_classes)
    if rule.top_p < 1:
        wanted = np.int64(math.ceil(np.float64(whole) * rule.top_p))
        whole = _keep(logits, weights, weights, wanted, num_classes)
    threshold, reached = np.int64(np.float64(uniform) * np.float64(whole)), np.int64(0)
    for i in range(num_classes - 1):
        reached += get_int64(weights, i)
        if reached > threshold:
            return i
    return num_classes - 1


@kernel
def draw_row(t, tokens, draws, p):
    """Draw row t of `draws` from the logits [B, V'] of a step, and make it the next step's inputs, tokens [B]."""
    for b in range(p.num_rows):
        token = _choose(at(p.logits, b * p.num_logits), draws.uniform[t, b], draws, p)
        tokens[b] = draws.drawn[t, b] = token


def drawing(step):
    """Make a kernel that takes one or more steps by `step(tokens, number, sound, plan, kind)`, with draws between them.

    `step` writes the logits of tokens [B]. The kernel takes (tokens, first, draws, sound, plan, kind): one step, number
    `first` of the streams; or n, if `draws` asks for [n, B] tokens: each step's are drawn, and become the next inputs.
    """

    @kernel
    def run(tokens, first, draws, sound, plan, kind):
        for t in range(max(1, len(draws.drawn))):
            step(tokens, first + t, sound, plan, kind)
            if t < len(draws.drawn):
                draw_row(t, tokens, draws, plan[0])

    return run


class KernelDecoder(Decoder):
    """A decoder whose steps and draws are compiled, many tokens per call."""

    def __init__(self, fields: Mapping[str, Any], *, read: Sequence[Any], num_phases: int, int8: bool) -> None:
        """fields: what kernels work on, `logits`, `num_rows` and `num_classes` included; read: what a step reads once.

        num_phases: of a step; int8: whether weights are in 8 bits.
        """
        self.bytes_per_step = sum(each.nbytes for each in read)
        self._num_steps = 0
        self._num_threads = num_threads_for(fields["num_rows"] * sum(each.size for each in read), num_phases=num_phases)
        self._fields = {**fields, **draw_scratch(fields["num_classes"]), "num_threads": self._num_threads}
        self._plan = make_record(self._fields)
        self._kind = np.int8(0) if int8 else np.float32(0)  # its type is that of the weights
        self._logits = torch.from_numpy(fields["logits"])[:, : fields["num_classes"]]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """As `Decoder.step`; the logits are overwritten by the next step."""
        self._take(tokens.contiguous().numpy(), NO_DRAWS)
        return self._logits

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniform: Tensor, config: DrawConfig) -> Tensor:
        """As `Decoder.draw`."""
        inputs, drawn = tokens.numpy().copy(), []
        while len(uniform):
            now, uniform = uniform.tensor_split([min(self.steps_to_host, _CALL_STEPS)])
            draws = make_draws(now, config)
            self._take(inputs, draws)
            drawn.append(draws.drawn)
        return torch.from_numpy(np.concatenate(drawn))

    def _take(self, tokens: np.ndarray, draws: Draws) -> None:
        """Take a step with inputs tokens [B]; or, if `draws` asks for any, one for each, which overwrite tokens."""
        if self._num_threads > 1:
            numba.set_num_threads(self._num_threads)
        self._run(tokens, draws)
        self._num_steps += max(1, len(draws.drawn))

    @abstractmethod
    def _run(self, tokens: np.ndarray, draws: Draws) -> None:
        """The compiled part of `_take`."""


@kernel(entry=True)
def _draw_row(t, tokens, draws, plan):
    draw_row(t, tokens, draws, plan[0])


def draw_from(stepper: Decoder, tokens: Tensor, uniform: Tensor, config: DrawConfig) -> Tensor:
    """As `Decoder.draw`, for a decoder that steps with torch on a CPU.

    For top-k and top-p, torch sorts the classes; the kernel does not: with 32,000 classes it takes a tenth of the time.
    """
    draws, inputs = make_draws(uniform, config), tokens.numpy().copy()
    fields: dict[str, Any] = {}
    for t in range(len(uniform)):
        logits = stepper.step(torch.from_numpy(inputs))
        if not fields:
            num_rows, num_classes = logits.shape
            rows = np.full((num_rows, padded(num_classes)), -np.inf, dtype=np.float32)
            sizes = {"num_rows": num_rows, "num_logits": padded(num_classes), "num_classes": num_classes}
            fields = {"logits": rows, **sizes, **draw_scratch(num_classes)}
            plan = make_record(fields)
        rows[:, :num_classes] = logits.float().numpy()
        _draw_row(t, inputs, draws, plan)
    return torch.from_numpy(draws.drawn)
