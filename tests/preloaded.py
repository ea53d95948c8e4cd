"""What the fork server imports and composes, once for all cases; it computes no tensors.

Torch and numba import some of it at its first use only, in every process anew: torch.compile with the first optimiser
(two seconds), the compiler's tables of functions with the first kernel (one). Hydra takes a tenth of a second for each
choice of groups. And each time that a case collects garbage, it would look at all of this (0.3 seconds): it is frozen.
"""

import gc
import importlib

from numba.core.registry import cpu_target

from recipes.reinforcement.settings import compose_config as compose_agent
from waveform.audio.resample import import_torchaudio
from waveform.speech import figures
from waveform.speech.config import compose_config as compose_speech

_NAMES = (
    *("librosa.core.convert", "matplotlib.figure", "soundfile", "tokenizers", "torch.utils.tensorboard"),
    *("torch._dynamo", "torch.nn.attention.bias"),
    *("baselines.lstm", "baselines.transformer_xl", "baselines.wavenet_cached"),
    *("recipes.cli", "waveform.cli", "waveform.kernels.decoder", "waveform.verbs.compare", "waveform.verbs.demo"),
    "tests.calling",
)
for _name in _NAMES:
    try:
        importlib.import_module(_name)
    except ImportError as error:  # which the server would ignore, and each case would import it anew
        raise RuntimeError(f"{_name} does not load") from error
import_torchaudio()
cpu_target.target_context.refresh()
figures._SPEED_SECONDS = 0.01  # as in tests/conftest.py, which the cases do not load
for _choices in ([], ["model=compressive_transformer"]):
    compose_speech(_choices)
compose_agent("object_matching", ["preset=smoke"])
gc.collect()
gc.freeze()
