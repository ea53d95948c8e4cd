"""A run in the layout of model hubs: a folder with a model card, and the weights in one safetensors file.

    README.md  config.json  model.safetensors  metrics.jsonl  learning-curve.png  sample-0.flac ...
    tokenizer.json  dataset.json (of text)

`config.json` has the settings, and the text of the checkpoint's two JSON files, so that its digests still hold.
Nothing that is read here can run code: JSON, safetensors and a log.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from jinja2 import Environment
from omegaconf.errors import OmegaConfBaseException

from waveform.engine.checkpoint import CHECKPOINTS_DIR
from waveform.engine.metrics import METRICS_FILE, read_metrics
from waveform.runs.archive import staged
from waveform.runs.folder import CONFIG_FILE, OWN_DATA_DIR, Saved, with_defaults
from waveform.runs.learning_curves import learning_curve, save_learning_curves
from waveform.runs.settings import to_yaml
from waveform.system.atomic import explain_write_errors
from waveform.system.console import say
from waveform.system.errors import UserError

HUB_CONFIG_FILE = "config.json"
_WEIGHTS = "model.safetensors"
_OF_DATA = ("dataset.json", "tokenizer.json")
_READ = (HUB_CONFIG_FILE, _WEIGHTS, METRICS_FILE, *_OF_DATA)  # from which a run is unpacked
_MAX_CONFIG_BYTES = 1 << 22
_NAME = re.compile(r"hf:/{1,2}(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")  # a Path has one slash
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _HubConfig(msgspec.Struct):
    """What `config.json` holds; hubs show the first two."""

    library_name: str
    model_type: str
    config: dict[str, Any]
    checkpoint: Annotated[str, msgspec.Meta(pattern=r"^step_[0-9]{1,17}$")]
    progress: str  # the text of the checkpoint's progress.json, and below of its complete.json
    complete: str


def write_hub(
    saved: Saved,
    folder: Path,
    about: Mapping[str, Any],
    *,
    data_files: Iterable[Path],
    examples: Callable[[], Mapping[str, bytes]],
    unit: str,
) -> None:
    """Write a run to the new folder `folder`; arguments and errors as for `staged`.

    about: what the card's template needs besides what is saved; examples: makes the files of samples, by name.
    """
    config = saved.config
    with staged(saved, folder, data_files=data_files) as run:
        hub, (step,) = run.parent / "hub", (run / CHECKPOINTS_DIR).iterdir()
        hub.mkdir()
        content = _HubConfig(
            library_name="waveform",
            model_type=config["model"]["name"],
            config=config,
            checkpoint=step.name,
            progress=(step / "progress.json").read_text(),
            complete=(step / "complete.json").read_text(),
        )
        (hub / HUB_CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        os.replace(step / _WEIGHTS, hub / _WEIGHTS)
        for path in (run / METRICS_FILE, *(run / OWN_DATA_DIR).iterdir()):
            if path.exists():
                os.replace(path, hub / path.name)
        curve = learning_curve(read_metrics(hub), with_defaults(config)["train"])
        if curve.nats:
            save_learning_curves(hub / "learning-curve.png", [(config["model"]["name"], curve)], unit=unit)
        for name, example in (made := examples()).items():
            (hub / name).write_bytes(example)
        template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(
            files("waveform.runs").joinpath("card.md.jinja").read_text(encoding="utf-8")
        )
        saved_too = {"config": config, "curve": curve, "progress": saved.checkpoint.progress, "unit": unit}
        card = template.render(**about, **saved_too, examples=list(made), json=json.dumps)
        (hub / "README.md").write_text(card, encoding="utf-8")
        os.replace(hub, folder)


def is_hub(folder: Path) -> bool:
    """Whether `folder` has the layout that `write_hub` gives it."""
    return (folder / HUB_CONFIG_FILE).is_file() and not (folder / CONFIG_FILE).exists()


def unpack_hub(source: Path, folder: Path, *, follow_links: bool = False) -> None:
    """Unpack a hub's folder `source` into the run folder `folder`. Raises UserError if `source` is not one.

    follow_links: for what the hub's own library downloaded, which is a folder of links into its cache.
    """
    path = source / HUB_CONFIG_FILE
    if links := [name for name in _READ if (source / name).is_symlink() and not follow_links]:
        raise UserError(f"{source / links[0]} is a link; replace it by what it leads to")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("it is too long for a configuration")
        content = msgspec.json.decode(path.read_bytes(), type=_HubConfig)
        if content.library_name != "waveform":
            raise ValueError(f"it is for the library {content.library_name[:40]!a}")
        settings = to_yaml(content.config)
    except (OSError, ValueError, RecursionError, OmegaConfBaseException) as error:  # msgspec's errors are ValueErrors
        raise UserError(f"{path} is not a configuration that `waveform export` wrote ({error})") from error
    step = folder / CHECKPOINTS_DIR / content.checkpoint
    with explain_write_errors(folder):
        step.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(settings, encoding="utf-8")
        (step / "progress.json").write_text(content.progress)
        (step / "complete.json").write_text(content.complete)
        places = {_WEIGHTS: step, METRICS_FILE: folder} | dict.fromkeys(_OF_DATA, folder / OWN_DATA_DIR)
        for name, place in places.items():
            if (source / name).is_file():
                place.mkdir(exist_ok=True)
                shutil.copyfile(source / name, place / name)


def is_hub_name(given: Path | str) -> bool:
    """Whether `given` names a run on a hub."""
    return str(given).startswith("hf:/")


def download(given: Path | str) -> Path:
    """Download the run `hf://owner/name@revision`, and return its folder in the hub's cache on this machine.

    Raises UserError if there is no such run, or if the hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f'{given} needs huggingface_hub: pip install "waveform[hub]"') from error
    found = _NAME.fullmatch(str(given))
    if found is None:
        raise UserError(f"{given} is not the name of a run on a hub; give hf://owner/name or hf://owner/name@revision")
    repo, revision = found["repo"], found["revision"]
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(_READ)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:  # a ValueError for a malformed name
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot download {given}: {reason}") from error
    if not is_hub(folder):
        raise UserError(f"{given} is not a run that `waveform export --format hub` wrote: it has no {HUB_CONFIG_FILE}")
    if revision is None or not _COMMIT.fullmatch(revision):
        say(f"{given} is at commit {folder.name}; hf://{repo}@{folder.name} will always mean this one")
    return folder
