"""What the fork server imports, once for all cases; it computes nothing.

Torch and numba import some of it at its first use only, in every process anew: torch.compile with the first optimiser
(two seconds), the compiler's tables of functions with the first kernel (one).
"""

import importlib

from numba.core.registry import cpu_target

_NAMES = (
    *("librosa.core.convert", "matplotlib.figure", "soundfile", "torch.utils.tensorboard"),
    *("torch._dynamo", "torch.nn.attention.bias"),
    *("baselines.lstm", "baselines.transformer_xl", "baselines.wavenet_cached"),
    *("recipes.text", "waveform.kernels.decoder", "waveform.verbs.compare", "waveform.verbs.demo"),
)
for _name in _NAMES:
    try:
        importlib.import_module(_name)
    except ImportError as error:  # which the server would ignore, and each case would import it anew
        raise RuntimeError(f"{_name} does not load") from error
cpu_target.target_context.refresh()
