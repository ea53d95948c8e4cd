"""A run as one file, to hand a trained model to someone: a zip archive of what sampling and scoring need.

    config.yaml  metrics.jsonl  checkpoints/step_N/  data/ (the vocabulary of a text)

To open it, it is unpacked into a run folder, which is checked like any other. Unpacking trusts nothing: it makes only
files with these names, of a single checkpoint, and large files are not compressed, so that together the files take at
most 64 MiB more than the archive. All of that is checked before anything is written.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from waveform.engine import checkpoint
from waveform.engine.metrics import METRICS_FILE, read_metrics
from waveform.runs.folder import CONFIG_FILE, OWN_DATA_DIR, Saved
from waveform.runs.settings import to_yaml
from waveform.system.atomic import explain_write_errors, require_writable, sync
from waveform.system.errors import UserError

_MAX_FILES = 1 << 12  # enough for a run that 4,000 processes trained
_MAX_DEFLATED_BYTES = 1 << 26  # of all files that are compressed, together
_FILE = re.compile(
    r"config\.yaml|metrics\.jsonl|data/(dataset|tokenizer)\.json|checkpoints/(?P<step>step_[0-9]{1,17})/"
    r"((progress|complete)\.json|(model|optimiser|rank_[0-9]{1,5})\.safetensors)"
)
_TIME = (1980, 1, 1, 0, 0, 0)  # of every file, so that the same run gives the same archive


def write_archive(saved: Saved, file: Path, *, optimiser: bool = False, data_files: Iterable[Path] = ()) -> None:
    """Write a run to `file`; arguments and errors as for `staged`."""
    with staged(saved, file, optimiser=optimiser, data_files=data_files) as run:
        archive = run.parent / "archive"
        _zip(run, archive)
        sync(archive)
        os.replace(archive, file)


@contextmanager
def staged(saved: Saved, target: Path, *, optimiser: bool = False, data_files: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield a folder with what others need of a run, alone in a temporary folder next to `target`.

    Its log ends at the checkpoint. optimiser: also what only training needs, so that it can be resumed. data_files:
    files of its data set to add. Raises UserError if `target` exists or cannot be written, or the optimiser is gone.
    """
    run_dir, config, found = saved
    if optimiser and found.progress.weights_only:
        raise UserError(f"{run_dir} was itself exported without its optimiser; leave out --optimiser")
    if target.exists():
        raise UserError(f"{target} exists; give a new name, or remove it")
    require_writable(target, option="the archive")
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as place:
            run = Path(place) / "run"
            (run / OWN_DATA_DIR).mkdir(parents=True)
            config["dataset"]["path"] = ""  # others need not know in which folders its data and its origin were
            if "origin" in config:
                config["origin"]["run"] = Path(config["origin"]["run"]).name
            (run / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
            if log := "".join(f"{json.dumps(each)}\n" for each in read_metrics(run_dir) if each["step"] <= found.step):
                (run / METRICS_FILE).write_text(log)
            checkpoint.copy(found, run, weights_only=not optimiser)
            for path in data_files:
                shutil.copyfile(path, run / OWN_DATA_DIR / path.name)
            yield run


def _zip(place: Path, file: Path) -> None:
    left = _MAX_DEFLATED_BYTES  # a file is compressed only if it takes at most an eighth of this, so it never runs out
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(path for path in place.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(place).as_posix(), _TIME)
            entry.external_attr = 0o644 << 16
            size = path.stat().st_size
            large = size > left // 8
            left -= 0 if large else size
            entry.compress_type = zipfile.ZIP_STORED if large else zipfile.ZIP_DEFLATED
            with open(path, "rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target)


def unpack(file: Path, folder: Path) -> None:
    """Unpack the archive `file` into the run folder `folder`. Raises UserError if `file` is not an archive of a run."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _check(entries, num_bytes=file.stat().st_size)
            for entry in entries:
                path = folder / entry.filename
                with explain_write_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "xb") as target, archive.open(entry) as source:
                        shutil.copyfileobj(source, target)  # `source` never gives more than the size that was checked
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:  # of `_check`, and whatever zipfile raises for damaged and hostile files
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} is not a run that `waveform export` made ({reason})") from error


def _check(entries: list[zipfile.ZipInfo], *, num_bytes: int) -> None:
    """Raises ValueError for entries that no run has, or that take too much room for an archive of `num_bytes`."""
    if len(entries) > _MAX_FILES:
        raise ValueError(f"it has {len(entries)} files")
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("two of its files have the same name")
    sizes, steps = {zipfile.ZIP_STORED: 0, zipfile.ZIP_DEFLATED: 0}, set()
    for entry in entries:
        shown, found = ascii(entry.filename[:100]), _FILE.fullmatch(entry.filename)
        if found is None:
            raise ValueError(f"a run has no file {shown}")
        if entry.compress_type not in sizes:
            raise ValueError(f"{shown} is compressed in another way")
        sizes[entry.compress_type] += entry.file_size
        steps.add(found["step"])
    if sizes[zipfile.ZIP_STORED] > num_bytes:
        raise ValueError("its files overlap")
    if sizes[zipfile.ZIP_DEFLATED] > _MAX_DEFLATED_BYTES:
        raise ValueError(f"it would grow by {sizes[zipfile.ZIP_DEFLATED]:,} bytes")
    if len(steps - {None}) > 1:
        raise ValueError("it has several checkpoints")
    if CONFIG_FILE not in names:
        raise ValueError(f"it has no {CONFIG_FILE}")
