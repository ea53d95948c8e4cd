"""What a training step launches on a GPU, and how long that takes: `python -m tests.simulated_gpu.launches`.

Counted on a simulated GPU at the shape of preset=speech_paper: a steady update in bf16, memories full, rows side by
side. An operation is about one kernel; views and allocations are none. The time of a launch is an assumption.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tests.engine.conftest import write_utterances
from tests.simulated_gpu.device import SimulatedGpu, simulated_gpu
from waveform.engine.token_learner import TokenLearner
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.runs.configured_model import model_from, window_of
from waveform.runs.settings import typed
from waveform.speech.config import compose_config

_LAUNCH_S = (5e-6, 10e-6)  # of an eager operation on the host, Python and autograd included
_LAYERS = 20
WINDOWS = 5  # of an update
_VOCAB_SIZE = 256


class Operations(NamedTuple):
    """What one update launches."""

    forward: int
    backward: int
    rest: int  # sums, clipping, Adam


def operations(num_layers: int, *, gpu: SimulatedGpu, folder: Path) -> Operations:
    """Count an update of the Compressive Transformer of `speech_paper` with so many layers."""
    config = compose_config(["preset=speech_paper", f"model.num_layers={num_layers}", "train.batch_size=1"])
    del config["train"]["sample_seconds"]
    train: TrainConfig = typed(TrainConfig, {**config["train"], "device": "cuda"}, section="train")
    utterances = [np.zeros(3 * train.chunk, dtype=np.uint8)]
    tokens = write_utterances(folder / f"{num_layers}.shard", utterances, vocab_size=_VOCAB_SIZE)
    model = model_from({**config, "dataset": {"vocab_size": _VOCAB_SIZE}})
    world = World(device=torch.device("cuda:0"))
    learner = TokenLearner(model, train, tokens=tokens, window=window_of(config), seed=0, world=world)
    learner.update()
    with torch.no_grad():  # memories are full after six windows
        tokens_BT = torch.zeros(1, train.chunk, dtype=torch.int64, device="cuda")
        learner.state = learner.model(tokens_BT, learner.state).state
    gpu.forget()
    learner.update()
    assert {(call.kernel, call.mask) for call in gpu.attention} == {("flash", None)}
    whole = gpu.operations.total()
    gpu.forget()
    learner.accumulate_gradients([learner.stream.next_chunk()])
    assert not gpu.waits
    gradients, backward = gpu.operations.total(), gpu.num_in_backward
    return Operations(gradients - backward, backward, whole - gradients)


def at_paper_shape() -> tuple[Operations, Operations]:
    """What each layer adds to an update, and the update of all layers: every layer adds the same."""
    with simulated_gpu() as gpu, tempfile.TemporaryDirectory() as folder:
        few, more = (operations(n, gpu=gpu, folder=Path(folder)) for n in (2, 3))
    layer = Operations(*(b - a for a, b in zip(few, more, strict=True)))
    return layer, Operations(*(a + (_LAYERS - 2) * each for a, each in zip(few, layer, strict=True)))


if __name__ == "__main__":
    layer, update = at_paper_shape()
    print(f"a layer adds {layer}, an update of {_LAYERS} layers launches {update}, {sum(update):,} operations:")
    print(" to ".join(f"{sum(update) * each * 1e3:.0f}" for each in _LAUNCH_S), "ms, on any number of GPUs")
