"""The list of every fault; one module makes one group of them."""

from tests.faults import bad_loss, full_disk, killed_training, preempted, two_runs
from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    *bad_loss.FAULTS,
    *full_disk.FAULTS,
    *killed_training.FAULTS,
    *preempted.FAULTS,
    *two_runs.FAULTS,
]
