"""The state of the random numbers, on the CPU and on a GPU: checkpoints keep it, trainings in turn swap it."""

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators that work on `device` draws from: `cpu`, and `cuda` for a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue from a state of `random_state`; that of a GPU is ignored on a CPU."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
