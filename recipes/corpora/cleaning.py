"""What PG-19 was cleaned of (Rae et al. 2019, appendix C): the licence around books, and some words."""

import re
import sys
from dataclasses import replace
from pathlib import Path

from recipes.corpora.documents import Document, Documents
from waveform.system.errors import UserError

_MARK = re.compile(rb"^\*\*\* ?(START|END) OF (?:THE|THIS) PROJECT GUTENBERG EBOOK[^\n]*\n?", re.M | re.I)


def without_licence(documents: Documents) -> Documents:
    """Return documents cut to what lies between the lines that say where a book of Project Gutenberg starts and ends.

    One without these lines is kept as it is, and counted on stderr.
    """
    unmarked = []

    def cut(book: Document) -> Document:
        marks = {match[1].upper(): match for match in _MARK.finditer(b"".join(book.blocks()))}
        if marks.keys() == {b"START", b"END"} and marks[b"START"].end() < marks[b"END"].start():
            return replace(book, start=book.start + marks[b"START"].end(), stop=book.start + marks[b"END"].start())
        unmarked.append(book.name)
        return book

    found = {split: list(map(cut, books)) for split, books in documents.items()}
    if unmarked:
        print(
            f"note: {len(unmarked):,} files have no lines of Project Gutenberg around their text and are read as they "
            f"are, {unmarked[0]} for example",
            file=sys.stderr,
        )
    return found


def without_words(documents: Documents, path: Path) -> Documents:
    """Return documents in which the words of the file `path`, one a line, are replaced, in upper or lower case.

    Raises UserError for a file that cannot be read or has no words.
    """
    try:
        words = path.read_bytes().split()
    except OSError as error:
        raise UserError(f"cannot read corpus.replaced_words={path}: {error.strerror}") from error
    if not words:
        raise UserError(f"corpus.replaced_words={path} has no words; write one a line, or leave it out")
    longest_first = sorted(map(re.escape, words), key=len, reverse=True)
    whole_words = re.compile(rb"(?<![\w\x80-\xff])(?:%b)(?![\w\x80-\xff])" % b"|".join(longest_first), re.IGNORECASE)
    return {
        split: [replace(document, replaced=whole_words) for document in found] for split, found in documents.items()
    }
