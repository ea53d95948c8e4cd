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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np

from waveform.system.atomic import explain_write_errors, sync
from waveform.system.errors import Trouble, UserError

_MAGIC = b"WFSHARD1"
_HEADER = struct.Struct("<8sQQ32s8s")
_RESERVED = bytes(8)
DType = Literal["uint8", "uint16", "int32"]
_VERIFY_BLOCK = 1 << 22  # tokens


@dataclass(frozen=True)
class Utterance:
    """Where one utterance lies in its shard."""

    name: str
    start: int  # tokens
    length: int  # tokens
    digest: str  # BLAKE2b-128 of its tokens, hex


class _Index(msgspec.Struct):
    """The JSON at the end of a shard."""

    dtype: DType
    vocab_size: Annotated[int, msgspec.Meta(ge=0)]
    counts: list[int]  # of each token
    utterances: list[tuple[str, Annotated[int, msgspec.Meta(ge=0)], str]]  # name, length, digest


class ShardWriter:
    """Writes one shard. Use as a context manager: an exception leaves no file behind.

    Raises UserError if the disk refuses.
    """

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        dtype = next(name for name in get_args(DType) if vocab_size - 1 <= np.iinfo(name).max)  # the smallest
        self._index = _Index(dtype, vocab_size, [], [])
        self._counts = np.zeros(vocab_size, dtype=np.int64)

    def __enter__(self) -> "ShardWriter":
        with explain_write_errors(self.path):
            self._file = open(self._partial, "wb")
            self._file.write(bytes(_HEADER.size))
        return self

    def write(self, name: str, blocks: Iterable[np.ndarray | Sequence[int]]) -> Utterance:
        """Write an utterance, whose blocks are tokens [n], each in 0..vocab_size - 1; returns where it lies.

        If `blocks` raise an exception, nothing is left of the utterance.
        """
        start, length, digest = self._file.tell(), 0, hashlib.blake2b(digest_size=16)
        counts = np.zeros_like(self._counts)
        try:
            for block in blocks:
                tokens = np.ascontiguousarray(block, dtype=self._index.dtype)
                counts_of_block = np.bincount(tokens, minlength=len(counts))
                assert len(counts_of_block) == len(counts), "a token is outside the vocabulary"
                counts += counts_of_block
                digest.update(tokens.data)
                length += len(tokens)
                with explain_write_errors(self.path):
                    self._file.write(tokens.data)
        except BaseException:
            with explain_write_errors(self.path):
                self._file.seek(start)
                self._file.truncate()
            raise
        written = Utterance(name, int(self._counts.sum()), length, digest.hexdigest())
        self._counts += counts
        self._index.utterances.append((name, length, written.digest))
        return written

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with explain_write_errors(self.path), self._file as file:
                if kind is not None:
                    return
                self._index.counts = self._counts.tolist()
                index = json.dumps(msgspec.to_builtins(self._index)).encode()
                payload_bytes = file.tell() - _HEADER.size
                file.write(index)
                file.seek(0)
                file.write(_HEADER.pack(_MAGIC, payload_bytes, len(index), _index_digest(index), _RESERVED))
                file.flush()
                os.fsync(file.fileno())
                os.replace(self._partial, self.path)
                sync(self.path.parent)
        finally:
            self._partial.unlink(missing_ok=True)


def _index_digest(index: bytes) -> bytes:
    return hashlib.blake2b(index, digest_size=32).digest()


class Shard:
    """One shard, opened for reading. Raises UserError, naming the file, if it is missing, cut or damaged.

    The file is kept open, so it can be read to the end even if it is deleted or replaced; if it is written into, it is
    verified again and refused if its content differs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # opening a pipe would block
                raise self._refusal("is not a regular file" if path.exists() else "is missing")
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; prepare the data again") from error
        weakref.finalize(self, os.close, self._file)
        self._known = self._size_and_time()
        header = self._read_bytes(0, _HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise self._refusal("is not a token shard")
        _, payload_bytes, index_bytes, digest, reserved = _HEADER.unpack(header)
        if self._known[0] != _HEADER.size + payload_bytes + index_bytes:
            raise self._refusal("is cut short or has grown")
        raw_index = self._read_bytes(_HEADER.size + payload_bytes, index_bytes)
        if reserved != _RESERVED or _index_digest(raw_index) != digest:
            raise self._refusal("is damaged (the index's checksum differs)")
        self.digest = digest.hex()  # of the index, and so of everything that it holds digests of
        try:  # a checksum shows that the index is complete, but not that it comes from `ShardWriter`
            index = msgspec.convert(json.loads(raw_index), _Index)
            self.counts = np.asarray(index.counts, dtype=np.int64)
        except (ValueError, RecursionError, OverflowError) as error:
            raise self._refusal(f"has an index that is not a shard's ({error})") from error
        self.vocab_size, self._dtype = index.vocab_size, np.dtype(index.dtype)
        starts = list(accumulate((length for _, length, _ in index.utterances), initial=0))
        sizes = (starts[-1] * self._dtype.itemsize, self.counts.sum(), len(self.counts))
        if sizes != (payload_bytes, starts[-1], self.vocab_size):
            raise self._refusal("has an index that is not a shard's (of another number of tokens)")
        entries = zip(index.utterances, starts[:-1], strict=True)
        self.utterances = [Utterance(name, start, length, digest) for (name, length, digest), start in entries]
        self._verified: set[int] = set()  # utterances

    def verify(self) -> None:
        """Read every token and verify each utterance's digest. Raises UserError naming the file and the utterance."""
        for i in range(len(self.utterances)):
            self._verify(i)

    def read(self, *, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop - 1 of one utterance, [stop - start].

        The utterance's digest is verified when it is first read, and again if the file has changed. Raises UserError
        naming the file and the utterance.
        """
        index = bisect_right(self.utterances, start, key=attrgetter("start")) - 1
        if index not in self._verified:
            self._verify(index)
        tokens = self._read(start, stop)
        now = self._size_and_time()  # after reading, so that what was read is what is verified
        if now == self._known:
            return tokens
        self._known, self._verified = now, set()
        return self.read(start=start, stop=stop)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self._dtype.itemsize
        raw = self._read_bytes(_HEADER.size + start * size, (stop - start) * size)
        if len(raw) != (stop - start) * size:
            raise self._refusal("was cut short while it was in use")
        return np.frombuffer(raw, dtype=self._dtype)

    def _verify(self, index: int) -> None:
        utterance, in_range = self.utterances[index], True
        digest, stop = hashlib.blake2b(digest_size=16), utterance.start + utterance.length
        for begin in range(utterance.start, stop, _VERIFY_BLOCK):
            block = self._read(begin, min(begin + _VERIFY_BLOCK, stop))
            digest.update(block.data)
            if self.vocab_size <= np.iinfo(block.dtype).max:
                in_range = in_range and block.min() >= 0 and block.max() < self.vocab_size
        if digest.hexdigest() != utterance.digest or not in_range:
            what = "checksum" if in_range else "vocabulary"
            raise self._refusal(f"is damaged (the {what} of {utterance.name!r} differs)")
        self._verified.add(index)

    def _read_bytes(self, start: int, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes, or fewer if the file ends before."""
        try:
            return os.pread(self._file, num_bytes, start)
        except OSError as error:
            raise Trouble(f"cannot read {self.path}: {error.strerror}; check that its disk works") from error

    def _size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _refusal(self, what: str) -> UserError:
        return UserError(f"{self.path} {what}; prepare the data again")
