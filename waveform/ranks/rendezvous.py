"""Where the ranks of one attempt of a torchrun job meet: a store without keys of earlier attempts.

torchrun keeps one store for all restarts (seen in torch 2.14: the server is made in the first rendezvous and its keys
have no prefix), so a restarted rank may read the address of a dead process and wait for it forever. torchrun's count of
restarts does not help: each node has its own. So the ranks agree on a fresh prefix:

    every rank   says hello with a new random number
    rank 0       answers with a prefix and all the numbers, again whenever a hello changes
    every rank   that finds its number there acknowledges the prefix
    rank 0       closes the rendezvous once all have acknowledged the prefix
"""

import json
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch has them only if it was built with distributed support

from waveform.system.errors import Trouble

_POLL_S = 0.02
_CONNECT_S = 60.0


def rendezvous_store(rank: int, size: int, *, timeout: timedelta) -> tuple[Store, str]:
    """A store for this attempt's ranks alone, and the prefix of its keys; rank 0 keeps it if torchrun does not.

    Raises dist.DistStoreError if the others do not come within `timeout`, Trouble if torchrun is gone.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(host, port, size, is_master=rank == 0, timeout=timeout), "job"
    try:  # torchrun's store is older than this process; TCPStore would try for hours to reach a dead one
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise Trouble(
            f"rank {rank}: torchrun does not answer at {host}:{port}; it ended or cannot be reached"
        ) from error
    store = TCPStore(host, port, size, is_master=False, timeout=timeout)
    prefix = agree_on_prefix(store, rank, size, timeout=timeout)
    return PrefixStore(prefix, store), prefix


def agree_on_prefix(store: Store, rank: int, size: int, *, timeout: timedelta) -> str:
    """A prefix that all current ranks share, whatever earlier attempts left in `store`."""
    number, acknowledged, offered, hellos = uuid.uuid4().hex, "", "", [""] * size
    store.set(f"rendezvous/hello/{rank}", number)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        if rank == 0:
            now = [_read(store, f"rendezvous/hello/{other}") for other in range(size)]
            if now != hellos:
                hellos, offered = now, uuid.uuid4().hex
                store.set("rendezvous/offer", json.dumps({"prefix": offered, "numbers": hellos}))
            if all(_read(store, f"rendezvous/acknowledged/{other}") == offered for other in range(size)):
                store.set("rendezvous/closed", offered)
        offer = json.loads(_read(store, "rendezvous/offer") or "{}")
        if number in offer.get("numbers", ()) and offer["prefix"] != acknowledged:
            acknowledged = offer["prefix"]
            store.set(f"rendezvous/acknowledged/{rank}", acknowledged)
        if acknowledged and _read(store, "rendezvous/closed") == acknowledged:
            return acknowledged
        time.sleep(_POLL_S)
    raise dist.DistStoreError(f"rank {rank}: the other {size - 1} ranks of the job did not come within {timeout}")


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
