"""A Dask cluster as an executor for preparing audio; the only importer of distributed (the extra `cluster`)."""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor
from contextlib import contextmanager

from waveform.system.errors import Trouble, UserError

_PATIENCE_S = 10  # for the scheduler to answer, and then to have a worker


@contextmanager
def cluster(address: str) -> Iterator[Executor]:
    """Connect to the Dask scheduler at `address`, dask://HOST:PORT.

    If a worker dies, another one gets its work. Raises UserError if distributed is not installed or the scheduler does
    not answer, and Trouble if the cluster is lost later.
    """
    scheduler = re.fullmatch(r"dask://(.+:\d+)", address)
    if scheduler is None:
        raise UserError(f"--executor {address} is not dask://HOST:PORT, the address of a Dask scheduler")
    try:
        import distributed
    except ImportError as error:
        raise UserError('--executor needs distributed: pip install "waveform[cluster]"') from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong is said here, in one line
    try:
        client = distributed.Client(f"tcp://{scheduler[1]}", timeout=_PATIENCE_S, set_as_default=False)
    except OSError as error:
        raise UserError(f"--executor: no scheduler answers at {scheduler[1]}; start `dask scheduler` there") from error
    try:
        try:
            client.wait_for_workers(1, timeout=_PATIENCE_S)
        except TimeoutError as error:
            raise UserError(f"--executor: {scheduler[1]} has no workers; start `dask worker {scheduler[1]}`") from error
        yield client.get_executor()
    except distributed.KilledWorker as error:
        raise Trouble(
            f"several workers died while they prepared the same files ({error}); look at their logs"
        ) from error
    except (BrokenExecutor, CancelledError) as error:
        raise Trouble(f"the cluster at {scheduler[1]} is gone; run the same command again to continue") from error
    finally:
        client.close()
