"""Words that a corpus is read without: each becomes <DW>, as in the published PG-19 (Rae et al. 2019, appendix C)."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from recipes.corpora.documents import Documents
from recipes.corpora.sources import Source
from waveform.system.errors import UserError

PLACEHOLDER = b"<DW>"


def without_words(documents: Documents, path: Path) -> Documents:
    """Return documents in which the words of the file `path`, one a line, are replaced, in upper or lower case.

    Each document is held in RAM as it is read. Raises UserError for a file that cannot be read or has no words.
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
        split: [replace(document, source=_ReplacingSource(document.source, whole_words)) for document in found]
        for split, found in documents.items()
    }


class _ReplacingSource(Source):
    def __init__(self, source: Source, replaced: re.Pattern[bytes]) -> None:
        super().__init__(source.path)
        self.sizes, self._source, self._replaced = source.sizes, source, replaced

    def _open(self, name: str) -> IO[bytes]:
        return self._source._open(name)

    def blocks(self, name: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        yield self._replaced.sub(PLACEHOLDER, b"".join(self._source.blocks(name, start=start, stop=stop)))
