"""Books of Project Gutenberg as it publishes them: without the licence around them (Rae et al. 2019, appendix C)."""

import re
import sys
from dataclasses import replace

from recipes.corpora.documents import Document, Documents

_MARK = re.compile(rb"^\*\*\* ?(START|END) OF (?:THE|THIS) PROJECT GUTENBERG EBOOK[^\n]*\n?", re.M | re.I)


def without_licence(documents: Documents) -> Documents:
    """Return documents cut to what lies between the lines that say where a book starts and ends.

    One without these lines is kept as it is, and counted on stderr.
    """
    unmarked = []
    found: Documents = {}
    for split, books in documents.items():
        found[split] = []
        for book in books:
            cut = _between_marks(book)
            found[split].append(cut or book)
            if cut is None:
                unmarked.append(book.name)
    if unmarked:
        print(
            f"note: {len(unmarked):,} files have no lines of Project Gutenberg around their text and are read as they "
            f"are, {unmarked[0]} for example",
            file=sys.stderr,
        )
    return found


def _between_marks(book: Document) -> Document | None:
    """The book between its lines of start and end; None if one is missing or nothing lies between them."""
    bounds = {
        match[1].upper(): (book.start + match.start(), book.start + match.end())
        for match in _MARK.finditer(b"".join(book.blocks()))
    }
    if bounds.keys() != {b"START", b"END"}:
        return None
    start, stop = bounds[b"START"][1], bounds[b"END"][0]
    return replace(book, start=start, stop=stop) if start < stop else None
