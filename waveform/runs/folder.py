"""Run folders: what a run was made with, and its trained model, opened.

config.yaml  metrics.jsonl  tensorboard/  checkpoints/step_N/
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from waveform.engine import checkpoint
from waveform.engine.interface import SequenceModel
from waveform.engine.state_ram import require_ram_for_state
from waveform.engine.streams import MODES
from waveform.models.registry import build, model_class
from waveform.ranks.distributed import choose_device
from waveform.runs.settings import differing_keys
from waveform.system.errors import UserError
from waveform.system.ram import machine_bytes

CONFIG_FILE = "config.yaml"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_NESTED = 50  # brackets within each other
_MANY_PARAMETERS = 5000  # tensors, of some 300 layers; sketching them takes a second or two
# Settings that may differ when a run is resumed: when it ends (which also moves the end of a cosine without
# train.decay_steps), what it reports, and where things lie.
_MAY_DIFFER = {
    "train": ("max_steps", "max_seconds", "checkpoint_every", "keep_checkpoints", "log_every", "sample_seconds",
              "evaluate_every", "evaluate_tokens", "evaluate_batch_size", "device", "sharding",
              "checkpoint_activations", "timeout_s", "on_nonfinite", "max_skipped"),
    "data": ("num_workers",),
    "dataset": ("path",),
}  # fmt: skip


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


def sketch_model(config: dict[str, Any], *, num_copies: int) -> SequenceModel:
    """The model of `config` without memory for its weights, once this machine is known to have that for `num_copies`.

    Raises UserError, naming settings, where the model refuses them or its weights would be too large.
    """
    try:
        try:
            with _no_more_parameters_than(_MANY_PARAMETERS), torch.device("meta"):
                sketch = model_from(config)
        except _TooMany:
            _refuse_too_deep(config, num_copies=num_copies)
            with torch.device("meta"):
                sketch = model_from(config)
        num_bytes = num_copies * _num_bytes(sketch)
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond what torch can count
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the model cannot be made ({reason}); {_lower(config)}") from error
    if num_bytes > machine_bytes():
        raise _too_large(num_bytes, num_copies, _lower(config))
    return sketch


def _num_bytes(model: SequenceModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _refuse_too_deep(config: dict[str, Any], *, num_copies: int) -> None:
    """Raises UserError where one setting says how many equal parts there are, and that is too many.

    Millions of layers would take hours to sketch; a few tell what each takes.
    """
    for name, value in config["model"].items():
        if type(value) is not int or value <= 100:
            continue
        sizes = []
        with suppress(UserError, _TooMany), torch.device("meta"):  # UserError: another setting asks for more than few
            for few in (8, 16, 24):
                with _no_more_parameters_than(_MANY_PARAMETERS):
                    sizes.append(_num_bytes(model_from({**config, "model": {**config["model"], name: few}})))
            each = (sizes[1] - sizes[0]) // 8
            num_bytes = num_copies * (sizes[0] + (value - 8) * each)
            if sizes[2] - sizes[1] == sizes[1] - sizes[0] and num_bytes > machine_bytes():
                break
    else:
        return
    raise _too_large(num_bytes, num_copies, f"lower model.{name}={value}")


def _too_large(num_bytes: int, num_copies: int, remedy: str) -> UserError:
    what = "weights" if num_copies == 1 else "weights, their gradients and Adam's two moments"
    return UserError(
        f"the model's {what} would take {num_bytes / 1e9:,.1f} GB, more than the {machine_bytes() / 1e9:,.1f} GB of "
        f"this machine; {remedy}"
    )


def _lower(config: dict[str, Any]) -> str:
    """Advice that names the sizes set furthest above the model's own defaults."""
    default = {field.name: field.default for field in fields(model_class(config["model"]["name"]).Config)}
    sizes = {name: value for name, value in config["model"].items() if type(value) is int and value > 0}
    above = {
        name: value / known
        for name, value in sizes.items()
        if type(known := default.get(name)) is int and 0 < known < value
    }
    named = sorted(above, key=above.__getitem__, reverse=True)[:3] or list(sizes)
    return f"lower {' or '.join(f'model.{name}={sizes[name]}' for name in named)}"


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """What makes a run the one that it is: its configuration without what may differ when it is resumed."""
    return {
        section: {key: value for key, value in content.items() if key not in _MAY_DIFFER.get(section, ())}
        if isinstance(content, dict)
        else content
        for section, content in config.items()
    }


def check_recorded(run_dir: Path, config: dict[str, Any], found: checkpoint.Checkpoint) -> None:
    """Raises UserError where `config` is not what the checkpoint says that it was trained with."""
    recorded = found.progress.get("run")
    if recorded is None:  # of an older version
        return
    asked = comparable(config)
    different = differing_keys(recorded, asked) if isinstance(recorded, dict) else ["all of it"]
    if different:
        raise UserError(
            f"{run_dir / CONFIG_FILE} was changed, or the checkpoint in {found.folder} is of another run: "
            f"{'; '.join(different)}; restore the file from a copy"
        )


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run, its values as they stand. Raises UserError where `run_dir` is no run or the file is
    damaged."""
    path = run_dir / CONFIG_FILE
    if not run_dir.is_dir():
        raise UserError(f"no such run folder: {run_dir}; `train` makes one")
    if not path.is_file() or path.is_symlink():
        raise UserError(f"{run_dir} is no run (it has no {CONFIG_FILE}); give the folder that training wrote")
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ValueError("it is too long for a configuration")
        text = path.read_text(encoding="utf-8")
        # Parsing takes time that grows with length x depth, minutes for a few thousand brackets.
        if max(accumulate((c in "[{") - (c in "]}") for c in text), default=0) > _MOST_NESTED:
            raise ValueError("it is nested too deep for a configuration")
        # An alias is never written, and some nested ones would grow to more than fits in memory.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it has an alias")
        config = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        _check_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}; restore it from a copy") from error
    except Exception as error:  # whatever a YAML parser raises
        raise UserError(f"{path} is no readable YAML: {' '.join(str(error).split())}") from error
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def _check_config(config: Any) -> None:
    """Raises ValueError, KeyError or TypeError where something that commands rely on is missing or of another kind."""
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping")
    if not config:
        raise ValueError("it is empty")
    for section in ("model", "train", "dataset"):
        if not isinstance(config.get(section), dict):
            raise ValueError(f"it has no section {section!r}")

    def check(section: str, key: str, is_right: Callable[[Any], bool]) -> None:
        if key not in config[section]:
            raise ValueError(f"{section}.{key} is missing")
        if not is_right(config[section][key]):
            raise ValueError(f"{section}.{key} is {str(config[section][key])[:100]!r}")

    def count(value: Any) -> bool:
        return type(value) is int and 0 < value < 1 << 31

    def number(value: Any) -> bool:
        return type(value) in (int, float) and 0 <= value < math.inf

    check("model", "name", lambda value: isinstance(value, str))
    for key in ("chunk", "evaluate_batch_size"):
        check("train", key, count)
    for key in ("clip_norm", "aux_weight"):
        check("train", key, number)
    check("train", "window", lambda value: value is None or count(value))
    check("train", "state", lambda value: value in MODES)
    check("dataset", "vocab_size", count)
    check("dataset", "path", lambda value: isinstance(value, str) and "\0" not in value)
    for key in ("modality", "checksums"):
        check("dataset", key, lambda value: isinstance(value, dict))
    if "window" in config["model"] and not count(config["model"]["window"]):
        raise ValueError(f"model.window is {str(config['model']['window'])[:100]!r}")


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
    def unit(self) -> str:
        """What a user calls its tokens."""
        return "token"

    @property
    def unit_s(self) -> float | None:
        """Duration of a token in seconds, if it has one."""
        return None

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
    found = checkpoint.newest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} has no finished checkpoint yet; train longer, or wait for the first one")
    check_recorded(run_dir, config, found)
    for field, value in model_fields.items():
        if field not in config["model"]:
            raise UserError(f"model {config['model']['name']!r} of {run_dir} has no {field!r} to set to {value}")
        config["model"][field] = value
    model = _model_of(found, config, run_dir, set_by_user=bool(model_fields))
    assert isinstance(model, nn.Module)
    model.eval().requires_grad_(False)
    return TrainedRun(
        folder=run_dir,
        config=config,
        model=model.to(device),
        step=found.step,
        train_seconds=float(found.progress["seconds"]),
        tokens_seen=int(found.progress["tokens_seen"]),
    )


def _model_of(
    found: checkpoint.Checkpoint, config: dict[str, Any], run_dir: Path, *, set_by_user: bool
) -> SequenceModel:
    """The model that `config` describes, with the weights of a checkpoint.

    A configuration from an untrusted place may ask for any size, so memory is given only to what the weights fill and
    to a state that this machine can hold. Raises UserError where they do not fit.
    """
    path = run_dir / CONFIG_FILE
    weights = found.model_weights()
    try:
        try:
            with _no_more_parameters_than(2 * len(weights) + 16), torch.device("meta"):  # a shared one counts twice
                sketch = model_from(config)
        except _TooMany:
            raise UserError(
                f"it asks for more than the {len(weights)} parameters of the checkpoint; was it edited?"
            ) from None
        assert isinstance(sketch, nn.Module)
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in sketch.state_dict().items()}
        if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}:
            raise UserError(f"the weights in {found.folder} do not fit it; was it edited?")
        require_ram_for_state(sketch, 1)
        model = model_from(config)
        assert isinstance(model, nn.Module)
        model.load_state_dict(weights)
    except UserError as error:
        raise UserError(str(error) if set_by_user else f"{path}: {error}") from error
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} describes no model ({' '.join(str(error).split())[:200]})") from error
    return model


class _TooMany(Exception):
    """A model has more parameters than it was allowed."""


@contextmanager
def _no_more_parameters_than(most: int) -> Iterator[None]:
    """Raises _TooMany within as soon as modules have registered more than `most` parameters."""
    num_left = most

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise _TooMany

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
