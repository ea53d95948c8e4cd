"""Counts what the ranks of a job send each other in one update, and from it what scaling a network allows on paper.

Rings, as NCCL uses for large messages: of n ranks each sends (n - 1) / n of what is gathered or reduce-scattered, twice
that for what is all-reduced, and receives as much. Evaluation, checkpoints and single numbers are left out.
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
    """Bytes that each rank sends, and receives, for one update.

    none: gradients are all-reduced once, whatever the number of windows. fsdp: for each of `num_windows` windows each
    of `units` is gathered for the forward, gathered again for the backward, and its gradient reduce-scattered; what is
    in no unit is gathered and reduce-scattered once for each backward pass, of `unroll` windows. Parts are of equal
    size, so rows are added where a parameter's first dimension is no multiple of the number of ranks.
    """
    parameters = list(model.parameters())
    if sharding == "none":
        return 2 * (num_ranks - 1) * _size(parameters) // num_ranks
    in_units = {id(p): p for unit in units for p in unit.parameters()}
    rest = [p for p in parameters if id(p) not in in_units]
    passes = -(-num_windows // unroll)
    parts = 3 * num_windows * _part(in_units.values(), num_ranks) + 2 * passes * _part(rest, num_ranks)
    return (num_ranks - 1) * parts


def scaling(bytes_each: int, *, compute_s: float, bytes_per_second: float) -> float:
    """Share of an update's time that is computation, where communication waits for it and hides behind nothing."""
    return compute_s / (compute_s + bytes_each / bytes_per_second)


def _size(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _part(parameters: Iterable[Tensor], num_ranks: int) -> int:
    """Bytes of one rank's part of what is sharded by rows."""
    return sum(-(-p.shape[0] // num_ranks) * math.prod(p.shape[1:]) * p.element_size() for p in parameters)
