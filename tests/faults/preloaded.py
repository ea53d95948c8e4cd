"""What a forked case finds imported already; nothing is computed here, so that forking is safe."""

# ruff: noqa: F401

import librosa
import matplotlib.figure
import soundfile
import torch
import torch.utils.tensorboard
from tensorboard.compat.proto import event_pb2

import baselines.transformer_xl
import baselines.wavenet_decoding
import recipes.__main__
import recipes.training
import waveform.analyses.report
import waveform.audio.corpus
import waveform.audio.plots
import waveform.cli
import waveform.comparison
import waveform.models.compiled_decoding
import waveform.sampling
import waveform.training

torch.set_num_threads(1)
assert callable(librosa.feature.melspectrogram)  # librosa imports its parts when they are first named
