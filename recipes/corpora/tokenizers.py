"""Text to tokens and back: bytes, 27 characters, a published model's symbols, words by frequency, or subwords.

Each kind reads a document in blocks and holds only a block and its vocabulary in RAM. A tokenizer is saved as JSON with
the data set, and loading it runs no code.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from recipes.corpora.documents import END_OF_LINE, Document, read_text, read_words
from waveform.system.atomic import write_file
from waveform.system.checked_json import verify_checksum, with_checksum
from waveform.system.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
UNKNOWN = "<unk>"
_ALPHABET = b" abcdefghijklmnopqrstuvwxyz"
# Of published corpora: tokens, punctuation that had no space before it or after it, and quotations.
_JOINED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), ("`` ", '"'), (" ''", '"'))
_BEFORE = re.compile(r" +([,.;:!?%)\]}]|n't\b|'(?:s|S|re|ve|ll|d|m)\b)")
_AFTER = re.compile(r"([(\[{$£€]) +")
_QUOTED = re.compile(r'(^|\s)" ?([^"\n]*?) ?"(?=\s|[,.;:!?)]|$)')


class TextTokenizer(ABC):
    """Turns documents into token ids 0..vocab_size - 1, and ids into text."""

    kind: str
    vocab_size: int

    @abstractmethod
    def encode(self, document: Document) -> Iterator[np.ndarray]:
        """Yield the token ids [n] of a document in parts. Raises UserError for anything but its kind of text."""

    @abstractmethod
    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the token ids [n] of a text to continue. Raises UserError for what the vocabulary cannot express."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return a dict for JSON, from which `TOKENIZERS` makes the same tokenizer again."""


class SymbolTokenizer(TextTokenizer):
    """A byte is a token: all bytes, text8's characters (a space and a to z), or the symbols of a published model.

    Ends of lines are left out if a published model does not know them: Dai et al. 2019's code reads enwik8 and text8
    line by line, so its vocabularies have none, and its figures are per character without them.
    """

    def __init__(self, kind: str, symbols: bytes) -> None:
        """kind: bytes, characters or symbols; symbols: in the order of their ids."""
        self.kind, self.symbols, self.vocab_size = kind, symbols, len(symbols)
        self._left_out = b"\n" if kind == "symbols" and b"\n" not in symbols else b""
        self._known, self._ids = symbols + self._left_out, bytes.maketrans(symbols, bytes(range(len(symbols))))

    @property
    def begin(self) -> int:
        """The id that stands for the beginning of a text: a space. Raises UserError if there is none."""
        if b" " not in self.symbols:
            raise UserError("the vocabulary has no space (32 or _), which stands for the beginning of a text; add it")
        return self.symbols.index(b" ")

    def encode(self, document: Document) -> Iterator[np.ndarray]:
        position = document.start
        for block in document.blocks():
            if wrong := block.translate(None, self._known)[:1]:
                remedy = "give that of a model of this corpus" if self.kind == "symbols" else "it has a to z and spaces"
                raise UserError(
                    f"{document.source.path}: byte {position + block.index(wrong):,} of {document.file} is {wrong!r}, "
                    f"which is not in the vocabulary; {remedy}"
                )
            position += len(block)
            yield np.frombuffer(block.translate(self._ids, self._left_out), dtype=np.uint8)

    def encode_prompt(self, text: str) -> np.ndarray:
        text = text.rstrip("\n") if self.kind == "characters" else text
        encoded = text.encode(errors="surrogateescape")
        if first := encoded.translate(None, self._known)[:1]:
            wrong = text[len(encoded[: encoded.index(first)].decode(errors="ignore"))]
            raise UserError(f"the prompt contains {wrong!r}, which this run does not know; leave it out")
        return np.frombuffer(encoded.translate(self._ids, self._left_out), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(self.symbols[i] for i in ids).decode(errors="replace")

    def content(self) -> dict[str, Any]:
        return {"symbols": list(self.symbols)}


class WordTokenizer(TextTokenizer):
    """Words between spaces, and <eos> at the end of each line; ids are ranks by frequency in the training split."""

    kind = "words"

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: in the order of their ids, the most frequent first, with <eos> and <unk> among them."""
        self._words = list(words)
        self._ids = {word: i for i, word in enumerate(self._words)}
        self.vocab_size = len(self._words)
        self._unknown = self._ids[UNKNOWN]

    @property
    def begin(self) -> int:
        """The id that stands for the beginning of a text: <eos>."""
        return self._ids[END_OF_LINE]

    @classmethod
    def train(cls, documents: Iterable[Document], *, min_count: int) -> tuple["WordTokenizer", int]:
        """Return a vocabulary of the words that occur at least `min_count` times, and the number of tokens read."""
        counts: Counter[str] = Counter()
        for document in documents:
            for words in read_words(document):
                counts.update(words)
        num_tokens = counts.total()
        rare = [word for word, count in counts.items() if count < min_count and word not in (UNKNOWN, END_OF_LINE)]
        counts[UNKNOWN] += sum(counts.pop(word) for word in rare)
        counts[END_OF_LINE] += 0
        return cls(sorted(counts, key=lambda word: (-counts[word], word))), num_tokens

    def encode(self, document: Document) -> Iterator[np.ndarray]:
        for words in read_words(document):
            yield self._encode(words)

    def _encode(self, words: Sequence[str]) -> np.ndarray:
        ids, unknown = self._ids, self._unknown
        return np.fromiter((ids.get(word, unknown) for word in words), dtype=np.int32, count=len(words))

    def encode_prompt(self, text: str) -> np.ndarray:
        return self._encode(text.replace("\n", f" {END_OF_LINE} ").split())

    def decode(self, ids: Sequence[int]) -> str:
        words = (self._words[i] for i in ids)
        text = " ".join("\n" if word == END_OF_LINE else word for word in words)
        return text.replace(" \n", "\n").replace("\n ", "\n")

    def content(self) -> dict[str, Any]:
        return {"words": self._words}


class SubwordTokenizer(TextTokenizer):
    """Byte-level byte-pair encoding by the `tokenizers` library: any text has an encoding, and it is lossless."""

    kind = "subwords"

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    @classmethod
    def train(cls, documents: Iterable[Document], *, vocab_size: int) -> "SubwordTokenizer":
        """Learn merges from `documents`, streamed, up to `vocab_size` subwords; a small text has fewer."""
        tokenizer = _without_merges()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator((text for document in documents for text in read_text(document)), trainer)
        return cls(tokenizer)

    def encode(self, document: Document) -> Iterator[np.ndarray]:
        for text in read_text(document):
            # This takes a third of the time of `encode`, which also records the position of each token in the text.
            (encoding,) = self._tokenizer.encode_batch_fast([text])
            yield np.array(encoding.ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that is not UTF-8
            wrong = text[error.start]
            raise UserError(f"the prompt contains {wrong!r}, which this run does not know; leave it out") from error
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def content(self) -> dict[str, Any]:
        return {"tokenizer": json.loads(self._tokenizer.to_str())}


def _without_merges() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _with_merges(saved: dict[str, Any]) -> tokenizers.Tokenizer:
    """Take over only the merges of a saved one: its other parts could pad a text, or replace a letter by a million."""
    own = json.loads(_without_merges().to_str()) | {"model": saved["model"]}
    return tokenizers.Tokenizer.from_str(json.dumps(own))


TOKENIZERS: dict[str, Callable[[dict[str, Any]], TextTokenizer]] = {  # kind -> what makes one from `content`
    "bytes": lambda content: SymbolTokenizer("bytes", bytes(range(256))),
    "characters": lambda content: SymbolTokenizer("characters", _ALPHABET),
    "symbols": lambda content: SymbolTokenizer("symbols", bytes(list(content["symbols"]))),
    "words": lambda content: WordTokenizer([str(word) for word in content["words"]]),
    "subwords": lambda content: SubwordTokenizer(_with_merges(content["tokenizer"])),
}


def save_tokenizer(tokenizer: TextTokenizer, folder: Path) -> None:
    """Write `folder`/tokenizer.json. Raises UserError if it cannot be written."""
    content = with_checksum({"kind": tokenizer.kind, **tokenizer.content()})
    write_file(folder / TOKENIZER_FILE, json.dumps(content, ensure_ascii=True).encode())


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read `folder`/tokenizer.json. Raises UserError if it is missing or damaged."""
    path = folder / TOKENIZER_FILE
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        content = json.loads(path.read_bytes())
        verify_checksum(content)
        return TOKENIZERS[content["kind"]](content)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; prepare the data again") from error
    except Exception as error:  # the library raises a bare Exception for a file that it cannot parse
        raise UserError(f"{path} is damaged ({error!r}); prepare the data again") from error


def detokenize(text: str) -> str:
    """Remove the spaces that published corpora put around punctuation, so that samples look as in print.

    Undoes what the corpora's own tokenizers did (WikiText-103's " @-@ ", Penn Treebank's " 's "), as far as that is
    known: of the quotation marks in a line, every other one is taken to close.
    """
    for token, written in _JOINED:
        text = text.replace(token, written)
    text = _QUOTED.sub(r'\1"\2"', text)
    text = _AFTER.sub(r"\1", _BEFORE.sub(r"\1", text))
    return "\n".join(line.strip() for line in text.split("\n"))
