"""What the fork server imports, once for all cases; it computes nothing.

Torch and numba import some of it at its first use only, in every process anew: torch.compile with the first optimiser
(two seconds), the compiler's tables of functions with the first kernel (one).
"""

# ruff: noqa: F401
import librosa.core.convert
import matplotlib.figure
import soundfile
import torch._dynamo
import torch.nn.attention.bias
import torch.utils.tensorboard
from numba.core.registry import cpu_target

import baselines.lstm
import baselines.transformer_xl
import baselines.wavenet_cached
import recipes.text
import waveform.kernels.decoder
import waveform.verbs.compare
import waveform.verbs.demo

cpu_target.target_context.refresh()
