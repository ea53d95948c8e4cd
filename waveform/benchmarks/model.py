"""Measures one model: trains and samples it on random tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from waveform.audio.audio_format import AudioFormat
from waveform.benchmarks.sampling import measure_sampling
from waveform.benchmarks.training import UPDATES_NEEDED, measure_training
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_learner import TokenLearner
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.runs.configured_model import model_from, num_parameters, window_of
from waveform.runs.settings import typed
from waveform.system.machine import resident_bytes

VOCAB_SIZE = 256
_STREAMS = {"cpu": (1, 4), "cuda": (1, 64)}  # sampled side by side


def measure_model(config: dict[str, Any], *, preset: str, scratch: Path) -> dict[str, Any]:
    """Train and sample one model on random tokens in `scratch`, an empty folder; return its figures.

    Call it in a fresh process: peak memory counts everything that the process ever held.
    """
    train_config: TrainConfig = typed(TrainConfig, config["train"], section="train")
    device = torch.device(train_config.device or "cpu")
    imports_bytes = 0 if device.type == "cuda" else resident_bytes()
    torch.manual_seed(config["seed"])
    window = window_of(config)
    length = UPDATES_NEEDED * train_config.chunk
    tokens = random_tokens(scratch, vocab_size=VOCAB_SIZE, num_rows=train_config.batch_size, length=length)
    model = model_from({**config, "dataset": {"vocab_size": VOCAB_SIZE, "modality": AudioFormat().modality()}})
    learner = TokenLearner(
        model, train_config, tokens=tokens, window=window, seed=config["seed"], world=World(device=device)
    )
    training = measure_training(learner)
    peak_bytes = training.pop("peak_bytes")
    learner.module.eval().requires_grad_(False)
    sampling = measure_sampling(
        model, learner.state, window=window, vocab_size=VOCAB_SIZE, stream_counts=_STREAMS[device.type]
    )
    autocast = train_config.autocast(device)
    return {
        "preset": preset,
        "sample_rate_hz": config["data"]["sample_rate_hz"],
        "model": config["model"]["name"],
        "num_parameters": num_parameters(model),
        "batch_size": train_config.batch_size,
        "window": window,
        "chunk": train_config.chunk,
        "precision": str(autocast or torch.float32).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "training": training,
        "training_memory": {
            "kind": "allocated on the GPU" if device.type == "cuda" else "resident",
            "peak_bytes": peak_bytes,
            "imports_bytes": imports_bytes,
            "peak_without_imports_bytes": peak_bytes - imports_bytes,
        },
        "sampling": sampling,
        "model_config": dict(config["model"]),
    }


def random_tokens(folder: Path, *, vocab_size: int, num_rows: int, length: int) -> TokenSet:
    """Write one utterance per row, so that no row's state is reset while it is read."""
    path, rng = folder / "random.shard", np.random.default_rng(0)
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        for row in range(num_rows):
            writer.write(str(row), [rng.integers(vocab_size, size=length, dtype=np.uint8)])
    return TokenSet([Shard(path)], vocab_size=vocab_size)
