"""Where the ranks of one attempt of a torchrun job meet: a store without keys of earlier attempts.

torchrun keeps one store for all restarts (seen in torch 2.14: the server is made in the first rendezvous and its keys
have no prefix), so a restarted rank may read the address of a dead process and wait for it forever. torchrun's count of
restarts does not help: each node has its own. But it ends all processes of an attempt before it starts the next, so
whatever answers a random number that was just made belongs to this attempt.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # torch has them only if it was built with distributed support

from waveform.system.errors import Trouble, UserError

_POLL_S = 0.02
_CONNECT = timedelta(minutes=1)


def rendezvous_store(*, timeout: timedelta) -> Store:
    """A store for this attempt's ranks alone, which rank 0 keeps if torchrun does not.

    Raises Trouble if torchrun is gone, or if the others do not come within `timeout`, and UserError if the environment
    describes no job.
    """
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:  # torchrun's store is older than this process, so one that does not answer for a minute is gone
        store, rank, size = next(rendezvous("env://", timeout=_CONNECT if of_torchrun else timeout))
    except dist.DistError as error:
        who = "torchrun" if of_torchrun else "the job"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Trouble(
            f"rank {os.environ['RANK']}: {who} does not answer at {address}; it ended or cannot be reached"
        ) from error
    except ValueError as error:  # some of the variables are missing
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but this process is part of no job ({error}); start it with "
            "torchrun, or unset WORLD_SIZE"
        ) from error
    return meet(store, rank, size, timeout=timeout) if of_torchrun else store


def meet(store: Store, rank: int, size: int, *, timeout: timedelta) -> Store:
    """The part of `store` that only the current ranks know, once all of them are there.

    Every other rank leaves a random number, which rank 0 answers with a prefix. Raises Trouble if a rank does not come.
    """
    number, ranks = uuid.uuid4().hex, [str(each) for each in range(size)]
    end = time.monotonic() + timeout.total_seconds()
    store.set_timeout(timeout)
    try:
        store.set(f"number/{rank}", number)
        ours = PrefixStore(store.get(number).decode() if rank else number, store)
        ours.set(str(rank), "here")
        while rank == 0 and not ours.check(ranks) and time.monotonic() < end:
            for each in ranks[1:]:
                if store.check([f"number/{each}"]):  # an earlier attempt's, perhaps, for which nobody waits any more
                    store.set(store.get(f"number/{each}").decode(), number)
            time.sleep(_POLL_S)
        ours.wait(ranks, timeout if rank else timedelta(seconds=_POLL_S))
    except dist.DistStoreError as error:
        raise Trouble(f"rank {rank}: the other {size - 1} ranks of the job did not come within {timeout}") from error
    return ours
