"""Products of small matrices, whose rows lie anywhere: for kernels that work on one row of a batch at a time.

At widths of 64 to 256 the matrix library reaches half to three quarters of the rate of these, because it is made for
larger ones (results/notes.md). Every sum runs over k in order, whatever the tile.
"""

import numpy as np
from numba.core.registry import cpu_target

from waveform.kernels.compiling import kernel
from waveform.kernels.vectors import F32, LANES, at, fill, fma, get, load_as, product_tile

_has_avx512 = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]  # what numba compiles for
# Sizes of a tile, whose sums stay in registers: they fill 16 of AVX-512's 32, 12 of AVX2's 16 (half a vector each) and
# 24 of NEON's 32 (a quarter each).
ROWS, _VECTORS = (8, 2) if _has_avx512 else (6, 1)

# Vectors of columns that lie together in memory: in the weights of a dense layer, and in cached slots.
GROUP = 4
group_tile, group_row = product_tile(4, GROUP), product_tile(1, GROUP)


def _product_of_columns(num_vectors):
    tile, row_tile = product_tile(ROWS, num_vectors), product_tile(1, num_vectors)

    @kernel
    def columns(a, a_row, a_step, b, b_row, c, c_row, m, k, adds):
        first_left_over = m // ROWS * ROWS
        for i in range(0, first_left_over, ROWS):
            tile(at(a, i * a_row), a_row, a_step, b, b_row, at(c, i * c_row), c_row, k, adds, F32)
        for i in range(first_left_over, m):
            row_tile(at(a, i * a_row), a_row, a_step, b, b_row, at(c, i * c_row), c_row, k, adds, F32)

    return columns


_wide_columns, _narrow_columns = _product_of_columns(_VECTORS), _product_of_columns(1)


@kernel
def product(a, a_row, a_step, b, b_row, c, c_row, m, n, k, adds):
    """C [m, n] = or, if `adds`, += A [m, k] @ B [k, n]; n: whole vectors.

    a, b, c: addresses. Rows of B and C are `b_row` and `c_row` floats apart, rows of A `a_row`, its columns `a_step`: a
    transposed matrix has a_row 1.
    """
    for j in range(0, n, _VECTORS * LANES):
        if j + _VECTORS * LANES <= n:
            _wide_columns(a, a_row, a_step, at(b, j), b_row, at(c, j), c_row, m, k, adds)
        else:
            _narrow_columns(a, a_row, a_step, at(b, j), b_row, at(c, j), c_row, m, k, adds)


@kernel
def vector_of_product(a, b, b_row, k, kind):
    """A [k] @ B [k, 16], with rows of B, of the type of `kind`, `b_row` elements apart; k: a multiple of four.

    In four sums, so that an addition need not wait for the one before it.
    """
    first = second = third = fourth = fill(np.float32(0))
    for i in range(0, k, 4):
        first = fma(load_as(b, i * b_row, kind), fill(get(a, i)), first)
        second = fma(load_as(b, (i + 1) * b_row, kind), fill(get(a, i + 1)), second)
        third = fma(load_as(b, (i + 2) * b_row, kind), fill(get(a, i + 2)), third)
        fourth = fma(load_as(b, (i + 3) * b_row, kind), fill(get(a, i + 3)), fourth)
    return (first + second) + (third + fourth)
