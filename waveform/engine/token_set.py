"""The utterances of one split of a data set, read from its shards: all that training and evaluation see of data."""

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from waveform.engine.shards import Shard, Utterance

_PIECE = re.compile(r"#\d{6,}$")  # what `piece_name` adds to the name of an utterance


def piece_name(name: str, index: int) -> str:
    """The name of piece `index` (from 0) of an utterance or of a file."""
    return f"{name}#{index:06d}"


class TokenSet:
    """The utterances of one split in the order of their names, whichever shards hold them."""

    def __init__(self, shards: Sequence[Shard], *, vocab_size: int, labels: Mapping[str, str] | None = None) -> None:
        """labels: those of utterances, or of the files that they are pieces of, by name; the others have none."""
        self.vocab_size = vocab_size
        self.counts = sum((shard.counts for shard in shards), np.zeros(vocab_size, dtype=np.int64))
        entries = [(utterance, shard) for shard in shards for utterance in shard.utterances if utterance.length]
        entries.sort(key=lambda entry: entry[0].name)
        self._entries = entries
        self.names = [utterance.name for utterance, _ in entries]
        self.lengths = [utterance.length for utterance, _ in entries]  # tokens
        given = labels or {}
        self.labels = [given.get(name, given.get(_PIECE.sub("", name))) for name in self.names]
        self.label_numbers = [0] * len(entries)  # labels as a model reads them; 0: unknown

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def token_range(self) -> tuple[int, int] | None:
        """The lowest and the highest token that occurs; None without tokens."""
        found = np.flatnonzero(self.counts).tolist()
        return (found[0], found[-1]) if found else None

    @property
    def checksum(self) -> str:
        """Hex digest of names and tokens, not of labels; two sets with the same digest give comparable NLL."""
        digest = hashlib.blake2b(digest_size=16)
        for utterance, _ in self._entries:
            entry = f"{utterance.name}\0{utterance.length}\0{utterance.digest}\n"
            digest.update(entry.encode(errors="surrogateescape"))  # a file name need not be valid UTF-8
        return digest.hexdigest()

    def cut(self, length: int) -> "TokenSet":
        """The same tokens, with utterances longer than `length` cut into pieces that are utterances themselves."""
        pieces = copy.copy(self)
        pieces._entries, pieces.labels, pieces.label_numbers = [], [], []
        for (whole, shard), label, number in zip(self._entries, self.labels, self.label_numbers, strict=True):
            for i, start in enumerate(range(0, whole.length, length)):
                name = whole.name if whole.length <= length else piece_name(whole.name, i)
                size, digest = min(length, whole.length - start), f"{whole.digest}+{start}"
                pieces._entries.append((Utterance(name, whole.start + start, size, digest), shard))
                pieces.labels.append(label)
                pieces.label_numbers.append(number)
        pieces.names = [piece.name for piece, _ in pieces._entries]
        pieces.lengths = [piece.length for piece, _ in pieces._entries]
        return pieces

    def numbered(self, names: Sequence[str]) -> "TokenSet":
        """The same tokens for a model that knows the labels `names`, numbered from 1 on; others are unknown to it."""
        numbers = {name: number for number, name in enumerate(names, start=1)}
        numbered = copy.copy(self)
        numbered.label_numbers = [0 if label is None else numbers.get(label, 0) for label in self.labels]
        return numbered

    def read(self, index: int, *, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop - 1 (clipped at the end) of utterance `index`. Raises UserError as `Shard.read` does."""
        utterance, shard = self._entries[index]
        return shard.read(start=utterance.start + start, stop=utterance.start + min(stop, utterance.length))
