"""How large the state of a model is: whether it fits this machine's RAM, and how many rows are fast side by side."""

import torch

from waveform.engine.interface import SequenceModel, state_tensors
from waveform.system.errors import UserError
from waveform.system.ram import machine_bytes, require_ram

# Tokens with which a call is fast: with fewer, it takes most of its time to start operations; with more, what they hand
# to each other no longer fits a CPU's cache.
_TOKENS_PER_CALL, _TOKENS_PER_GPU_CALL = 4096, 32768
_STATE_SHARE = 8  # the state gets an eighth of the memory: a call holds the old state, the new one, and much more


def row_bytes(model: SequenceModel) -> int:
    """Bytes of the state of one row in fp32. Raises UserError for sizes beyond what torch can count."""
    try:
        state = model.init_state(1, device=torch.device("meta"), dtype=torch.float32)
        return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))
    except RuntimeError as error:
        raise UserError(f"the model's memories are too large: {str(error).splitlines()[0]}") from error


def require_ram_for_state(model: SequenceModel, rows: int) -> None:
    """Raises UserError if the state of `rows` rows would not fit this machine's RAM."""
    require_ram(
        rows * row_bytes(model),
        what=f"the model's memories of {rows} rows",
        remedy="lower the batch size (--num of samples), model.window, model.memory or model.compressed",
    )


def fast_rows(model: SequenceModel, *, window: int, device: torch.device) -> int:
    """Rows with which calls of `window` tokens are fast: from sizes alone, so that figures are the same each time."""
    is_cuda = device.type == "cuda"
    present = torch.cuda.get_device_properties(device).total_memory if is_cuda else machine_bytes()
    fitting = present // (_STATE_SHARE * max(row_bytes(model), 1))
    return max(1, min((_TOKENS_PER_CALL if device.type == "cpu" else _TOKENS_PER_GPU_CALL) // window, fitting))
