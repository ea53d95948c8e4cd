"""A prepared data set: a folder of shards, and `dataset.json`, which names the shards of each split with digests."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from waveform.engine.shards import Shard
from waveform.engine.token_set import TokenSet
from waveform.system.atomic import write_file
from waveform.system.checked_json import verify_checksum, with_checksum
from waveform.system.errors import UserError

DATASET_FILE = "dataset.json"
_FORMAT = 2


@dataclass(frozen=True)
class Dataset:
    """The content of `dataset.json`."""

    folder: Path
    vocab_size: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    modality: dict[str, Any]  # how tokens were made: {"kind": "audio", "sample_rate_hz": 24000, ...}
    splits: dict[str, list[str]]  # split name -> shard files relative to the folder
    sources: dict[str, Any]  # what the program that prepared the data needs to update it
    digests: dict[str, str] = field(default_factory=dict)  # shard file -> `Shard.digest`
    labels: dict[str, str] = field(default_factory=dict)  # utterance -> its label, if it has one

    def open_split(self, split: str) -> TokenSet:
        """Open all shards of `split`. Raises UserError for an unknown or empty split, or a damaged shard."""
        if split not in self.splits:
            raise UserError(f"{self.folder} has no split {split!r}; it has {', '.join(self.splits)}")
        shards = []
        for name in self.splits[split]:
            shard = Shard(self.folder / name)
            if shard.vocab_size != self.vocab_size or self.digests.get(name, shard.digest) != shard.digest:
                raise UserError(
                    f"{shard.path} is not the shard that {self.folder / DATASET_FILE} names; prepare the data again"
                )
            shards.append(shard)
        tokens = TokenSet(shards, vocab_size=self.vocab_size, labels=self.labels)
        if not len(tokens):
            raise UserError(
                f"the {split} split of {self.folder} has no tokens; prepare the data again, with some in that split"
            )
        return tokens


def is_dataset(folder: Path) -> bool:
    """Whether `folder` is a prepared data set, even if it is damaged."""
    return (folder / DATASET_FILE).exists()


def write_dataset(dataset: Dataset) -> Dataset:
    """Write `dataset.json` in one step; the shards that it names must exist already. Returns it with digests.

    Raises UserError if a shard is damaged or the disk refuses.
    """
    names = [name for names in dataset.splits.values() for name in names]
    dataset = replace(dataset, digests={name: Shard(dataset.folder / name).digest for name in names})
    content = {"format": _FORMAT, **vars(dataset)}
    del content["folder"]
    if not dataset.labels:
        del content["labels"]
    write_file(dataset.folder / DATASET_FILE, json.dumps(with_checksum(content), indent=1, ensure_ascii=True).encode())
    return dataset


def read_dataset(folder: Path) -> Dataset:
    """Read `folder`/dataset.json. Raises UserError if it is missing, damaged, or names files elsewhere."""
    path = folder / DATASET_FILE
    again = f"remove the folder {folder} and prepare the data again"
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        content = json.loads(path.read_bytes())
        if isinstance(content, dict) and not {"format", "vocab_size"} & content.keys():
            raise UserError(f"{path} was not written by waveform; move it, or name another folder")
        if content["format"] != _FORMAT:
            raise UserError(f"{path} has format {content['format']!r}, not {_FORMAT}; {again}")
        verify_checksum(content)
        dataset = msgspec.convert({**content, "folder": folder}, Dataset)
        for path_within in [PurePosixPath(name) for names in dataset.splits.values() for name in names]:
            if path_within.is_absolute() or ".." in path_within.parts:
                raise ValueError(f"it names the file {str(path_within)!r}, which is not in its folder")
        return dataset
    except FileNotFoundError:
        lacks = f"{folder} is not a prepared data set (it has no {DATASET_FILE})"
        raise UserError(lacks if folder.exists() else f"no such folder: {folder}; give a prepared data set") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is damaged ({error}); {again}") from error
