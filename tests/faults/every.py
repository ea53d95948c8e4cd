"""The list of every fault; one module makes one group of them."""

from tests.faults import (
    bad_loss,
    bad_loss_on_ranks,
    damaged_files,
    full_disk,
    hostile_audio,
    hostile_runs,
    hostile_text,
    killed_demo,
    killed_preparation,
    killed_sampling,
    killed_training,
    long_runs,
    lost_ranks,
    other_machine,
    overrides,
    preempted,
    two_runs,
    vanished_folders,
)
from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    *bad_loss.FAULTS,
    *bad_loss_on_ranks.FAULTS,
    *damaged_files.FAULTS,
    *full_disk.FAULTS,
    *hostile_audio.FAULTS,
    *hostile_runs.FAULTS,
    *hostile_text.FAULTS,
    *killed_demo.FAULTS,
    *killed_preparation.FAULTS,
    *killed_sampling.FAULTS,
    *killed_training.FAULTS,
    *long_runs.FAULTS,
    *lost_ranks.FAULTS,
    *other_machine.FAULTS,
    *overrides.FAULTS,
    *preempted.FAULTS,
    *two_runs.FAULTS,
    *vanished_folders.FAULTS,
]
