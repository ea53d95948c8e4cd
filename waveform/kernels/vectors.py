"""The language of the kernels: vectors of 16 floats, and memory by address, for functions of numba.

Kernels in fp32 are written in these instructions and in `a + b`, `a - b` and `a * b` of vectors. numba vectorises a
plain loop only if LLVM may reorder sums (`fastmath`), in an order that depends on the code around it, and a stream must
not change with the number of streams; here every sum has the order that the code states. LLVM splits a vector into what
the processor has: one AVX-512 register, two of AVX2, four of NEON.

Kernels name memory by address, as C does (record.py says why). An index counts elements from the address, and nothing
checks it. Elements are float32, unless a name or an argument `kind`, a number, says otherwise by its type.
"""

import functools
import inspect
import math
import operator
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_jitable, register_model

from waveform.kernels.compiling import kernel

LANES = 16
F32 = np.float32(0)  # a kind

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _FloatsType(types.Type):
    def __init__(self) -> None:
        super().__init__("Floats16")


_floats = _FloatsType()


@register_model(_FloatsType)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _FLOATS)


def _define_operator(operation, instruction):
    """Let kernels write `operation` of two vectors."""
    kind = signature(_floats, _floats, _floats)
    infer_global(operation)(type("VectorOperator", (ConcreteTemplate,), {"cases": [kind]}))

    @lower_builtin(operation, _floats, _floats)
    def generate(context, builder, signature, values):
        return getattr(builder, instruction)(*values)


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")


def _vector(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _call(builder, name: str, *operands):
    """An LLVM intrinsic on vectors of floats."""
    module = builder.module
    function = cgutils.get_or_insert_function(
        module, ir.FunctionType(_FLOATS, [_FLOATS] * len(operands)), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, operands)


def _spread(builder, value):
    """A vector with `value` in all 16 elements."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _fma(builder, a, b, c):
    """a b + c."""
    return _call(builder, "fmuladd", a, b, c)


@register_jitable
def padded(size: int) -> int:
    """`size` rounded up to whole vectors; kernels can call it, too."""
    return (size + LANES - 1) // LANES * LANES


def _pointer(builder, base, index, element):
    """The address of element `index` from `base` on; both int64."""
    return builder.gep(builder.inttoptr(base, element.as_pointer()), [index])


def _load(builder, base, index, element):
    """16 elements from `index` on, as floats."""
    vector = builder.bitcast(_pointer(builder, base, index, element), ir.VectorType(element, LANES).as_pointer())
    if element == _FLOAT:
        return builder.load(vector, align=4)
    return builder.sitofp(builder.sext(builder.load(vector, align=1), _INTS), _FLOATS)


def _store(builder, base, index, value):
    """Write 16 elements from `index` on."""
    builder.store(value, builder.bitcast(_pointer(builder, base, index, _FLOAT), _FLOATS.as_pointer()), align=4)


@kernel
def at(base, index):
    """The address of float32 `index` from `base` on."""
    return base + index * 4


def _instruction(result, *arguments):
    """Turn a function that builds LLVM instructions from (builder, values) into one that kernels can call.

    result, arguments: types; an argument of type None may have any, and a result of type None has the last one's.
    """

    def made_of(build):
        def typed(typing_context, *given):
            kinds = [kind or own for kind, own in zip(arguments, given, strict=True)]

            def generate(context, builder, signature, values):
                value = build(builder, *values)
                return context.get_dummy_value() if value is None else value

            return (result or kinds[-1])(*kinds), generate

        function: Any = typed
        function.__signature__ = inspect.signature(build)
        function.__name__, function.__doc__ = build.__name__, build.__doc__
        return intrinsic(function)

    return made_of


_of_one = _instruction(_floats, _floats)


@_instruction(types.float32, types.int64, types.int64)
def get(builder, base, index):
    """One element."""
    return builder.load(_pointer(builder, base, index, _FLOAT))


@_instruction(types.int64, types.int64, types.int64)
def get_int64(builder, base, index):
    """One int64."""
    return builder.load(_pointer(builder, base, index, _LONG))


@_instruction(types.none, types.int64, types.int64, None)
def put(builder, base, index, value):
    """Write one element of the type of `value`: float32, int8 or int64."""
    builder.store(value, _pointer(builder, base, index, value.type))


@_instruction(None, types.float32, None)
def convert(builder, value, kind):
    """A float32, unchanged or rounded to int8, by the type of `kind`."""
    if kind.type == _FLOAT:
        return value
    rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_FLOAT, [_FLOAT]), "llvm.rint.f32")
    return builder.fptosi(builder.call(rint, [value]), kind.type)


@_instruction(types.int64, None)
def bytes_of(builder, kind):
    """Bytes of a number of the type of `kind`."""
    return _LONG(4 if kind.type == _FLOAT else kind.type.width // 8)


@_instruction(types.float32, types.int64)
def float_of_bits(builder, bits):
    """The float32 of the lower 32 bits of an int64."""
    return builder.bitcast(builder.trunc(bits, _INT), _FLOAT)


@_instruction(_floats, types.int64, types.int64)
def load(builder, base, index):
    """16 elements from `index` on."""
    return _load(builder, base, index, _FLOAT)


@_instruction(_floats, types.int64, types.int64, None)
def load_as(builder, base, index, kind):
    """16 elements of the type of `kind` (float32 or int8) from `index` on, as floats."""
    return _load(builder, base, index, kind.type)


@_instruction(numba.types.CPointer(types.float64), types.int64)
def doubles(builder, base):
    """The float64 at an address, for numba.carray."""
    return builder.inttoptr(base, ir.DoubleType().as_pointer())


def _larger(builder, a, b):
    """The larger of each pair."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


store = _instruction(types.none, types.int64, types.int64, _floats)(_store)
fill = _instruction(_floats, types.float32)(_spread)
maximum = _instruction(_floats, _floats, _floats)(_larger)


@_instruction(_floats, _floats, _floats)
def above(builder, a, b):
    """1 where a > b, else 0."""
    return builder.select(builder.fcmp_ordered(">", a, b), _vector(1.0), _vector(0.0))


fma = _instruction(_floats, _floats, _floats, _floats)(_fma)


def _reduce(builder, vector, operation):
    """Fold halves onto each other: the same tree of operations everywhere."""
    for width in (8, 4, 2, 1):
        mask = ir.Constant(ir.VectorType(_INT, LANES), [(i + width) % LANES for i in range(LANES)])
        vector = operation(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@_instruction(types.float32, _floats)
def total(builder, a):
    """The sum of a vector's elements."""
    return _reduce(builder, a, builder.fadd)


@_instruction(types.float32, _floats)
def largest(builder, a):
    """The largest of a vector's elements."""
    return _reduce(builder, a, functools.partial(_larger, builder))


def _exp(builder, x):
    """exp to 2 ulp: 2^n e^r with |r| <= ln 2 / 2, e^r by a polynomial (`expf` of the Cephes library, S. Moshier).

    Below -87.3, where it would no longer be a normal float, the result is 0; above 88 it stays at exp(88).
    """
    low, high = _vector(-87.33), _vector(88.0)
    in_range = builder.fcmp_ordered(">", x, low)
    x = builder.select(in_range, x, low)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    n = _call(builder, "floor", _fma(builder, x, _vector(math.log2(math.e)), _vector(0.5)))
    r = _fma(builder, n, _vector(-0.693359375), x)  # ln 2 in two parts: the first times n is exact
    r = _fma(builder, n, _vector(2.12194440e-4), r)
    y = _vector(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = _fma(builder, y, r, _vector(coefficient))
    y = builder.fadd(_fma(builder, y, builder.fmul(r, r), r), _vector(1.0))
    exponent = builder.add(builder.fptosi(n, _INTS), ir.Constant(_INTS, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _FLOATS)
    return builder.select(in_range, builder.fmul(y, power), _vector(0.0))


def _erf(builder, x):
    """erf to 1.5e-7 (absolute): Abramowitz and Stegun 1964, 7.1.26, which torch uses on AVX-512 as well."""
    zero, one = _vector(0.0), _vector(1.0)
    negative = builder.fcmp_ordered("<", x, zero)
    size = builder.select(negative, builder.fsub(zero, x), x)
    t = builder.fdiv(one, _fma(builder, size, _vector(0.3275911), one))
    y = _vector(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        y = _fma(builder, y, t, _vector(coefficient))
    tail = builder.fmul(builder.fmul(y, t), _exp(builder, builder.fsub(zero, builder.fmul(size, size))))
    y = builder.fsub(one, tail)
    return builder.select(negative, builder.fsub(zero, y), y)


def _sigmoid(builder, x):
    """1 / (1 + e^-x)."""
    one = _vector(1.0)
    return builder.fdiv(one, builder.fadd(one, _exp(builder, builder.fsub(_vector(0.0), x))))


exp, sigmoid = _of_one(_exp), _of_one(_sigmoid)


@_of_one
def gelu(builder, a):
    """a Phi(a), by `_erf`."""
    half, scaled = builder.fmul(a, _vector(0.5)), builder.fmul(a, _vector(math.sqrt(0.5)))
    return _fma(builder, half, _erf(builder, scaled), half)


@_of_one
def gelu_slope(builder, a):
    """The derivative of `gelu`: Phi(a) + a phi(a)."""
    half_square = builder.fmul(builder.fmul(a, a), _vector(-0.5))
    phi = builder.fmul(_exp(builder, half_square), _vector(1 / math.sqrt(2 * math.pi)))
    cumulative = _fma(builder, _erf(builder, builder.fmul(a, _vector(math.sqrt(0.5)))), _vector(0.5), _vector(0.5))
    return _fma(builder, a, phi, cumulative)


@_of_one
def log_logistic(builder, a):
    """The log of the density of the standard logistic distribution, -|a| - 2 log(1 + e^-|a|), to 3e-7 (absolute).

    The logarithm by a polynomial around 1 (`logf` of the Cephes library).
    """
    zero, one = _vector(0.0), _vector(1.0)
    below = builder.select(builder.fcmp_ordered("<", a, zero), a, builder.fsub(zero, a))  # -|a|
    x = builder.fadd(one, _exp(builder, below))  # in 1..2
    is_large = builder.fcmp_ordered(">", x, _vector(math.sqrt(2)))
    x = builder.fsub(builder.select(is_large, builder.fmul(x, _vector(0.5)), x), one)
    y = _vector(7.0376836292e-2)
    for coefficient in (
        *(-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    ):
        y = _fma(builder, y, x, _vector(coefficient))
    square = builder.fmul(x, x)
    y = builder.fmul(builder.fmul(y, x), square)
    log = builder.fadd(x, _fma(builder, square, _vector(-0.5), y))
    log = builder.fadd(log, builder.select(is_large, _vector(math.log(2)), zero))
    return _fma(builder, log, _vector(-2.0), below)


@_of_one
def tanh(builder, a):
    """tanh a = 2 sigmoid(2 a) - 1, to 1e-7 (absolute)."""
    return _fma(builder, _vector(2.0), _sigmoid(builder, builder.fadd(a, a)), _vector(-1.0))


@_instruction(types.none, *[types.int64] * 4)
def transpose16(builder, source, source_stride, target, target_stride):
    """Transpose 16 x 16 floats, whose rows are `source_stride` floats apart, and `target_stride` in the target."""
    rows = [_load(builder, source, builder.mul(source_stride, _LONG(i)), _FLOAT) for i in range(LANES)]
    for step in (1, 2, 4, 8):  # within blocks of 2 `step` x 2 `step`, swap the two `step` x `step` off the diagonal
        first = [i if not i & step else LANES + (i - step) for i in range(LANES)]
        second = [i + step if not i & step else LANES + i for i in range(LANES)]
        new = list(rows)
        for i in range(LANES):
            if not i & step:
                a, b = rows[i], rows[i + step]
                new[i] = builder.shuffle_vector(a, b, ir.Constant(_INTS, first))
                new[i + step] = builder.shuffle_vector(a, b, ir.Constant(_INTS, second))
        rows = new
    for i in range(LANES):
        _store(builder, target, builder.mul(target_stride, _LONG(i)), rows[i])


def product_tile(num_rows: int, num_vectors: int):
    """A function for kernels: the product of `num_rows` rows of A with `num_vectors` vectors of columns of B.

    It takes (a, a_row, a_step, b, b_row, c, c_row, depth, adds, kind): C = or, if `adds`, += A [num_rows, depth] @ B.
    Rows and elements of A are `a_row` and `a_step` floats apart, rows of B, of the type of `kind`, `b_row` elements and
    those of C `c_row` floats. The tile of C stays in registers while the rows of B pass by.
    """
    cells = [(i, j) for i in range(num_rows) for j in range(num_vectors)]

    @_instruction(types.none, *[types.int64] * 8, types.boolean, None)
    def tile(builder, a, a_row, a_step, b, b_row, c, c_row, depth, adds, kind):
        def vector(row, stride, j):
            return builder.add(builder.mul(row, stride), _LONG(LANES * j))

        tile = {cell: cgutils.alloca_once_value(builder, _vector(0.0)) for cell in cells}
        with builder.if_then(adds):
            for i, j in cells:
                builder.store(_load(builder, c, vector(_LONG(i), c_row, j), _FLOAT), tile[i, j])
        with cgutils.for_range(builder, depth) as loop:
            columns = [_load(builder, b, vector(loop.index, b_row, j), kind.type) for j in range(num_vectors)]
            for i in range(num_rows):
                at = builder.add(builder.mul(loop.index, a_step), builder.mul(_LONG(i), a_row))
                value = _spread(builder, builder.load(_pointer(builder, a, at, _FLOAT), align=4))
                for j, column in enumerate(columns):
                    builder.store(_fma(builder, value, column, builder.load(tile[i, j])), tile[i, j])
        for i, j in cells:
            _store(builder, c, vector(_LONG(i), c_row, j), builder.load(tile[i, j]))

    return tile


@_instruction(types.int64)
def stack_tile(builder):
    """The address of space for 16 vectors on the stack."""
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_FLOATS, 16)), _LONG)
