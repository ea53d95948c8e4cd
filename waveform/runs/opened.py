"""A trained run, opened from its folder: the configuration, and the model with the weights of a checkpoint."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from waveform.engine import checkpoint
from waveform.engine.interface import SequenceModel
from waveform.engine.labels import UNKNOWN
from waveform.engine.state_ram import require_ram_for_state
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import choose_device
from waveform.runs.configured_model import labels_of, model_from, window_of
from waveform.runs.folder import CONFIG_FILE, Saved, check_recorded, read_config, with_defaults
from waveform.runs.named import find_run
from waveform.system.console import counted, printable
from waveform.system.errors import UserError

_MOST_NAMES = 20  # of labels in a message
_BY_SIZE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)  # with which modules make their weights
_SLACK_BYTES = 1 << 26  # allowed, beyond four times the bytes of its weights, while a model is made
_Used = TypeVar("_Used")
_Model = TypeVar("_Model")


@dataclass
class TrainedRun:
    """A trained run, opened: its model in evaluation mode, and what it was trained with."""

    folder: Path  # a temporary one if the run is an archive
    config: dict[str, Any]
    model: SequenceModel
    step: int
    train_seconds: float
    tokens_seen: int
    given: Path  # what the user named: a folder, an exported run, a bundled one or one on a hub
    unit: ClassVar[str] = "token"  # what users call its tokens

    @property
    def unit_s(self) -> float | None:
        """Duration of a token in seconds, if it has one."""
        return None

    @property
    def name(self) -> str:
        """The registered name of its model."""
        return str(self.config["model"]["name"])

    @property
    def origin(self) -> str | None:
        """The name of the run whose weights it began with, if any: its time and tokens count from there."""
        return printable(Path(self.config["origin"]["run"]).name) if "origin" in self.config else None

    @property
    def labels(self) -> list[str]:
        """Names of the labels of utterances that it knows; their numbers begin at 1."""
        return labels_of(self.config)

    def label_number(self, label: str | None) -> int:
        """The number that the model reads for a label; None: unknown. Raises UserError, which suggests similar ones."""
        if label is None:
            return UNKNOWN
        if not self.labels:
            raise UserError(f"{self.given} was trained without labels, so it has no '{printable(label)}'; leave it out")
        if label not in self.labels:
            near = difflib.get_close_matches(label, self.labels, n=_MOST_NAMES, cutoff=0.4)
            shown = ", ".join(near or self.labels[:_MOST_NAMES])
            raise UserError(f"{self.given} has no label '{printable(label)}'; of its {len(self.labels)}, try {shown}")
        return 1 + self.labels.index(label)

    def reading(self, tokens: TokenSet) -> TokenSet:
        """A token set as the model reads it: its labels numbered as in training."""
        return tokens.numbered(self.labels)

    @property
    def window(self) -> int:
        """Tokens of one forward pass."""
        return window_of(self.config)

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device


def open_run(run_dir: Path | str, *, device: str | None = None, **model_fields: int | None) -> TrainedRun:
    """Open the newest checkpoint of a run: a run folder, an exported run, a bundled run's name, or hf://owner/name.

    device: cpu, cuda, mps, or None for a CUDA GPU if there is one. model_fields: fields that change no parameter, for
    example a longer `memory` or `compressed` than in training; None: as in training. Raises UserError if there is no
    run or no complete checkpoint.
    """
    device = choose_device(device)

    def load(saved: Saved) -> tuple[Saved, SequenceModel]:
        return saved, load_model(saved, partial(model_from, saved.config), lambda model: model, **model_fields)

    saved, model = use_saved(run_dir, load, **model_fields)
    assert isinstance(model, nn.Module)
    model.eval().requires_grad_(False)
    return TrainedRun(
        folder=saved.folder,
        config={**saved.config, "train": with_defaults(saved.config)["train"]},
        model=model.to(device),
        step=saved.checkpoint.step,
        train_seconds=saved.checkpoint.progress.seconds,
        tokens_seen=saved.checkpoint.progress.tokens_seen,
        given=Path(run_dir),
    )


def find_saved(run_dir: Path | str, **model_fields: int | None) -> Saved:
    """Find what a run has saved; arguments and errors as for `open_run`."""
    folder = find_run(run_dir)
    config = read_config(folder)
    found = checkpoint.newest(folder)
    if found is None:
        raise UserError(
            f"{run_dir} has no finished checkpoint yet; train longer, or wait for the first one (a trial that "
            "tune pruned gets none)"
        )
    check_recorded(folder, config, found)
    for field, value in model_fields.items():
        if value is None:
            continue
        if field not in config["model"]:
            raise UserError(f"model {config['model']['name']!r} of {run_dir} has no {field!r} to set to {value}")
        config["model"][field] = value
    return Saved(folder, config, found)


def use_saved(run_dir: Path | str, use: Callable[[Saved], _Used], **model_fields: int | None) -> _Used:
    """Call `use` with what a run has saved, which training may be replacing; arguments and errors as for `open_run`."""
    return checkpoint.read_while_training(find_run(run_dir), lambda: use(find_saved(run_dir, **model_fields)))


class _AtMost(TorchFunctionMode):
    """Raises `refusal` before tensors are made that have more than `num_bytes` in all."""

    def __init__(self, num_bytes: int, refusal: UserError) -> None:
        super().__init__()
        self._left, self._refusal = num_bytes, refusal

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _BY_SIZE and args:
            self._left -= 4 * math.prod(args if isinstance(args[0], int) else args[0])
            if self._left < 0:
                raise self._refusal
        return func(*args, **(kwargs or {}))


def load_model(
    saved: Saved, make: Callable[[], _Model], trunk: Callable[[_Model], SequenceModel], **set_by_user: int | None
) -> _Model:
    """Build a model with `make`, as the configuration describes it, and load the weights of the checkpoint.

    An untrusted configuration may ask for any size, so making the model may not take much more RAM than the weights,
    and its state must fit into RAM. (Making it on the device `meta` first would load torch.compile, which is a quarter
    of a command's start.) trunk: returns the part with the state; set_by_user: fields of the model that the user
    changes. Raises UserError if the weights do not fit.
    """
    path, found = saved.folder / CONFIG_FILE, saved.checkpoint
    weights = found.model_weights()
    given = " and ".join(f"{name} {value}" for name, value in set_by_user.items() if value is not None)
    misfit = UserError(
        f"the run was not trained with {given}, which has other parameters; give another size"
        if given
        else f"the weights in {found.folder} do not fit the model that it describes; was it edited?"
    )
    try:
        with _AtMost(_SLACK_BYTES + 4 * sum(tensor.nbytes for tensor in weights.values()), misfit):
            model = make()
        assert isinstance(model, nn.Module)
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}:
            raise misfit
        require_ram_for_state(trunk(model), 1)
        model.load_state_dict(weights)
    except UserError as error:
        raise UserError(str(error) if given else f"{path}: {error}") from error
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} does not describe a model ({' '.join(str(error).split())[:200]})") from error
    return model


def average_weights(run: TrainedRun, num_checkpoints: int) -> None:
    """Give the model of `run` the mean weights of its newest checkpoints, in place (Polyak and Juditsky 1992).

    AWD-LSTM (Merity et al. 2017), which Transformer-XL follows on Penn Treebank, averages every step from some step on;
    here it is every `train.checkpoint_every` steps. Raises UserError if the run keeps fewer checkpoints.
    """

    def mean_weights() -> dict[str, Tensor]:
        found = checkpoint.newest_complete(run.folder, at_most=num_checkpoints)
        if len(found) < num_checkpoints:
            raise UserError(
                f"--average {num_checkpoints}: {run.folder} has {counted(len(found), 'complete checkpoint')}; train "
                f"with train.keep_checkpoints={num_checkpoints}, or average fewer"
            )
        mean = {name: weight.double() / num_checkpoints for name, weight in found[0].model_weights().items()}
        for other in found[1:]:
            for name, weight in other.model_weights().items():
                mean[name] += weight.double() / num_checkpoints
        return mean

    assert isinstance(run.model, nn.Module)
    run.model.load_state_dict(checkpoint.read_while_training(run.folder, mean_weights))
