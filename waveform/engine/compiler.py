"""Whether torch.compile works on this machine: `train.compile=true` asks before training relies on it."""

from functools import cache

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.system.errors import UserError

_MAX_REASON = 200  # characters


def require_compiler(device: torch.device) -> None:
    """Raises UserError, with the reason, if torch.compile cannot compile for `device`: it compiles one operation.

    Within a mode that watches torch's operations nothing is compiled, so nothing is required.
    """
    reason = None if is_in_torch_dispatch_mode() else _refusal(device)
    if reason is not None:
        raise UserError(
            f"train.compile=true, but torch.compile does not work here ({reason}); install a C++ compiler such as g++ "
            "(on a GPU: Triton too), or leave it false"
        )


@cache
def _refusal(device: torch.device) -> str | None:
    """Torch's reason in a line; None if it compiles."""
    probe = torch.compile(lambda x: x.sin() + 1)
    try:
        probe(torch.ones(64, device=device))
    except Exception as error:  # whatever torch, a compiler or a linker raises
        lines = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        return lines[0].strip()[:_MAX_REASON] if lines else type(error).__name__
    return None
