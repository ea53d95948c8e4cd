"""Published corpora, described in corpora.yaml: which files of a folder are theirs, and how their authors divided them.

Used between the scan and the split of `prepare`. Nothing is downloaded: the user unpacks a corpus.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from waveform.audio.corpus.splits import Division, SplitConfig, divide_by_hash, divide_in_order
from waveform.system.errors import UserError


class PublishedFigure(NamedTuple):
    """The NLL that others published for a model, in bits per sample."""

    model: str
    parameters: float | None
    bits: float


class _Split(msgspec.Struct, forbid_unknown_fields=True):
    """How a corpus is divided: exactly one of these is given."""

    lists: dict[str, str] = {}  # split -> the file that lists its paths; all other paths are in train
    parts: dict[str, list[str]] = {}  # split -> its parts
    order: dict[str, float] = {}  # the shares of valid and test, which follow train in natural order


class Corpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published corpus; corpora.yaml explains the fields."""

    name: str
    title: str
    source: str
    archives: dict[str, str]
    example: str
    path: str
    split: _Split | Literal["hash"]
    data: dict[str, Any]
    files: dict[str, int] = {}
    labels: int | None = None
    published: dict[str, list[PublishedFigure]] = {}

    @property
    def settings(self) -> list[str]:
        """The settings of `data` that suit this corpus, as `key=value`."""
        return [f"data.{key}={value}" for key, value in self.data.items()]

    @property
    def has_labels(self) -> bool:
        """Whether its paths tell what is said, or who speaks."""
        return "label" in re.compile(self.path).groupindex

    def holds(self, path: str) -> bool:
        """Whether a file, by its path in the unpacked folder, is a recording of the corpus."""
        return re.fullmatch(self.path, path) is not None

    def label_of(self, path: str) -> str | None:
        """What a recording says, or who speaks, by its path; None if the path has no label."""
        match = re.fullmatch(self.path, path)
        return match.groupdict().get("label") if match else None

    def extent(self, paths: Iterable[str]) -> tuple[int, int]:
        """Count the recordings (or speakers) of the corpus among `paths`, and those that were published.

        A part without a single recording here is not counted as published, so it is not missed.
        """
        matches = [match for path in paths if (match := re.fullmatch(self.path, path))]
        if self.labels is not None:
            return len({match["label"] for match in matches}), self.labels
        parts = Counter(match.groupdict().get("part", "") for match in matches)
        return len(matches), sum(self.files.get(part, 0) for part in parts or self.files)

    def modality(self, usable: Iterable[str]) -> dict[str, Any]:
        """The entry `corpus` of dataset.json, if the recordings `usable` are in the data set."""
        here, published = self.extent(usable)
        return {"corpus": {"name": self.name, "here": here, "published": published}}

    def require(self, audio_dir: Path, paths: Sequence[str], *, partial: bool) -> None:
        """Raises UserError if no recording of the corpus is there, or if some are missing and `partial` is false."""
        here, published = self.extent(paths)
        if here == 0:
            raise UserError(
                f"{audio_dir} is not {self.title} as published: it has no file like {self.example}; give the folder "
                f"that {' or '.join(self.archives)} was unpacked into"
            )
        if here != published and not partial:
            unit = "recordings" if self.labels is None else "speakers"
            raise UserError(
                f"{audio_dir} has {here:,} {unit} of {self.title}, which has {published:,}; "
                "unpack all of it, or accept a part with --partial; its NLL cannot be compared with published figures"
            )

    def divide(self, audio_dir: Path, paths: Sequence[str], config: SplitConfig) -> Division:
        """Divide those `paths` that are recordings of the corpus as its authors did, or by hash if they did not.

        config: the shares of a division by hash. Raises UserError if a list is missing.
        """
        members = [path for path in paths if self.holds(path)]
        rule: dict[str, str | float] = {"corpus": self.name}
        if isinstance(self.split, str):
            shares = {"valid": config.valid, "test": config.test}
            splits = divide_by_hash({path: self.label_of(path) or path for path in members}, **shares)
            rule |= {"split.valid": config.valid, "split.test": config.test}
            thing = "file" if self.labels is None else "speaker"
            said = f"by hash of each {thing}: valid {config.valid:g}, test {config.test:g}"
            return Division(splits, rule, said)
        if self.split.order:
            ordered = divide_in_order(members, SplitConfig("order", **self.split.order))
            # Their number belongs to the rule: with fewer files, some would change splits.
            return Division(ordered.splits, {**rule, "files": len(members)}, "as published, in natural order")
        if self.split.parts:
            split_of = {part: split for split, parts in self.split.parts.items() for part in parts}
            splits = {path: split_of[path.split("/", 1)[0]] for path in members}
            said = ", ".join(f"{split} is {' or '.join(parts)}" for split, parts in self.split.parts.items())
            return Division(splits, rule, f"as published: {said}")
        splits = dict.fromkeys(members, "train")
        for split, name in self.split.lists.items():
            splits |= {path: split for path in _listed(audio_dir / name, self.title) if path in splits}
        return Division(splits, rule, f"as published, by {' and '.join(self.split.lists.values())}")


def _listed(path: Path, title: str) -> list[str]:
    """Read the paths, one on each line, in a file by which a corpus is divided."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}, which divides {title} ({error}); unpack it again") from error


@cache
def corpora() -> Mapping[str, Corpus]:
    """All corpora by name."""
    text = (resources.files("waveform.audio.corpus") / "corpora.yaml").read_text(encoding="utf-8")
    return {name: msgspec.convert({"name": name, **entry}, Corpus) for name, entry in yaml.safe_load(text).items()}


def find_corpus(name: str) -> Corpus:
    """Return the corpus called `name`. Raises UserError, which lists all names, if there is none."""
    if name not in corpora():
        raise UserError(f"--corpus {name} does not exist; choose one of {', '.join(corpora())}")
    return corpora()[name]
