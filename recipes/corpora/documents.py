"""A document: one unbroken stream of text in a source, read as bytes, as text or as words.

    source (recipes.corpora.sources) -> documents of each split (layouts) -> tokens (tokenizers) -> shards

The character corpora, WikiText-103, Penn Treebank and each file of the One Billion Word benchmark are one document per
split, as in the papers, which carry memory through all of it; each book of PG-19 and each file of a folder is a
document. PG-19 was cleaned of the licence around books, and of some words (Rae et al. 2019, appendix C).
"""

import codecs
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from recipes.corpora.sources import Source
from waveform.system.errors import UserError

SPLITS = ("train", "valid", "test")
END_OF_LINE = "<eos>"
PLACEHOLDER = b"<DW>"  # as in the published PG-19
# Where a book of Project Gutenberg starts and ends.
_MARK = re.compile(rb"^\*\*\* ?(START|END) OF (?:THE|THIS) PROJECT GUTENBERG EBOOK[^\n]*\n?", re.M | re.I)
_LONGEST_WORD = 1 << 20  # characters; anything longer is not text, and would have to be held in RAM
# Learning merges takes time quadratic in the length of a word, so words are cut at this many characters.
_ENDLESS_WORD = re.compile(r"\S{4096}|\s{4096}")


@dataclass(frozen=True)
class Document:
    """Bytes start..stop - 1 of a file, read in blocks as often as needed."""

    name: str
    source: Source
    file: str
    start: int
    stop: int
    replaced: re.Pattern[bytes] | None = None  # by `PLACEHOLDER`, for which the document is held in RAM

    @classmethod
    def whole(cls, source: Source, file: str, name: str | None = None) -> "Document":
        """All of `file`, under its own name by default."""
        return cls(name or file, source, file, 0, source.sizes[file])

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes. Raises UserError if they cannot be read."""
        blocks = self.source.blocks(self.file, start=self.start, stop=self.stop)
        return iter([self.replaced.sub(PLACEHOLDER, b"".join(blocks))]) if self.replaced else blocks


Documents = dict[str, list[Document]]  # by split


def _decoded(document: Document, *, translate_newlines: bool) -> Iterator[str]:
    """Yield the text block by block. Raises UserError if it is not UTF-8."""
    utf8 = codecs.getincrementaldecoder("utf-8")("strict")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True) if translate_newlines else utf8
    try:
        for block in document.blocks():
            yield decoder.decode(block)
        yield decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{document.source.path}: {document.file} is not UTF-8 text ({error.reason}); convert it"
        ) from error


def read_words(document: Document) -> Iterator[list[str]]:
    """Yield lists of words, with <eos> for the end of each line. Raises UserError for an endless word."""
    rest, last = "", "\n"
    for block in _decoded(document, translate_newlines=True):
        text, last = rest + block, block[-1:] or last
        # What follows the last space may continue in the next block.
        rest = "" if not text or text[-1].isspace() else text.rsplit(None, 1)[-1]
        if len(rest) > _LONGEST_WORD:
            raise UserError(
                f"{document.source.path}: {document.file} contains a word of more than {_LONGEST_WORD:,} letters; "
                "it must be text with spaces between words"
            )
        if words := text[: len(text) - len(rest)].replace("\n", f" {END_OF_LINE} ").split():
            yield words
    # A last line without a newline is still a line.
    if last != "\n":
        yield [*rest.split(), END_OF_LINE]


def read_text(document: Document) -> Iterator[str]:
    """Yield the text in parts that begin with a space, so that subwords are the same as those of the undivided text.

    A word of more than 4,096 characters is cut into several parts.
    """
    rest = ""
    for block in _decoded(document, translate_newlines=False):
        text = rest + block
        # Cut before the last run of spaces, or inside a word that does not end.
        body = text.rstrip()
        words = body.rsplit(None, 1)
        cut = len(words[0]) if len(words) == 2 else 0
        if len(text) - cut > _LONGEST_WORD:
            cut = len(text)
        yield from _without_endless_words(text[:cut])
        rest = text[cut:]
    yield from _without_endless_words(rest)


def _without_endless_words(text: str) -> list[str]:
    ends = [match.end() for match in _ENDLESS_WORD.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)]) if start < end]


def without_licence(source: Source) -> Source:
    """Return .txt files cut to what lies between the lines that say where a book of Project Gutenberg starts and ends.

    One without these lines is kept as it is, and counted on stderr.
    """
    starts, stops, unmarked = {}, {}, []
    for file in source.texts:
        marks = {match[1].upper(): match for match in _MARK.finditer(b"".join(source.blocks(file)))}
        if marks.keys() == {b"START", b"END"} and marks[b"START"].end() < marks[b"END"].start():
            starts[file], stops[file] = marks[b"START"].end(), marks[b"END"].start()
        else:
            unmarked.append(file)
    if unmarked:
        print(
            f"note: {len(unmarked):,} files have no lines of Project Gutenberg around their text and are read as they "
            f"are, {unmarked[0]} for example",
            file=sys.stderr,
        )
    sizes = {file: stops.get(file, size) - starts.get(file, 0) for file, size in source.sizes.items()}
    return replace(source, sizes=sizes, starts=starts)


def without_words(documents: Documents, path: Path) -> Documents:
    """Return documents in which the words of the file `path`, one per line, are replaced, in upper or lower case.

    Raises UserError for a file that cannot be read or has no words.
    """
    try:
        words = path.read_bytes().split()
    except OSError as error:
        raise UserError(f"cannot read corpus.replaced_words={path}: {error.strerror}") from error
    if not words:
        raise UserError(f"corpus.replaced_words={path} has no words; write one per line, or leave it out")
    longest_first = sorted(map(re.escape, words), key=len, reverse=True)
    whole_words = re.compile(rb"(?<![\w\x80-\xff])(?:%b)(?![\w\x80-\xff])" % b"|".join(longest_first), re.IGNORECASE)
    return {
        split: [replace(document, replaced=whole_words) for document in found] for split, found in documents.items()
    }
