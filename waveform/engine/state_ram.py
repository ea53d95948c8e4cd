"""How large the state of a model is, and whether it fits this machine's RAM."""

import torch

from waveform.engine.interface import SequenceModel, state_tensors
from waveform.system.errors import UserError
from waveform.system.ram import require_ram


def row_bytes(model: SequenceModel) -> int:
    """Bytes of the state of one row in fp32. Raises UserError for sizes beyond what torch can count."""
    try:
        state = model.init_state(1, device=torch.device("meta"), dtype=torch.float32)
        return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
    except RuntimeError as error:
        raise UserError(f"the model's memories are too large: {str(error).splitlines()[0]}") from error


def require_ram_for_state(model: SequenceModel, rows: int) -> None:
    """Raises UserError if the state of `rows` rows would not fit the RAM that there is: sizes set too high."""
    require_ram(
        rows * row_bytes(model),
        what=f"the model's memories of {rows} rows",
        remedy="lower the batch size, model.window, model.memory or model.compressed",
    )
