"""Run folders: what a run was made with, and its trained model, opened.

config.yaml  metrics.jsonl  tensorboard/  checkpoints/step_N/
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from waveform.engine import checkpoint
from waveform.engine.distributed import choose_device
from waveform.engine.errors import UserError
from waveform.engine.interface import SequenceModel
from waveform.models.registry import build

CONFIG_FILE = "config.yaml"


def model_from(config: dict[str, Any]) -> SequenceModel:
    fields = {key: value for key, value in config["model"].items() if key != "name"}
    return build(config["model"]["name"], vocab_size=config["dataset"]["vocab_size"], **fields)


def window_of(config: dict[str, Any]) -> int:
    """Tokens of one forward: train.window, or the model's own window, or the chunk."""
    train = config["train"]
    return int(train["window"] or config["model"].get("window") or train["chunk"])


def num_parameters(model: SequenceModel) -> int:
    """Trainable numbers in a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run. Raises UserError where `run_dir` is no run or config.yaml is damaged."""
    path = run_dir / CONFIG_FILE
    if not run_dir.is_dir():
        raise UserError(f"no such run folder: {run_dir}; training with --run {run_dir} makes one")
    if not path.is_file():
        raise UserError(f"{run_dir} is no run (it has no {CONFIG_FILE}); give the folder that --run named in training")
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(config, dict):
            raise ValueError("it is not a mapping")
        for section, key in (("model", "name"), ("train", "chunk"), ("dataset", "vocab_size")):
            if key not in config[section]:
                raise ValueError(f"{section}.{key} is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}; restore it from a copy") from error
    except Exception as error:  # whatever a YAML parser raises
        raise UserError(f"{path} is no readable YAML: {' '.join(str(error).split())}") from error
    return {str(key): value for key, value in config.items()}


@dataclass
class TrainedRun:
    """A trained run, opened: its model in evaluation mode, and what it was trained with."""

    folder: Path
    config: dict[str, Any]
    model: SequenceModel
    step: int
    train_seconds: float
    tokens_seen: int

    @property
    def name(self) -> str:
        """The registered name of its model."""
        return str(self.config["model"]["name"])

    @property
    def window(self) -> int:
        """Tokens of one forward pass."""
        return window_of(self.config)

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device


def open_run(run_dir: Path | str, *, device: str | None = None, **model_fields: int) -> TrainedRun:
    """Open the newest checkpoint of a run.

    device: cpu, cuda, or None for a GPU where there is one. model_fields: fields that change no parameter, such as a
    longer `memory` or `compressed` than in training. Raises UserError where there is no run or no whole checkpoint.
    """
    run_dir = Path(run_dir)
    config = read_config(run_dir)
    device = choose_device(device)
    for field, value in model_fields.items():
        if field not in config["model"]:
            raise UserError(f"model {config['model']['name']!r} of {run_dir} has no {field!r} to set to {value}")
        config["model"][field] = value
    found = checkpoint.newest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} has no finished checkpoint yet; train longer, or wait for the first one")
    model = model_from(config)
    assert isinstance(model, nn.Module)
    weights = found.model_weights()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        raise UserError(f"the weights in {found.folder} do not fit {run_dir / CONFIG_FILE}; was it edited?")
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    return TrainedRun(
        folder=run_dir,
        config=config,
        model=model.to(device),
        step=found.step,
        train_seconds=float(found.progress["seconds"]),
        tokens_seen=int(found.progress["tokens_seen"]),
    )
