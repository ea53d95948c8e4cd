"""How large the state of a model is, and whether it fits this machine's RAM."""

import torch

from waveform.engine.interface import SequenceModel, state_tensors
from waveform.system.errors import UserError
from waveform.system.ram import machine_bytes


def state_bytes(model: SequenceModel, *, rows: int) -> int:
    """Bytes of the state of `rows` rows in fp32. Raises UserError for sizes beyond what torch can count."""
    try:
        state = model.init_state(rows, device=torch.device("meta"), dtype=torch.float32)
        return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
    except RuntimeError as error:
        raise UserError(f"the model's memories of {rows} rows are too large: {str(error).splitlines()[0]}") from error


def require_ram_for_state(model: SequenceModel, rows: int) -> None:
    """Raises UserError if the state of `rows` rows would not fit the RAM that there is: sizes set too high."""
    num_bytes, present = state_bytes(model, rows=rows), machine_bytes()
    if num_bytes > present:
        raise UserError(
            f"the model's memories of {rows} rows would take {num_bytes / 1e9:,.1f} GB, more than the "
            f"{present / 1e9:,.1f} GB that this machine (or its container) has; lower the batch size, model.window, "
            "model.memory or model.compressed"
        )
