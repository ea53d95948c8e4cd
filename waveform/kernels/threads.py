"""How the work of kernels is shared among threads: in parts, and in the phases of a decoder's step.

A step is a sequence of phases (a dense layer, attention, ...). Within a phase, threads work on disjoint parts; between
phases they wait for each other.
"""

import numba
import numpy as np
import torch

from waveform.kernels.compiling import kernel
from waveform.kernels.product import GROUP
from waveform.kernels.vectors import LANES

# Multiplications from which sharing a phase pays: waking the other threads takes 1 to 4 us, in which one thread does
# some 50,000 to 250,000, and a second thread saves half of a phase.
_WORTH_SHARING = 200_000


def num_threads_for(work: int, *, num_phases: int) -> int:
    """Threads for a step of `work` multiplications in `num_phases` phases."""
    _start_threads()
    if work < _WORTH_SHARING * num_phases:
        return 1
    return int(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def _start_threads() -> None:
    """Start numba's threads, unless they are running, and leave torch as many as it had.

    Both use OpenMP: when numba first runs or loads a parallel function, it gives torch as many threads as it has
    itself, and training that draws a sample would continue with another number, and so with different bits.
    """
    before = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(before)


def shared_out(work):
    """Make a kernel of all parts of `work(phase, part, num_parts, layer, at, p, kind)`, in `p.num_threads` threads.

    The kernel takes `(phase, layer, at, plan, kind)`. layer, at (a step or a slot): handed on; p: the plan's record;
    kind: a number whose type is that of the weights.
    """

    @kernel(parallel=True)
    def in_parallel(phase, layer, at, plan, kind):
        num_threads = plan[0].num_threads
        for part in numba.prange(num_threads):
            # numba counts in unsigned numbers here; for another type everything below would be compiled again.
            work(phase, np.int64(part), num_threads, layer, at, plan[0], kind)

    @kernel
    def run(phase, layer, at, plan, kind):
        if plan[0].num_threads > 1:
            in_parallel(phase, layer, at, plan, kind)
        else:
            work(phase, np.int64(0), np.int64(1), layer, at, plan[0], kind)

    return run


@kernel
def share(amount, part, num_parts):
    """The range of `amount` things that `part` works on."""
    return amount * part // num_parts, amount * (part + 1) // num_parts


@kernel
def share_vectors(num_outputs, part, num_parts):
    """The range of a dense layer's vectors of outputs that `part` works on, in whole groups."""
    num_vectors = num_outputs // LANES
    first, last = share(-(-num_vectors // GROUP), part, num_parts)
    return first * GROUP, min(last * GROUP, num_vectors)
