"""Data parallelism under torchrun: each rank owns rows of the batch; gradients and metrics are summed over ranks.

Gradients are summed once per step, in flat buckets, rather than by DistributedDataParallel's hooks: a step has several
backward passes (one per window), and some parameters, like a compressor's, get no gradient in some of them, in which
case DDP leaves what accumulated before without reducing it.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from waveform.ranks.heartbeat import Heartbeat
from waveform.ranks.rendezvous import rendezvous_store
from waveform.system.errors import Trouble, UserError
from waveform.system.signals import end_with_launcher

_BUCKET_ELEMENTS = 1 << 24
TIMEOUT_S = 600.0  # a rank that keeps the others waiting this long in training hangs
SCORING_TIMEOUT_S = 7200.0  # one rank scores a document, and the others may have finished theirs long ago
# While ranks find each other, and at a barrier, where they wait for the first one to prepare data, write or draw a
# sample, being slow does not mean hanging.
_BARRIER_TIMEOUT = timedelta(hours=2)
# What the backends report if a rank is gone (its connection closes at once) or does not come (the timeout passes).
_LOST = ("closed by peer", "reset by peer", "broken pipe", "pair closure")
_LATE = ("timed out", "timeout")
_ALONE = "worked alone for"
# Carries the reductions; the default group exists only because torch requires one.
_group: dist.ProcessGroup | None = None
# Carries questions of the ranks to each other, always through the CPU.
_questions: dist.ProcessGroup | None = None
_heartbeat: Heartbeat | None = None
_timeout_s = TIMEOUT_S
_POLL_S = 0.005


class RankLost(Trouble):
    """Another rank of the job ended or hangs, so this one cannot go on."""


@contextmanager
def explain_lost_ranks(world: "World", *, timeout_s: float, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn a backend's error about another rank into RankLost, one line; `where` tells how far this rank got."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if world.size == 1 or not any(sign in text for sign in _LOST + _LATE):
            raise
        reason = f"did not answer for {timeout_s:g} s (in training: train.timeout_s) and may hang"
        if any(sign in text for sign in _LOST):
            reason = "ended; its own output says why"
        elif _ALONE in text:
            reason = f"{_ALONE} {_BARRIER_TIMEOUT} h and may hang"
        at = "" if where is None else f" at {where()}"
        raise RankLost(f"rank {world.rank} stops{at}: another rank {reason}") from error


@contextmanager
def job(*, device: str | None = None, timeout_s: float) -> Iterator["World"]:
    """Join the job (see `join`) for a block, and leave it after. Raises RankLost if another rank ended or hangs."""
    world = join(device=device, timeout_s=timeout_s)
    try:
        with explain_lost_ranks(world, timeout_s=timeout_s):
            yield world
    finally:
        leave()


@dataclass(frozen=True)
class World:
    """This process among those of the job; a job of one process needs no torchrun."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, writes and decides."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks, for reductions; a rank that does not answer is noticed within `timeout_s`."""
        assert self.size > 1 and _group is not None
        return _group

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` on every rank by the sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of all ranks in place; a parameter that has none on any rank keeps none."""
        if self.size == 1:
            return
        parameters = list(parameters)
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self.device)
        dist.all_reduce(has, group=self.group)
        grads: list[Tensor] = []
        for parameter, count in zip(parameters, has.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
        while grads:
            bucket: list[Tensor] = []
            while grads and (not bucket or sum(g.numel() for g in bucket) + grads[0].numel() <= _BUCKET_ELEMENTS):
                bucket.append(grads.pop(0))
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat, group=self.group)
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values."""
        if self.size > 1:
            for tensor in tensors:
                # Outside autograd, which would keep the operation alive.
                dist.broadcast(tensor.detach(), src=0, group=self.group)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.largest(int(flag))[0])

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over ranks. Does not wait for a GPU's queue, so it can be called at every step."""
        if self.size == 1:
            return list(values)
        largest = torch.tensor(values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_questions)
        return [int(value) for value in largest.tolist()]

    def barrier(self) -> None:
        """Wait for every rank.

        The others wait for the first, which may have much to do alone, as long as its process runs (up to two hours);
        the first waits for the others, which do nothing alone, as long as in training. Raises RuntimeError, as a
        reduction does, if a rank ended or does not come.
        """
        if self.size == 1:
            return
        assert _heartbeat is not None
        number = _heartbeat.arrive()
        silent_s, beats, looked = 0.0, _heartbeat.beats, time.monotonic()
        end = looked + _BARRIER_TIMEOUT.total_seconds()
        while _heartbeat.passed < number:
            time.sleep(_POLL_S)
            now = time.monotonic()
            silent_s += min(now - looked, 1.0)  # one that was itself stopped for a while does not blame the others
            looked = now
            if not self.is_first and _heartbeat.beats != beats:
                silent_s, beats = 0.0, _heartbeat.beats
            if _heartbeat.lost:
                raise RuntimeError("the job's store was closed by peer")
            if silent_s > _timeout_s:
                raise RuntimeError("timed out at a barrier")
            if now > end:
                raise RuntimeError(f"timed out: the first rank {_ALONE} {_BARRIER_TIMEOUT}")


def choose_device(device: str | None) -> str:
    """`cpu` or `cuda`; None chooses a GPU if there is one. Raises UserError if CUDA is requested but not usable."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no usable CUDA device; leave the device out, or choose cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def join(*, device: str | None = None, timeout_s: float = TIMEOUT_S) -> World:
    """Join the job that torchrun's environment describes, or be a job of one process.

    device: as for `choose_device`; timeout_s: how long a rank waits for the others in a reduction.
    """
    global _group, _questions, _heartbeat, _timeout_s
    cuda = choose_device(device) == "cuda"
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device(f"cuda:{local_rank}") if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    if size > 1 and not dist.is_initialized():
        end_with_launcher()
        store, prefix = rendezvous_store(rank, size, timeout=_BARRIER_TIMEOUT)
        dist.init_process_group("gloo", timeout=_BARRIER_TIMEOUT, store=store, rank=rank, world_size=size)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _heartbeat = Heartbeat(host, port, prefix=prefix, rank=rank, size=size, timeout=_BARRIER_TIMEOUT)
        _timeout_s = timeout_s
        group = dist.new_group(backend="nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        _group = _questions = group
        if cuda:
            questions = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(questions, dist.ProcessGroup)
            _questions = questions
    return World(rank, size, where)


def leave() -> None:
    """Leave the job, so that the other ranks do not see a lost connection."""
    global _group, _questions, _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
        _heartbeat = None
    if dist.is_initialized():
        _group = _questions = None
        gc.collect()  # or objects that refer to the group outlive it, and gloo's threads abort the process as it exits
        dist.destroy_process_group()
        gc.collect()
