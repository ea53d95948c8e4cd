"""A run folder: the files in it, and which settings of its configuration must stay the same when it is resumed.

config.yaml  metrics.jsonl  tensorboard/  checkpoints/step_N/
"""

import copy
import functools
from dataclasses import MISSING, fields
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import yaml
from msgspec import UNSET, Meta, Struct, UnsetType
from omegaconf import OmegaConf

from waveform.engine import checkpoint
from waveform.engine.checkpoint import CHECKPOINTS_DIR, Checkpoint
from waveform.engine.labels import MAX_LABELS, is_label
from waveform.engine.metrics import METRICS_FILE
from waveform.engine.train_config import TrainConfig
from waveform.models.registry import DECIDED_BY_DATA, model_class
from waveform.runs.settings import differing_keys
from waveform.system.errors import UserError

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".train.lock"
OWN_DATA_DIR = "data"  # in an unpacked archive: its files of the data set
_MAX_CONFIG_BYTES = 1 << 20
_MAX_NESTING = 50  # depth of brackets
# Settings that may differ when a run is resumed: when it ends (which also moves the end of a cosine without
# train.decay_steps), what it reports, where its files are, and how the weights began. evaluate_batch_size is no
# longer a setting, but older runs have it.
_MAY_DIFFER = {
    "model": ("local_layers",),
    "train": ("max_steps", "max_seconds", "checkpoint_every", "keep_checkpoints", "log", "log_every", "sample_seconds",
              "evaluate_every", "evaluate_every_seconds", "evaluate_tokens", "evaluate_batch_size", "device",
              "sharding", "checkpoint_activations", "compile", "timeout_s", "on_nonfinite", "max_skipped"),
    "data": ("num_workers",),
    "dataset": ("path", "token_range"),  # the second follows from the data
    "origin": ("run",),  # its path; `weights` identifies it
}  # fmt: skip

_NO_LABELS = ("data", "labels", "none")  # counts as null: `dataset.labels` says which labels were read

_Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Class = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Number = Annotated[float, Meta(ge=0, le=1e300)]


class Saved(NamedTuple):
    """What a run has on disk: its configuration and its newest checkpoint."""

    folder: Path  # a temporary one if the run is an archive
    config: dict[str, Any]
    checkpoint: Checkpoint


class _Model(Struct):
    name: str
    window: _Count | None = None  # may be null for models of other packages


class _Train(Struct):
    chunk: _Count
    clip_norm: _Number
    aux_weight: _Number
    window: _Count | None = None  # agents have neither this nor `state`
    state: Literal["carry", "utterance", "chunk"] = "utterance"


class _Dataset(Struct):
    vocab_size: _Count
    path: Annotated[str, Meta(pattern=r"^[^\0]*$")]
    modality: dict[str, Any]
    checksums: dict[str, Any]
    labels: Annotated[list[str], Meta(max_length=MAX_LABELS)] | UnsetType = UNSET
    token_range: tuple[_Class, _Class] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.token_range is not UNSET and not self.token_range[0] <= self.token_range[1] < self.vocab_size:
            raise ValueError(f"the token range {list(self.token_range)} is not within 0 to {self.vocab_size - 1}")
        for name in () if self.labels is UNSET else self.labels:
            if not is_label(name):
                raise ValueError(f"{name[:100]!a} is not a label")


class _Origin(Struct):
    run: Annotated[str, Meta(pattern=r"^[^\0]*$")]
    step: Annotated[int, Meta(ge=0, lt=1 << 62)]
    weights: str  # digest of the file
    optimiser: bool


class _Recorded(Struct):
    """What commands rely on in a config.yaml, which anyone may have edited."""

    model: _Model
    train: _Train
    dataset: _Dataset
    origin: _Origin | UnsetType = UNSET


def check_run_dir(run_dir: Path) -> None:
    """Raises UserError if `run_dir` is a file, a folder of anything but a run, or has links that lead elsewhere."""
    for name in (CONFIG_FILE, LOCK_FILE, METRICS_FILE, CHECKPOINTS_DIR, "tensorboard", "wandb"):
        if (run_dir / name).is_symlink():  # a run from an untrusted place must not make training write elsewhere
            raise UserError(
                f"{run_dir / name} is a link, but training only writes inside its run folder; replace it by what it "
                "leads to, or link to the run folder as a whole"
            )
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; give a folder for the run")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / CONFIG_FILE).exists():
        unknown = [path.name for path in run_dir.iterdir() if not path.name.startswith(".")]  # as our lock does
        if unknown:
            raise UserError(f"{run_dir} is not a run but contains other files ({unknown[0]}, ...); give a new folder")


def refuse_other_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Raises UserError, naming the settings, if `run_dir` contains a run with a different configuration."""
    if not (run_dir / CONFIG_FILE).exists():
        return
    here = read_config(run_dir)
    if "dataset" not in config:  # the data is not open yet
        here.pop("dataset")
    different = _different(here, config)
    if not different:
        return
    if all(key.startswith(("dataset.checksums", "dataset.labels")) for key in different):
        raise UserError(
            f"the data has changed since the run in {run_dir} began, which had "
            f"{'labels' if 'labels' in here['dataset'] else 'no labels (data.labels=none)'}, so it cannot be resumed "
            "exactly; train on the data set that it began with, or give another RUN_DIR"
        )
    if (found := checkpoint.newest(run_dir)) is not None:
        check_recorded(run_dir, read_config(run_dir), found)
    causes = [key for key in different if not key.startswith("dataset.checksums")]  # they say only that data differs
    causes = [key for key in causes if key.startswith("preset (")] or causes  # it changes many others
    raise UserError(
        f"{run_dir} contains a run with a different configuration: {'; '.join(causes)}. Give another folder, or "
        f"resume it with the settings in {run_dir / CONFIG_FILE}"
    )


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Give defaults to fields of the model and of training that did not exist when the run began.

    With these defaults, the run is what it was.
    """
    if "learner" in config:  # an agent: earlier versions wrote this setting for other runs only
        config = {**config, "train": {"update_period": 1, **config["train"]}}
    known = {"model": model_class(config["model"]["name"]).Config, "train": TrainConfig}
    for section, kind in known.items():
        own = [field for field in fields(kind) if field.name not in DECIDED_BY_DATA]
        defaults = {field.name: field.default for field in own if field.default is not MISSING}
        defaults |= {field.name: field.default_factory() for field in own if field.default_factory is not MISSING}
        config = {**config, section: {**defaults, **config[section]}}
    return config


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, `with_defaults`, without what may differ when a run is resumed."""
    return {
        section: {
            key: None if (section, key, value) == _NO_LABELS else value
            for key, value in content.items()
            if key not in _MAY_DIFFER.get(section, ())
        }
        if isinstance(content, dict)
        else content
        for section, content in with_defaults(config).items()
    }


def _different(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the settings, with both values, that keep `new` from being `old` resumed.

    Settings of `data` that did not exist when the run began do not count: `dataset` says what its data is.
    """
    old, new = comparable(old), comparable(new)
    if isinstance(old.get("data"), dict) and isinstance(new.get("data"), dict):
        new["data"] = {name: value for name, value in new["data"].items() if name in old["data"]}
    return differing_keys(old, new)


def check_recorded(run_dir: Path, config: dict[str, Any], found: Checkpoint) -> None:
    """Raises UserError if `config` is not the one that the checkpoint was trained with."""
    recorded = found.progress.run
    if recorded is None:  # of an older version
        return
    known = isinstance(recorded, dict) and all(isinstance(recorded.get(key), dict) for key in ("model", "train"))
    known = known and "name" in recorded["model"]
    different = _different(recorded, config) if known else ["everything"]
    if different:
        raise UserError(
            f"{run_dir / CONFIG_FILE} has been changed, or the checkpoint in {found.folder} is from another run: "
            f"{'; '.join(different)}; restore the file from a copy"
        )


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run. Raises UserError if `run_dir` is not a run or the file is damaged."""
    path = run_dir / CONFIG_FILE
    if not path.is_file() or path.is_symlink():
        raise UserError(f"{run_dir} is not a run (it has no {CONFIG_FILE}); give the folder that training wrote")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("it is too long for a configuration")
        config = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        reason = " ".join(str(error).replace("`$.", "`").split())
        raise UserError(f"{path} is damaged: {reason}; restore it from a copy") from error
    except Exception as error:  # whatever a YAML parser raises
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not config["dataset"]["path"]:  # exported
        config["dataset"]["path"] = str(run_dir / OWN_DATA_DIR)
    return {str(key): value for key, value in config.items()}


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> dict[Any, Any]:
    """Parse a configuration. Raises the parser's errors, and ValueError for what training never writes."""
    # The time for parsing grows with length x depth: minutes for a few thousand brackets.
    if max(accumulate((c in "[{") - (c in "]}") for c in text), default=0) > _MAX_NESTING:
        raise ValueError("it is nested too deeply for a configuration")
    # Aliases are never written, and a few nested ones could expand to more than fits in RAM.
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise ValueError("it has an alias")
    config = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not config:
        raise ValueError("it is empty")
    msgspec.convert(config, _Recorded)
    assert isinstance(config, dict)
    # `${oc.env:NAME}` would read this machine's environment. Names of folders may have it: they are never resolved.
    if "${" in str([value for key, value in config.items() if key not in ("dataset", "origin")]):
        raise ValueError("it has an interpolation (${...}), which is never written")
    return config
