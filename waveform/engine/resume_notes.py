"""Lets a resumed run compute as if it had not been interrupted, and says if its results will differ."""

import torch

from waveform.engine.checkpoint import Checkpoint
from waveform.engine.learner import Learner
from waveform.engine.scored_window import uses_kernel_threads
from waveform.system import linear_layers
from waveform.system.linear_layers import LIBRARIES, PRODUCTS
from waveform.system.machine import cpu_name

_BEFORE = {"layers": "torch"}  # for checkpoints of versions that did not record it


def settle_library(learner: Learner, found: Checkpoint | None) -> None:
    """Let all ranks multiply by the library of `found` if its torch and processor are ours, or by the first one's."""
    world = learner.world
    if world.device.type != "cpu" or learner.config.autocast(world.device) is not None:
        return
    before, now = {} if found is None else found.conditions, conditions(learner)
    is_here = all(before.get(name) == now[name] for name in ("torch", "processor", "instructions"))
    number = 0
    if world.is_first:
        library = before.get(PRODUCTS) if is_here else None
        number = LIBRARIES.index(str(library) if library in LIBRARIES else linear_layers.fastest_library())
    linear_layers.taken = LIBRARIES[world.largest(number)[0]]


def conditions(learner: Learner) -> dict[str, str | int]:
    """What must be the same for law 7 (exact resume) to hold, besides the number of ranks."""
    config, world, device = learner.config, learner.world, learner.world.device
    autocast = config.autocast(device)
    in_kernels = uses_kernel_threads(learner.model, device=device, autocast=autocast)
    return {
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
        "precision": str(autocast or torch.float32).removeprefix("torch."),
        "layers": "compiled" if in_kernels else "torch",
        "sharding": config.sharding if world.size > 1 else "none",
        "compile": str(config.compile).lower(),
        PRODUCTS: linear_layers.taken or LIBRARIES[0],
    }


def notes(found: Checkpoint, now: dict[str, str | int]) -> list[str]:
    """One line for each of the `conditions` that has changed."""
    before = {**now, **_BEFORE, **found.conditions}  # an older checkpoint may not have all of them
    return [
        f"saved with {name}={before[name]}, resumed with {value}: results will no longer be bit-identical"
        for name, value in now.items()
        if before[name] != value
    ]
