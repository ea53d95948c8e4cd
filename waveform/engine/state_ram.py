"""Whether the state of a model fits this machine's RAM."""

import torch

from waveform.engine.interface import SequenceModel, state_tensors
from waveform.system.errors import UserError
from waveform.system.ram import machine_bytes


def require_ram_for_state(model: SequenceModel, rows: int) -> None:
    """Raises UserError if the state of `rows` rows would not fit the RAM of this machine: sizes set too high."""
    try:
        state = model.init_state(rows, device=torch.device("meta"), dtype=torch.float32)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
    except RuntimeError as error:  # sizes beyond what torch can count
        raise UserError(f"the model's memories of {rows} rows are too large: {str(error).splitlines()[0]}") from error
    present = machine_bytes()
    if num_bytes > present:
        raise UserError(
            f"the model's memories of {rows} rows would take {num_bytes / 1e9:,.1f} GB, more than the "
            f"{present / 1e9:,.1f} GB of this machine; lower the batch size, model.window, model.memory or "
            "model.compressed"
        )
