"""Finds the audio files in a folder and its subfolders: the first step of preparing."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from waveform.audio.decoding_child import RefusedFile
from waveform.audio.files import AUDIO_SUFFIXES, check_regular


@dataclass(frozen=True, order=True)
class FoundFile:
    """An audio file as the scan saw it. Its size and time show whether it has changed since."""

    path: str  # relative to the audio folder, with "/"; bytes that are not UTF-8 are surrogate escapes
    size: int  # bytes
    mtime_ns: int


@dataclass
class Scan:
    """What an audio folder holds, in the order of the paths."""

    files: list[FoundFile] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # path -> reason, if the file system alone rules it out
    other: Counter[str] = field(default_factory=Counter)  # suffix -> number of files that are not audio


def scan_folder(audio_dir: Path, *, skip: Path) -> Scan:
    """Walk `audio_dir` in sorted order, following links; skip hidden names and the folder `skip` (the data set's own).

    Each folder is visited once, real paths before links, so that loops end and no recording is counted twice.
    """
    scan = Scan()

    def refuse(error: OSError) -> None:
        scan.refused[f"{os.path.relpath(error.filename, audio_dir)}/"] = f"the folder cannot be read ({error.strerror})"

    # A link to a folder above would pull in whatever is next to the corpus.
    visited = {_identity(folder) for folder in (skip, *audio_dir.resolve().parents) if folder.is_dir()}
    roots = [str(audio_dir)]  # and links to folders, which are followed after all real folders
    for root in roots:
        for folder, names, files in os.walk(root, onerror=refuse):
            if _identity(folder) in visited:
                names.clear()
                continue
            visited.add(_identity(folder))
            names[:] = sorted(name for name in names if not name.startswith("."))
            roots += [path for name in names if os.path.islink(path := os.path.join(folder, name))]
            prefix = "" if folder == roots[0] else f"{os.path.relpath(folder, audio_dir)}/"
            for name in files:  # includes links that form a loop
                if not name.startswith("."):
                    _judge_file(scan, prefix + name, audio_dir)
    scan.files.sort()
    scan.refused = dict(sorted(scan.refused.items()))
    return scan


def _judge_file(scan: Scan, path: str, audio_dir: Path) -> None:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in AUDIO_SUFFIXES:
        scan.other[suffix] += 1
        return
    try:
        status = check_regular(os.path.join(audio_dir, path))
    except RefusedFile as refusal:
        scan.refused[path] = refusal.reason
    else:
        scan.files.append(FoundFile(path, status.st_size, status.st_mtime_ns))


def _identity(folder: Path | str) -> tuple[int, int]:
    status = os.stat(folder)  # follows links
    return status.st_dev, status.st_ino
