"""Decides which files train, validate and test, by a hash of the path or by the user's folders: after the scan.

The hash (BLAKE2b of the path relative to the audio folder) gives each file, or each folder, a fixed position in 0..1,
so adding files moves no other file to another split. Whole files or folders are split, never windows.

Corpora whose figures are published were divided by others: by their own lists (waveform/audio/corpus/catalogue), or in
natural order. Adding a file there could move others, so a data set divided in order takes no new ones.
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from waveform.system.console import counted
from waveform.system.errors import UserError

SPLITS = ("train", "valid", "test")


@dataclass
class SplitConfig:
    """How files are divided, unless the audio folder contains train/ and test/ (and valid/), which are then used."""

    # "file": each file separately; "folder": all files of a top-level folder (a speaker, a book) stay together;
    # "order": the first files, in natural order of their paths (2 before 10), train, then come valid and test
    by: str = "file"
    # share of the files (or folders) held out for validation; with train/ and test/ but no valid/: of those in train/
    valid: float = 0.05
    # share of the files (or folders) held out for the final test
    test: float = 0.05


class Division(Protocol):
    """Which split each file of one audio folder belongs to."""

    def split_of(self, path: str) -> str | None:
        """Return the split of a file, by its relative path; None for a file that is left out."""

    def settings(self) -> dict[str, str | float]:
        """Return what tells one division from another, under the names of the settings if they have one."""

    def describe(self) -> str:
        """Return a phrase for the report."""


@dataclass(frozen=True)
class GivenDivision:
    """A division that names every file."""

    splits: Mapping[str, str]  # path -> split
    rule: Mapping[str, str | float]  # what `settings` returns
    said: str  # what `describe` returns
    remedy: str = "add files for each"  # advice where a split would be empty

    def split_of(self, path: str) -> str | None:
        return self.splits.get(path)

    def settings(self) -> dict[str, str | float]:
        return dict(self.rule)

    def describe(self) -> str:
        return self.said


def divide_in_order(paths: Iterable[str], config: SplitConfig) -> GivenDivision:
    """Divide files in the natural order of their paths: of n, the first int((1 - valid - test) n) train, and so on."""
    ordered = sorted(paths, key=_natural)
    # Rounded first, because 1 - 0.06 - 0.06 is a little less than 0.88.
    ends = [int(round(share * len(ordered), 6)) for share in (1 - config.valid - config.test, 1 - config.test)]
    splits = {path: SPLITS[(i >= ends[0]) + (i >= ends[1])] for i, path in enumerate(ordered)}
    return GivenDivision(
        splits,
        {"split.by": "order", "split.valid": config.valid, "split.test": config.test, "files": len(ordered)},
        f"in natural order: train, then valid {config.valid:g}, test {config.test:g}",
    )


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in paths by value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


@dataclass(frozen=True)
class SplitPlan:
    """The rule for one audio folder. Two plans that differ may put a file into different splits."""

    by: str
    valid: float
    test: float
    layout: str  # "": by hash; "train/test": by folder, valid taken from train by hash; "train/valid/test": by folder

    def split_of(self, path: str) -> str | None:
        """Return the split of a file, by its relative path; None for a file outside the layout's folders."""
        top = path.split("/", 1)[0] if "/" in path else ""
        if not self.layout:
            return self._by_position(self.position(path))
        if top not in self.layout.split("/"):
            return None
        if top == "train" and self.layout == "train/test":
            return self._by_position(self.position(path))
        return top

    def position(self, path: str) -> float:
        """Return the position in 0..1 of the file, or of its folder."""
        key = path
        if self.by == "folder":
            depth = 2 if self.layout else 1  # in a layout, the speakers are the folders inside train/
            folders = path.split("/")[:-1][:depth]
            key = "/".join(folders) if len(folders) == depth else path
        digest = hashlib.blake2b(os.fsencode(key), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def _by_position(self, position: float) -> str:
        if position < self.test:
            return "test"
        return "valid" if position < self.test + self.valid else "train"

    def settings(self) -> dict[str, str | float]:
        """Return the settings that matter for this layout, by the names that a user sets."""
        settings: dict[str, str | float] = {"layout": self.layout or "none"}
        if self.layout != "train/valid/test":
            settings |= {"split.by": self.by, "split.valid": self.valid}
        if not self.layout:
            settings["split.test"] = self.test
        return settings

    def describe(self) -> str:
        """Return a phrase for the report."""
        if self.layout == "train/valid/test":
            return "by the folders train/, valid/ and test/"
        if self.layout:
            return f"by the folders train/ and test/; valid is {self.valid:g} of train by hash of each {self.by}'s name"
        return f"by hash of each {self.by}'s name: valid {self.valid:g}, test {self.test:g}"


def plan_split(audio_dir: Path, config: SplitConfig) -> SplitPlan:
    """Check the settings and look for a train/valid/test layout. Raises UserError naming a bad setting."""
    if config.by not in ("file", "folder", "order"):
        raise UserError(f"data.split.by is {config.by!r}; use file, folder or order")
    for name, share in (("valid", config.valid), ("test", config.test)):
        if not 0 < share < 1:
            raise UserError(f"data.split.{name} is {share}; use a share above 0 and below 1, such as 0.05")
    if config.valid + config.test >= 1:
        total = config.valid + config.test
        raise UserError(f"data.split.valid + data.split.test is {total:g}; keep it below 1 so that train has files")
    layout = ""
    if (audio_dir / "train").is_dir() and (audio_dir / "test").is_dir():
        layout = "train/valid/test" if (audio_dir / "valid").is_dir() else "train/test"
    if layout and config.by == "order":
        raise UserError(f"data.split.by is order, but {audio_dir} is divided by its folders {layout}; leave it out")
    test = 0.0 if layout else config.test  # in a layout, no file is taken for the test set by its hash
    return SplitPlan(by=config.by, valid=config.valid, test=test, layout=layout)


def require_all_splits(plan: Division, paths: Collection[str]) -> None:
    """Raise UserError, with settings that would work for these files, if a split would hold none of `paths`."""
    present = {plan.split_of(path) for path in paths}
    empty = " and ".join(split for split in SPLITS if split not in present)
    if not empty:
        return
    if isinstance(plan, GivenDivision):
        raise UserError(f"{empty} would be empty, divided {plan.describe()}; {plan.remedy}")
    assert isinstance(plan, SplitPlan)
    folders = {path.split("/", 1)[0] for path in paths}
    bare = [f"{split}/" for split in plan.layout.split("/") if split and split not in folders]
    if bare:
        raise UserError(f"no usable audio in {' and '.join(bare)}; put some there")
    positions = sorted({plan.position(path) for path in paths if not plan.layout or path.startswith("train/")})
    num_splits = 2 if plan.layout else 3
    remedies = ["add files"]
    if len(positions) >= num_splits:
        remedies.append(f"set {_working_shares(plan, positions)} (enough for these)")
    elif plan.by == "folder":
        remedies.append("set data.split.by=file")
    folders_needed = (
        "put some files into valid/" if plan.layout else "sort the files into folders train/, valid/ and test/"
    )
    raise UserError(
        f"the corpus is too small: {counted(len(positions), plan.by)} to split, and {empty} would be empty; "
        f"{', '.join(remedies)}, or {folders_needed}"
    )


def _working_shares(plan: SplitPlan, positions: list[float]) -> str:
    """Settings near the present ones that leave no split empty, of at least three positions, or two in a layout."""

    def share_of(num: int) -> float:
        return (positions[num - 1] + positions[num]) / 2 if num else 0.0

    num_test = 0 if plan.layout else min(max(round(plan.test * len(positions)), 1), len(positions) - 2)
    num_held = min(max(round((plan.test + plan.valid) * len(positions)), num_test + 1), len(positions) - 1)
    test = share_of(num_test)
    valid = f"data.split.valid={share_of(num_held) - test:.4g}"
    return valid if plan.layout else f"{valid} data.split.test={test:.4g}"
