"""Finds the audio files in a folder and its subfolders: the first step of preparing."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from waveform.audio.files import is_audio_name
from waveform.audio.refusal import RefusedFile, check_regular


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
    # A link to a folder above would pull in whatever is next to the corpus.
    above = audio_dir.resolve().parents
    visited = {_identity(folder) for folder in (skip, audio_dir, *above) if folder.is_dir()}
    folders = [""]
    links: list[str] = []  # to folders; followed after all real folders
    while folders or links:
        if folders:
            folder = folders.pop()
        else:
            folder = links.pop(0)
            if _identity(audio_dir / folder) in visited:
                continue
            visited.add(_identity(audio_dir / folder))
        try:
            with os.scandir(os.path.join(audio_dir, folder)) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            scan.refused[f"{folder}/"] = f"the folder cannot be read ({error.strerror})"
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                continue
            if not os.path.isdir(entry):  # which a loop of links is not
                _judge_file(scan, path, audio_dir)
            elif entry.is_symlink():
                links.append(path)
            elif _identity(entry) not in visited:
                visited.add(_identity(entry))
                folders.append(path)
    scan.files.sort()
    scan.refused = dict(sorted(scan.refused.items()))
    return scan


def _judge_file(scan: Scan, path: str, audio_dir: Path) -> None:
    if not is_audio_name(path):
        scan.other[os.path.splitext(path)[1].lower()] += 1
        return
    try:
        status = check_regular(os.path.join(audio_dir, path))
    except RefusedFile as refusal:
        scan.refused[path] = refusal.reason
    else:
        scan.files.append(FoundFile(path, status.st_size, status.st_mtime_ns))


def _identity(folder: Path | os.DirEntry[str]) -> tuple[int, int]:
    status = os.stat(folder)  # follows links; on some systems a DirEntry does not have these numbers
    return status.st_dev, status.st_ino
