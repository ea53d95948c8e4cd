"""Data parallelism under torchrun: each rank owns rows of the batch; gradients and metrics are summed over ranks.

Gradients are summed once per step, all together, rather than by DistributedDataParallel's hooks: a step has several
backward passes (one per window), and some parameters, like a compressor's, get no gradient in some of them, in which
case DDP leaves what accumulated before without reducing it.
"""

import gc
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from waveform.ranks.rendezvous import rendezvous_store
from waveform.system.console import say
from waveform.system.errors import Trouble, UserError
from waveform.system.signals import die_with_parent

T = TypeVar("T")
TIMEOUT_S = 600.0  # a rank that keeps the others waiting this long in training hangs
SCORING_TIMEOUT_S = 7200.0  # one rank may still score a document when the others have long finished theirs
# While ranks find each other, and while the first one prepares data, writes or draws a sample, being slow does not mean
# hanging.
_PATIENCE = timedelta(hours=2)
_BEAT_S = 1.0
# What the backends report if a rank is gone (its connection closes at once) or does not come (the timeout passes).
_ENDED = re.compile("closed by peer|reset by peer|broken pipe|pair closure", re.IGNORECASE)
_LATE = re.compile("timed out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)


class RankLost(Trouble):
    """Another rank of the job ended or hangs, so this one cannot go on."""


class _AloneTooLong(RuntimeError):
    """The first rank lives, but has worked alone for longer than anybody waits."""


@contextmanager
def explain_lost_ranks(world: "World", *, timeout_s: float, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn a backend's error about another rank into RankLost, one line; `where` tells how far this rank got."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if _ENDED.search(text):
            reason = "ended; its own output says why"
        elif _LATE.search(text):
            reason = f"did not answer for {timeout_s:g} s (in training: train.timeout_s) and may hang"
        elif isinstance(error, _AloneTooLong):
            reason = f"worked alone for {_PATIENCE} and may hang"
        else:
            raise
        if world.size == 1:
            raise
        missing = re.search(r"(rank \d+) failed to pass", text, re.IGNORECASE)
        other = missing[1].lower() if missing else "another rank"
        at = "" if where is None else f" at {where()}"
        raise RankLost(f"rank {world.rank} stops{at}: {other} {reason}") from error


@dataclass(frozen=True)
class World:
    """This process as one of the job's ranks; a job of one process needs no torchrun."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    show_progress: bool = True  # whether the first rank says what is being done

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, writes and decides."""
        return self.rank == 0

    @property
    def shows(self) -> bool:
        """Whether this rank says what is being done."""
        return self.is_first and self.show_progress

    def say(self, line: str) -> None:
        """Print a line, on the rank that says what is being done; if that fails, it is dropped."""
        if self.shows:
            say(line)

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks: through gloo for tensors on the CPU, through NCCL for those on a GPU."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` on every rank by the sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of all ranks in place; a parameter that has none on any rank keeps none."""
        if self.size == 1:
            return
        parameters = list(parameters)
        for parameter, has in zip(parameters, self.largest(*(p.grad is not None for p in parameters)), strict=True):
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if grads:
            self.group.allreduce_coalesced(grads).wait()

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)  # outside autograd, which would keep the operation alive

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.largest(flag)[0])

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over ranks. Does not wait for a GPU's queue, so it can be called at every step."""
        if self.size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)  # on the CPU, so through gloo
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return [int(value) for value in largest.tolist()]

    def share(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What each of `jobs` returns, each done by one rank, on every rank. Results must be picklable."""
        own = {i: jobs[i]() for i in range(self.rank, len(jobs), self.size)}
        of_ranks: list[Any] = [own]
        if self.size > 1:
            of_ranks = [None] * self.size
            dist.all_gather_object(of_ranks, own)
        done = {i: result for results in of_ranks for i, result in results.items()}
        return [done[i] for i in range(len(jobs))]

    def barrier(self) -> None:
        """Wait for every rank as long as in training. Raises RuntimeError as a reduction does if one does not come."""
        if self.size > 1:
            # Gloo's barrier names the missing rank; dist.monitored_barrier of older torch refuses a group with NCCL.
            self.group.monitored_barrier()  # type: ignore[attr-defined]  # torch has it without naming it in its types

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Only the first rank has work in the block, which must not communicate; the others wait at its end.

        The work may take hours, and no collective can tell work from a hang. So once all have come, a thread of the
        first rank gives a sign of life every second, and the others wait as long as its process runs (up to two hours).
        The first waits for the others, which have nothing to do, as long as in training.
        """
        if self.size == 1:
            yield
        elif self.is_first:
            with ThreadPoolExecutor(1) as executor:
                over = Event()
                signs = executor.submit(self._show_life, over)
                try:
                    yield
                finally:
                    over.set()
            signs.result()  # raises what the thread did
            _from_first(True)
        else:
            yield
            self.barrier()
            end = time.monotonic() + _PATIENCE.total_seconds()
            while not _from_first():
                if time.monotonic() > end:
                    raise _AloneTooLong

    def _show_life(self, over: Event) -> None:
        self.barrier()
        while not over.wait(_BEAT_S):
            _from_first(False)


def _from_first(value: bool = False) -> bool:
    """The first rank's `value`, on every rank."""
    shared = torch.tensor(int(value))
    dist.broadcast(shared, src=0)
    return bool(shared)


def choose_device(device: str | None) -> str:
    """`cpu`, `cuda` or `mps`; None: `cuda` if there is one, or else `cpu`. Raises UserError if it is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no usable CUDA device; leave the device out, or choose cpu")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps: this machine has no usable Apple GPU; leave the device out, or choose cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def job(*, device: str | None = None, timeout_s: float, show_progress: bool = True) -> Iterator[World]:
    """Join the job that torchrun's environment describes, or be a job of one process; leave it after the block.

    device: as for `choose_device`; timeout_s: how long a rank waits for the others in a reduction; show_progress: as in
    `World`. Raises RankLost if another rank ended or hangs, and UserError for a device that this process cannot have.
    """
    chosen = choose_device(device)
    cuda = chosen == "cuda"
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world = World(rank, size, torch.device(f"cuda:{local_rank}" if cuda else chosen), show_progress)
    if size > 1 and chosen == "mps":
        raise UserError("device mps: an Apple GPU serves one process only; start it without torchrun")
    if cuda and size > 1 and local_rank >= (num_gpus := torch.cuda.device_count()):
        raise UserError(
            f"process {local_rank} has no GPU: this machine has {num_gpus}; lower --nproc-per-node, or choose cpu"
        )
    if cuda:
        torch.cuda.set_device(world.device)
    joins = size > 1 and not dist.is_initialized()
    if joins:
        die_with_parent()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=timeout_s),
            store=rendezvous_store(timeout=_PATIENCE),
            rank=rank,
            world_size=size,
        )
    try:
        with explain_lost_ranks(world, timeout_s=timeout_s):
            yield world
    finally:  # so that the other ranks do not see a lost connection
        if joins:
            gc.collect()  # or objects that refer to the group outlive it, and gloo's threads abort the process at exit
            dist.destroy_process_group()
            gc.collect()
