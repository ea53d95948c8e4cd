"""Counts what the ranks of a job send each other in one update.

Messages travel in rings, as in NCCL for large ones: each of n ranks sends (n - 1) / n of what is gathered or
reduce-scattered, twice that for what is all-reduced, and receives as much. Evaluation, checkpoints and single numbers
are not counted.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor, nn


def bytes_sent(
    model: nn.Module,
    *,
    num_ranks: int,
    sharding: str = "none",
    units: Sequence[nn.Module] = (),
    num_windows: int = 1,
    unroll: int = 1,
) -> int:
    """Return the bytes that each rank sends, and receives, in one update.

    none: gradients are all-reduced once, whatever the number of windows. fsdp: for each of `num_windows` windows, each
    of `units` is gathered for the forward pass and again for the backward pass, and its gradient is reduce-scattered;
    parameters outside the units are gathered and reduce-scattered once per backward pass, which spans `unroll` windows.
    All parts are equally large, so rows are added if a parameter's first dimension is not a multiple of the number of
    ranks.
    """
    if sharding == "none":
        return 2 * (num_ranks - 1) * sum(p.nbytes for p in model.parameters()) // num_ranks
    in_units = {id(p): p for unit in units for p in unit.parameters()}
    rest = [p for p in model.parameters() if id(p) not in in_units]
    passes = -(-num_windows // unroll)
    parts = 3 * num_windows * _part(in_units.values(), num_ranks) + 2 * passes * _part(rest, num_ranks)
    return (num_ranks - 1) * parts


def _part(parameters: Iterable[Tensor], num_ranks: int) -> int:
    """Return the bytes of one rank's part of parameters that are sharded by rows."""
    return sum(-(-p.shape[0] // num_ranks) * math.prod(p.shape[1:]) * p.element_size() for p in parameters)
