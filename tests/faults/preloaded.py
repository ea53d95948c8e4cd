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
import recipes.cli
import recipes.verbs.train
import waveform.analyses.report
import waveform.audio.corpus.prepare
import waveform.audio.plots
import waveform.cli
import waveform.decoding.compiled
import waveform.verbs.compare
import waveform.verbs.sample
import waveform.verbs.train

torch.set_num_threads(1)
assert callable(librosa.feature.melspectrogram)  # librosa imports its parts when they are first named
