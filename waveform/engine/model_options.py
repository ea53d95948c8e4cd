"""What settings of training ask of a model beyond its forward: BPTT, activation checkpointing, compiled layers."""

from functools import cache

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.engine.interface import SequenceModel, optional_parts
from waveform.engine.train_config import TrainConfig
from waveform.system.errors import UserError

_MAX_REASON = 200  # characters


def apply_options(
    model: SequenceModel, config: TrainConfig, *, window: int, device: torch.device, sharded: bool
) -> None:
    """Switch on what `config` asks for. Raises UserError if `model` lacks it, or could not train with this config.

    window: tokens of one forward; sharded: whether each process has only a part of the weights.
    """
    name, parts = type(model).__name__, optional_parts(model)
    if config.unroll > 1 and parts is not model:
        raise UserError(
            f"train.unroll={config.unroll}: {name} passes no gradient from one window to the next (it lacks "
            "carry_gradient of OptionalParts); set train.unroll=1"
        )
    if min(config.unroll, config.chunk // window) < 2 and parts.trains_through_time:
        raise UserError(
            f"some parameters of {name} learn only from the losses of later windows (trains_through_time), but "
            f"with train.unroll={config.unroll} and train.chunk={config.chunk} gradients stay within a window; set "
            f"train.unroll=2 or more and train.chunk={2 * window} or more, or give them a loss of their own"
        )
    if config.checkpoint_activations:
        if parts.checkpoint_activations is None:
            raise UserError(
                f"train.checkpoint_activations: {name} has no layers that can be computed again; leave it false, "
                "or lower train.batch_size"
            )
        parts.checkpoint_activations = True
    if config.compile:
        if sharded:
            raise UserError(
                "train.compile=true cannot compile sharded weights; set train.sharding=none or leave it false"
            )
        if not parts.compile_layers(window):
            raise UserError(f"train.compile: {name} has no layers that can be compiled; leave it false")
        # In a mode that watches torch's operations, such as a FLOP counter, nothing is compiled.
        reason = None if is_in_torch_dispatch_mode() else why_no_compiler(device)
        if reason is not None:
            raise UserError(
                f"train.compile=true, but torch.compile does not work here ({reason}); install a C++ compiler such as "
                "g++ (on a GPU: Triton too), or leave it false"
            )


@cache
def why_no_compiler(device: torch.device) -> str | None:
    """Torch's reason, in a line, why torch.compile cannot compile one operation for `device`; None if it can."""
    probe = torch.compile(lambda x: x.sin() + 1)
    try:
        probe(torch.ones(64, device=device))
    except Exception as error:  # whatever torch, a compiler or a linker raises
        lines = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        return lines[0].strip()[:_MAX_REASON] if lines else type(error).__name__
    return None
