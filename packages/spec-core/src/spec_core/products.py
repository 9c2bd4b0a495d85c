"""Products of several rows with quantised weights on CUDA.

MLX's kernels there (0.32.4) read the weights anew for each entry of a batch, and for each row
below eight. Eight rows of one matrix cost what one row costs: on an H200, 9728 x 2560 weights in
8 bit take 24 us for one row, 52 for four, 23 for eight, 22 for sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

CHEAP_ROWS = 8
"""From so many rows on, a product costs what one row costs."""


def join_rows(
    x: mx.array, multiply: Callable[[mx.array], mx.array], *, fill: bool = False
) -> mx.array:
    """`multiply` all rows of x [..., K] as one matrix, if they are CHEAP_ROWS.

    Args:
        x: as the layer was given it.
        multiply: [rows, K] to [rows, N], each row by itself.
        fill: add rows where there are too few. It costs two more kernels: worth it in a drafter,
            not in a target, whose tokens are filled up instead.

    Returns [..., N].
    """
    *batch, width = x.shape
    rows = math.prod(batch)
    if rows == 1 or (rows < CHEAP_ROWS and not fill):
        return multiply(x)
    matrix = x.reshape(rows, width)
    if rows < CHEAP_ROWS:
        matrix = mx.pad(matrix, [(0, CHEAP_ROWS - rows), (0, 0)])
    product = multiply(matrix)
    return product[:rows].reshape(*batch, product.shape[-1])
