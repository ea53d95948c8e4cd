"""The model that a run's configuration describes, and whether this machine has the RAM for it."""

from typing import Any

import torch
from torch import nn

from waveform.engine.interface import SequenceModel
from waveform.engine.sound_classes import classes_of
from waveform.models.registry import build
from waveform.system.errors import UserError
from waveform.system.ram import require_ram


def model_from(config: dict[str, Any]) -> SequenceModel:
    """Build a new model with the fields of `config["model"]`, and with those that `config["dataset"]` decides."""
    fields = {key: value for key, value in config["model"].items() if key != "name"}
    if fields.get("prediction", "none") != "none":
        fields["classes"] = classes_of(config["dataset"].get("modality", {}))
    names = labels_of(config)
    if names:
        fields["num_labels"] = 1 + len(names)
    return build(config["model"]["name"], vocab_size=config["dataset"]["vocab_size"], **fields)


def labels_of(config: dict[str, Any]) -> list[str]:
    """Names of the labels that a run knows, numbered from 1 on; none for a run without labels."""
    return list(config["dataset"].get("labels", ()))


def window_of(config: dict[str, Any]) -> int:
    """Tokens of one forward pass: train.window, or else the model's own window, or else the chunk."""
    train = config["train"]
    return int(train.get("window") or config["model"].get("window") or train["chunk"])


def num_parameters(model: SequenceModel | nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def sketch_model(config: dict[str, Any], *, num_copies: int) -> SequenceModel:
    """Build the model of `config` without storage for its weights; check that there is RAM for `num_copies` of them.

    Raises UserError, naming settings, if the model refuses them or its weights would be too large.
    """
    try:
        with torch.device("meta"):
            sketch = model_from(config)
        num_bytes = num_copies * sum(each.numel() * each.element_size() for each in sketch.parameters())
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond what torch can count
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the model cannot be made ({reason}); {_lower(config)}") from error
    what = "weights" if num_copies == 1 else "weights, their gradients and Adam's two moments"
    require_ram(num_bytes, what=f"the model's {what}", remedy=_lower(config))
    return sketch


def _lower(config: dict[str, Any]) -> str:
    """Advise the user to lower the model's largest sizes."""
    sizes = {name: value for name, value in config["model"].items() if type(value) is int}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    return f"lower {' or '.join(f'model.{name}={sizes[name]}' for name in largest)}"
