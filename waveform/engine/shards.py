"""Token shards: files of utterances.

A shard is a 64-byte header, the tokens of all utterances back to back, and a JSON index:

    | magic 8 | payload bytes u64 | index bytes u64 | BLAKE2b-256 of the index | reserved 8 | tokens ... | index ... |

The index holds dtype, vocabulary size, a histogram of the tokens and, for each utterance, name, length and digest.
The header is written last and the file then renamed, so a shard that exists under its own name is whole.
Tokens are read, not memory-mapped: if a mapped file is cut short, a signal ends the process without a reason.

Later damage to a file is noticed when it is read: in the index on opening, and in an utterance's tokens before the
first of them is returned. That costs a second per gigabyte, spread over the first pass through the data, so opening a
corpus costs nothing.
"""

import hashlib
import json
import os
import struct
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch

from waveform.system.atomic import explain_write_errors, sync
from waveform.system.errors import Trouble, UserError

_MAGIC = b"WFSHARD1"
_HEADER = struct.Struct("<8sQQ32s8s")
_RESERVED = bytes(8)
_DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "int32": np.int32}
_VERIFY_BLOCK = 1 << 22  # tokens


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype of a shard that can hold tokens 0..vocab_size - 1."""
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


class _Index(msgspec.Struct):
    """The JSON at the end of a shard."""

    dtype: Literal["uint8", "uint16", "int32"]
    vocab_size: Annotated[int, msgspec.Meta(ge=0)]
    counts: list[int]  # of each token
    utterances: list[tuple[str, Annotated[int, msgspec.Meta(ge=0)], str]]  # name, length, digest


class ShardWriter:
    """Writes one shard. Use as a context manager: an exception leaves no file behind.

    `begin(name)` opens an utterance and `append(tokens)`, as often as needed, fills it; `discard()` takes back one that
    turns out bad. Raises UserError if the disk refuses.
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
        self._file.write(_HEADER.pack(_MAGIC, payload_bytes, len(index), digest, _RESERVED))
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
        own = tokens if tokens.flags.writeable else tokens.copy()  # torch accepts no read-only buffer
        return torch.bincount(torch.from_numpy(own), minlength=vocab_size).numpy()
    return np.bincount(tokens, minlength=vocab_size)


class Shard:
    """One shard, opened for reading. Raises UserError, naming the file, if it is missing, cut or damaged.

    The file is kept open, so it can be read to the end even if it is deleted or replaced; if it is written into, it is
    verified again and refused if its content differs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # opening a pipe would block
                what = "not a regular file" if path.exists() else "missing"
                raise UserError(f"{path} is {what}; prepare the data again")
            with open(path, "rb") as file:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                    raise UserError(f"{path} is not a token shard; prepare the data again")
                _, payload_bytes, index_bytes, digest, reserved = _HEADER.unpack(header)
                if os.fstat(file.fileno()).st_size != _HEADER.size + payload_bytes + index_bytes:
                    raise UserError(f"{path} is cut short or has grown; prepare the data again")
                file.seek(_HEADER.size + payload_bytes)
                raw_index = file.read(index_bytes)
                self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
                self._known = _size_and_time(self._file)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; prepare the data again") from error
        if reserved != _RESERVED or hashlib.blake2b(raw_index, digest_size=32).digest() != digest:
            raise UserError(f"{path} is damaged (the index's checksum differs); prepare the data again")
        self.digest = digest.hex()  # of the index, and so of everything that it holds digests of
        try:
            self._read_index(msgspec.convert(json.loads(raw_index), _Index), payload_bytes)
        except (ValueError, RecursionError, OverflowError) as error:
            raise UserError(f"{path} has an index that is not a shard's ({error}); prepare the data again") from error

    def _read_index(self, index: _Index, payload_bytes: int) -> None:
        """Adopt an index, which a checksum shows to be complete but not to come from `ShardWriter`."""
        self.vocab_size = index.vocab_size
        dtype = np.dtype(_DTYPES[index.dtype])
        self.counts = np.asarray(index.counts, dtype=np.int64)
        if len(self.counts) != self.vocab_size:
            raise ValueError(f"a vocabulary of {self.vocab_size}, but counts of {len(self.counts)} tokens")
        self.utterances: list[Utterance] = []
        start = 0
        for name, length, digest in index.utterances:
            self.utterances.append(Utterance(name, start, length, digest))
            start += length
        if start * dtype.itemsize != payload_bytes or self.counts.sum() != start:
            raise ValueError(f"{start} tokens of {dtype} in {payload_bytes} bytes")
        self._dtype = dtype
        self._starts = [utterance.start for utterance in self.utterances]
        self._verified = [False] * len(self.utterances)

    def verify(self) -> None:
        """Read every token and verify each utterance's digest. Raises UserError naming the file and the utterance."""
        for i in range(len(self.utterances)):
            self._verify(i)

    def read(self, *, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop - 1 of one utterance, [stop - start].

        The utterance's digest is verified when it is first read, and again if the file has changed. Raises UserError
        naming the file and the utterance.
        """
        while True:
            index = bisect_right(self._starts, start) - 1
            if not self._verified[index]:
                self._verify(index)
            tokens = self._read(start, stop)
            now = _size_and_time(self._file)  # after reading, so that what was read is what is verified
            if now == self._known:
                return tokens
            self._known, self._verified = now, [False] * len(self.utterances)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self._dtype.itemsize
        try:
            raw = os.pread(self._file, (stop - start) * size, _HEADER.size + start * size)
        except OSError as error:
            raise Trouble(f"cannot read {self.path}: {error.strerror}; check that its disk works") from error
        if len(raw) != (stop - start) * size:
            raise UserError(f"{self.path} was cut short while it was in use; prepare the data again")
        return np.frombuffer(raw, dtype=self._dtype)

    def _verify(self, index: int) -> None:
        utterance = self.utterances[index]
        digest = hashlib.blake2b(digest_size=16)
        stop = utterance.start + utterance.length
        in_range = True
        for begin in range(utterance.start, stop, _VERIFY_BLOCK):
            block = self._read(begin, min(begin + _VERIFY_BLOCK, stop))
            digest.update(block.data)
            if self.vocab_size <= np.iinfo(block.dtype).max:
                in_range = in_range and block.min() >= 0 and block.max() < self.vocab_size
        if digest.hexdigest() != utterance.digest or not in_range:
            what = "checksum" if in_range else "vocabulary"
            raise UserError(
                f"{self.path} is damaged (the {what} of {utterance.name!r} differs); prepare the data again"
            )
        self._verified[index] = True


def _size_and_time(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns
