"""How many utterances are scored side by side: as many as are fast, and fit."""

import torch

from waveform.engine.interface import SequenceModel
from waveform.engine.state_ram import row_bytes
from waveform.system.ram import machine_bytes

# Tokens of one call that make it fast: with fewer the time goes into starting operations, with more what they hand to
# each other no longer fits a CPU's cache.
_TOKENS_PER_CALL = {"cpu": 4096, "cuda": 32768}
_STATE_SHARE = 8  # one part in so many of the memory is for the state; a call holds the old one, the new one, and more


def fast_rows(model: SequenceModel, *, window: int, device: torch.device) -> int:
    """Rows for calls of `window` tokens, from sizes alone, so that a command gives the same figures each time."""
    is_cuda = device.type == "cuda"
    present = torch.cuda.get_device_properties(device).total_memory if is_cuda else machine_bytes()
    fitting = present // (_STATE_SHARE * max(row_bytes(model), 1))
    return max(1, min(_TOKENS_PER_CALL["cuda" if is_cuda else "cpu"] // window, fitting))
