"""Token shards: memory-mapped files of utterances, and the data set (a folder of shards) that training reads.

A shard is a 64-byte header, the tokens of all utterances back to back, and a JSON index:

    | magic 8 | payload bytes u64 | index bytes u64 | BLAKE2b-256 of the index | reserved 8 | tokens ... | index ... |

The index holds dtype, vocabulary size, a histogram of the tokens and, for each utterance, name, length and digest.
The header is written last and the file then renamed, so a shard that exists under its own name is whole.
A data set is a folder with `dataset.json`, which names the shards of each split.
"""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from waveform.engine.atomic import explain_write_errors, sync, write_file
from waveform.engine.errors import UserError

DATASET_FILE = "dataset.json"
_DATASET_FORMAT = 1
_MAGIC = b"WFSHARD1"
_HEADER = struct.Struct("<8sQQ32s8x")
_DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "int32": np.int32}
_VERIFY_BLOCK = 1 << 22  # tokens


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype of a shard that holds tokens 0..vocab_size - 1."""
    return next(
        name for name, dtype in _DTYPES.items() if vocab_size <= 1 << np.dtype(dtype).itemsize * 8 - (name == "int32")
    )


@dataclass(frozen=True)
class Utterance:
    """Where one utterance lies in its shard."""

    name: str
    start: int  # tokens
    length: int  # tokens
    digest: str  # BLAKE2b-128 of its tokens, hex


class ShardWriter:
    """Writes one shard. Use as a context manager: leaving it by an exception leaves no file behind.

    `begin(name)`, then `append(tokens)` as often as needed, opens and fills an utterance; an utterance that turns out
    bad is taken back with `discard()`. Errors: UserError when the disk refuses.
    """

    def __init__(self, path: Path, *, vocab_size: int, dtype: str = "uint8") -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._vocab_size, self._dtype_name, self._dtype = vocab_size, dtype, np.dtype(_DTYPES[dtype])
        self._utterances: list[Utterance] = []
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._start = self._length = 0
        self._open_name: str | None = None

    def __enter__(self) -> "ShardWriter":
        with explain_write_errors(self.path):
            self._file = open(self._partial, "wb")
            self._file.write(bytes(_HEADER.size))
        return self

    def begin(self, name: str) -> None:
        """Start the next utterance."""
        self._finish_utterance()
        self._open_name, self._length = name, 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._utterance_counts = np.zeros(self._vocab_size, dtype=np.int64)

    def append(self, tokens: np.ndarray) -> None:
        """Add tokens [n], each in 0..vocab_size - 1, to the open utterance."""
        assert self._open_name is not None and tokens.ndim == 1
        tokens = np.ascontiguousarray(tokens, dtype=self._dtype)
        counts = _counts(tokens, vocab_size=self._vocab_size)
        assert len(counts) == self._vocab_size, "a token is outside the vocabulary"
        self._utterance_counts += counts
        self._hash.update(tokens.data)
        self._length += len(tokens)
        with explain_write_errors(self.path):
            self._file.write(tokens.data)

    def discard(self) -> None:
        """Forget the open utterance and what was written of it."""
        self._open_name = None
        with explain_write_errors(self.path):
            self._file.seek(_HEADER.size + self._start * self._dtype.itemsize)
            self._file.truncate()

    def _finish_utterance(self) -> None:
        if self._open_name is not None:
            self._utterances.append(Utterance(self._open_name, self._start, self._length, self._hash.hexdigest()))
            self._counts += self._utterance_counts
            self._start += self._length
            self._open_name = None

    def _finish_file(self) -> None:
        index = json.dumps(
            {
                "dtype": self._dtype_name,
                "vocab_size": self._vocab_size,
                "counts": self._counts.tolist(),
                "utterances": [[u.name, u.length, u.digest] for u in self._utterances],
            }
        ).encode()
        self._file.write(index)
        self._file.seek(0)
        payload_bytes = self._start * self._dtype.itemsize
        digest = hashlib.blake2b(index, digest_size=32).digest()
        self._file.write(_HEADER.pack(_MAGIC, payload_bytes, len(index), digest))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with explain_write_errors(self.path):
                if kind is None:
                    self._finish_utterance()
                    self._finish_file()
                self._file.close()
                if kind is None:
                    os.replace(self._partial, self.path)
                    sync(self.path.parent)
        finally:
            self._partial.unlink(missing_ok=True)


def _counts(tokens: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """How often each token occurs, [vocab_size or more] int64."""
    if tokens.dtype == np.uint8:  # numpy would widen them first, at three times the cost
        own = tokens if tokens.flags.writeable else tokens.copy()  # torch takes no bytes that it might not write
        return torch.bincount(torch.from_numpy(own), minlength=vocab_size).numpy()
    return np.bincount(tokens, minlength=vocab_size)


class Shard:
    """One shard, opened for reading. Raises UserError, naming the file, where it is missing, cut or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                    raise UserError(f"{path} is no token shard; prepare the data again")
                _, payload_bytes, index_bytes, digest = _HEADER.unpack(header)
                if os.fstat(file.fileno()).st_size != _HEADER.size + payload_bytes + index_bytes:
                    raise UserError(f"{path} is cut short or has grown; prepare the data again")
                file.seek(_HEADER.size + payload_bytes)
                raw_index = file.read(index_bytes)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; prepare the data again") from error
        if hashlib.blake2b(raw_index, digest_size=32).digest() != digest:
            raise UserError(f"{path} is damaged (the index's checksum differs); prepare the data again")
        index = json.loads(raw_index)
        self.vocab_size: int = index["vocab_size"]
        self.counts = np.asarray(index["counts"], dtype=np.int64)
        self.utterances: list[Utterance] = []
        start = 0
        for name, length, utterance_digest in index["utterances"]:
            self.utterances.append(Utterance(name, start, length, utterance_digest))
            start += length
        dtype = np.dtype(_DTYPES[index["dtype"]])
        assert start * dtype.itemsize == payload_bytes
        self.tokens: np.ndarray = (
            np.memmap(path, dtype=dtype, mode="r", offset=_HEADER.size, shape=(start,)) if start else np.empty(0, dtype)
        )

    def verify(self) -> None:
        """Read every token and compare each utterance's digest. Raises UserError naming the file and the utterance."""
        for utterance in self.utterances:
            digest = hashlib.blake2b(digest_size=16)
            stop = utterance.start + utterance.length
            for begin in range(utterance.start, stop, _VERIFY_BLOCK):
                digest.update(np.ascontiguousarray(self.tokens[begin : min(begin + _VERIFY_BLOCK, stop)]).data)
            if digest.hexdigest() != utterance.digest:
                raise UserError(
                    f"{self.path} is damaged (the checksum of {utterance.name!r} differs); prepare the data again"
                )


class TokenSet:
    """The utterances of one split, in the order of their names, whatever the shards that hold them."""

    def __init__(self, shards: Sequence[Shard], *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        for shard in shards:
            self.counts += shard.counts
        entries = [(utterance, shard) for shard in shards for utterance in shard.utterances if utterance.length]
        entries.sort(key=lambda entry: entry[0].name)
        self._entries = entries
        self.names = [utterance.name for utterance, _ in entries]
        self.lengths = [utterance.length for utterance, _ in entries]  # tokens

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def checksum(self) -> str:
        """Hex digest of names and tokens; two sets with the same digest give comparable NLL."""
        digest = hashlib.blake2b(digest_size=16)
        for utterance, _ in self._entries:
            entry = f"{utterance.name}\0{utterance.length}\0{utterance.digest}\n"
            digest.update(entry.encode(errors="surrogateescape"))  # a file's name need not be valid UTF-8
        return digest.hexdigest()

    def cut(self, length: int) -> "TokenSet":
        """The same tokens with utterances longer than `length` cut into pieces, each an utterance of its own."""
        pieces = TokenSet([], vocab_size=self.vocab_size)
        pieces.counts = self.counts
        for utterance, shard in self._entries:
            for i, start in enumerate(range(0, utterance.length, length)):
                piece = Utterance(
                    utterance.name if utterance.length <= length else f"{utterance.name}#{i:06d}",
                    utterance.start + start,
                    min(length, utterance.length - start),
                    f"{utterance.digest}+{start}",
                )
                pieces._entries.append((piece, shard))
        pieces.names = [piece.name for piece, _ in pieces._entries]
        pieces.lengths = [piece.length for piece, _ in pieces._entries]
        return pieces

    def verify(self) -> None:
        """Read every token and compare the digests. Raises UserError naming the shard and the utterance."""
        for shard in {id(shard): shard for _, shard in self._entries}.values():
            shard.verify()

    def read(self, index: int, *, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop - 1 (clipped at the end) of utterance `index`, as a view of the mapped file."""
        utterance, shard = self._entries[index]
        return shard.tokens[utterance.start + start : utterance.start + min(stop, utterance.length)]


@dataclass(frozen=True)
class Dataset:
    """What `dataset.json` says."""

    folder: Path
    vocab_size: int
    modality: dict[str, Any]  # how tokens were made: {"kind": "audio", "sample_rate_hz": 24000, ...}
    splits: dict[str, list[str]]  # split name -> shard files relative to the folder
    sources: dict[str, Any]  # whatever the preparing program needs to bring the data up to date

    def open_split(self, split: str) -> TokenSet:
        """Open all shards of `split`. Raises UserError for an unknown split or a damaged shard."""
        if split not in self.splits:
            raise UserError(f"{self.folder} has no split {split!r}; it has {', '.join(self.splits)}")
        shards = [Shard(self.folder / name) for name in self.splits[split]]
        return TokenSet(shards, vocab_size=self.vocab_size)


def is_dataset(folder: Path) -> bool:
    """Whether `folder` is a prepared data set."""
    return (folder / DATASET_FILE).is_file()


def write_dataset(dataset: Dataset) -> None:
    """Commit `dataset.json` in one step; shards that it names must be in place already."""
    content = {
        "format": _DATASET_FORMAT,
        "vocab_size": dataset.vocab_size,
        "modality": dataset.modality,
        "splits": dataset.splits,
        "sources": dataset.sources,
    }
    write_file(dataset.folder / DATASET_FILE, json.dumps(content, indent=1, ensure_ascii=True).encode())


def read_dataset(folder: Path) -> Dataset:
    """Read `folder`/dataset.json. Raises UserError where there is none or it is damaged."""
    path = folder / DATASET_FILE
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _DATASET_FORMAT:
            raise UserError(f"{path} has format {content['format']}, not {_DATASET_FORMAT}; prepare the data again")
        return Dataset(
            folder=folder,
            vocab_size=int(content["vocab_size"]),
            modality=dict(content["modality"]),
            splits={split: list(names) for split, names in content["splits"].items()},
            sources=dict(content["sources"]),
        )
    except FileNotFoundError:
        raise UserError(f"{folder} is no prepared data set (it has no {DATASET_FILE})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the data again") from error
