"""Ranks find the others of their own attempt, whatever an earlier one left in torchrun's store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from waveform.engine.meeting import agree_on_prefix


def attempt(store: dist.Store, order: list[int]) -> set[str]:
    """Prefixes that the ranks come to that start in this order, a moment apart."""
    prefixes: set[str] = set()

    def meet(rank: int) -> None:
        prefixes.add(agree_on_prefix(store, rank, len(order), timeout=timedelta(seconds=20)))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join()
    return prefixes


def test_each_attempt_has_a_prefix_of_its_own() -> None:
    store = dist.HashStore()
    found = [attempt(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1])]
    assert [len(prefixes) for prefixes in found] == [1] * 4
    assert len(set.union(*found)) == 4


def test_a_rank_that_does_not_come_is_said() -> None:
    store = dist.HashStore()
    attempt(store, [0, 1])
    with pytest.raises(dist.DistStoreError, match="the other 1 ranks of the job did not come"):
        agree_on_prefix(store, 0, 2, timeout=timedelta(seconds=0.3))
