"""Decides which files train, validate and test, by a hash of the path or by the user's folders: after the scan.

The hash (BLAKE2b of the path relative to the audio folder) gives each file, or each folder, a fixed position in 0..1.
Those with the lowest positions test, the next validate, at least one each. If a file was held out only because a split
needs one, files added later can move it from test to valid, or from valid to train, but never the other way: nothing
that a model was trained on is scored later. Whole files or folders are split, never windows.

Corpora with published figures were divided by their authors: by lists (waveform/audio/corpus/catalogue), or in natural
order. In natural order, a new file could move others to another split, so such a data set takes no new files.
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from waveform.system.console import counted
from waveform.system.errors import UserError
from waveform.system.rules import Rule, check_rules, one_of

SPLITS = ("train", "valid", "test")
_SHARE = Rule(lambda value: 0 < value < 1, "it must be a share above 0 and below 1, such as 0.05")


@dataclass
class SplitConfig:
    """How files are divided, unless the audio folder contains train/ and test/ (and valid/), which are then used."""

    # "file": each file separately; "folder": all files of a top-level folder (a speaker, a book) stay together;
    # "order": the first files, in natural order of their paths (2 before 10), train, then come valid and test
    by: Annotated[str, one_of("file", "folder", "order")] = "file"
    # share of the files (or folders) held out for validation, at least one; with train/ and test/ but no valid/: of
    # those in train/
    valid: Annotated[float, _SHARE] = 0.05
    # share of the files (or folders) held out for the final test, at least one
    test: Annotated[float, _SHARE] = 0.05


@dataclass(frozen=True)
class Division:
    """Which split each file of one audio folder belongs to."""

    splits: Mapping[str, str]  # path -> split; a file that is not there is left out
    rule: Mapping[str, str | float]  # what identifies the division: settings by their names, and the rest
    said: str  # the description in the report
    layout: str = ""  # the folders that divide the files: train/test (valid is taken from train) or train/valid/test


def find_layout(audio_dir: Path, config: SplitConfig) -> str:
    """Check the settings and look for folders that divide the files. Raises UserError naming a bad setting."""
    check_rules(config, section="data.split")
    if (total := config.valid + config.test) >= 1:
        raise UserError(f"data.split.valid + data.split.test is {total:g}; keep it below 1 so that train has files")
    if not ((audio_dir / "train").is_dir() and (audio_dir / "test").is_dir()):
        return ""
    layout = "train/valid/test" if (audio_dir / "valid").is_dir() else "train/test"
    if config.by == "order":
        raise UserError(f"data.split.by is order, but {audio_dir} is divided by its folders {layout}; leave it out")
    return layout


def divide(paths: Iterable[str], config: SplitConfig, *, layout: str = "") -> Division:
    """Divide files in their natural order, by the folders of `layout`, or by hash."""
    if config.by == "order":
        return divide_in_order(paths, config)
    by_hash = f"by hash of each {config.by}'s name"
    rule: dict[str, str | float] = {"layout": layout or "none"}
    if layout != "train/valid/test":
        rule |= {"split.by": config.by, "split.valid": config.valid}
    if not layout:
        rule["split.test"] = config.test
        said = f"{by_hash}: valid {config.valid:g}, test {config.test:g}"
    elif layout == "train/test":
        said = f"by the folders train/ and test/; valid is {config.valid:g} of train {by_hash}"
    else:
        said = "by the folders train/, valid/ and test/"
    splits, keys = {}, {}
    depth = 2 if layout else 1  # in a layout, the speakers are the folders inside train/
    for path in paths:
        *folders, _ = path.split("/")
        if layout and (not folders or folders[0] not in layout.split("/")):
            continue
        if layout and (folders[0] == "test" or layout == "train/valid/test"):
            splits[path] = folders[0]
        else:
            keys[path] = "/".join(folders[:depth]) if config.by == "folder" and len(folders) >= depth else path
    # In a layout, no file is taken for the test set by its hash.
    splits |= divide_by_hash(keys, valid=config.valid, test=0 if layout else config.test)
    return Division(splits, rule, said, layout)


def position_of(key: str) -> float:
    """Return the position in 0..1 of a path, a folder or a speaker."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(key), digest_size=8).digest(), "big") / 2**64


def divide_by_hash(keys: Mapping[str, str], *, valid: float, test: float) -> dict[str, str]:
    """Return the split of each path by the position of its key: the path, a folder or a speaker.

    valid, test: shares; a share above 0 takes at least one key.
    """
    position = {key: position_of(key) for key in keys.values()}
    num_test = max(sum(each < test for each in position.values()), test > 0)
    num_held_out = max(sum(each < test + valid for each in position.values()), num_test + 1)
    rank = {key: index for index, key in enumerate(sorted(position, key=position.__getitem__))}
    return {path: SPLITS[2 - (rank[key] >= num_test) - (rank[key] >= num_held_out)] for path, key in keys.items()}


def divide_in_order(paths: Iterable[str], config: SplitConfig) -> Division:
    """Divide files in the natural order of their paths: of n, the first int((1 - valid - test) n) train, and so on.

    At least one validates, and one tests.
    """
    ordered = sorted(paths, key=_natural)
    # Rounded first, because 1 - 0.06 - 0.06 is a little less than 0.88.
    ends = [int(round(share * len(ordered), 6)) for share in (1 - config.valid - config.test, 1 - config.test)]
    ends = [min(end, len(ordered) - least) for end, least in zip(ends, (2, 1), strict=True)]
    return Division(
        {path: SPLITS[(i >= ends[0]) + (i >= ends[1])] for i, path in enumerate(ordered)},
        {"split.by": "order", "split.valid": config.valid, "split.test": config.test, "files": len(ordered)},
        f"in natural order: train, then valid {config.valid:g}, test {config.test:g}",
    )


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in paths by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def require_all_splits(division: Division, paths: Collection[str], *, refused: str = "") -> None:
    """Raise UserError if a split would hold none of `paths`. refused: its files that could not be read, and why."""
    present = {division.splits.get(path) for path in paths}
    empty = " and ".join(split for split in SPLITS if split not in present)
    if empty:
        cut = "; to cut a long recording into several: ffmpeg -i LONG -f segment -segment_time 30 PIECES/%04d.wav"
        raise UserError(
            f"{empty} would be empty: {counted(len(paths), 'file')}, divided {division.said}; add files, "
            f"or sort them into folders train/, valid/ and test/{cut if len(paths) < len(SPLITS) else ''}"
            f"{refused and f'; mend or remove the refused files: {refused}'}"
        )
