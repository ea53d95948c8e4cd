"""The words or symbols of a published model, from a file of JSON or text, in the order of their ids."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from recipes.corpora.documents import END_OF_LINE
from recipes.corpora.tokenizers import UNKNOWN, SymbolTokenizer, WordTokenizer
from waveform.system.errors import UserError

_NUMBERS = {str(byte) for byte in range(256)}
VOCABULARY_FILES = ("vocab.json", "vocab.txt")


def read_vocabulary(path: Path) -> WordTokenizer | SymbolTokenizer:
    """Return the tokenizer with the words of a file, or with its symbols if all are bytes (enwik8) or letters (text8).

    JSON: a list of words, or an object from words to ids; text: one word per line, with or without its count after it.
    Symbols are as in Dai et al. 2019's data: a byte is its number, or all are ASCII characters, with _ for a space.
    Raises UserError for any other file, for a word that occurs twice, and for words without <eos> or <unk>.
    """
    try:
        text = path.read_text(encoding="utf-8")
        words = _from_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _from_lines(text)
    except OSError as error:
        raise UserError(f"cannot read the vocabulary {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a vocabulary in JSON or one word per line: {error}") from error
    twice = [word for word, count in Counter(words).items() if count > 1]
    if twice:
        raise UserError(f"{path} has the word {twice[0]!r} twice; each word has one line, or one id")
    symbols = _symbols(words)
    if symbols is not None:
        return SymbolTokenizer("symbols", symbols)
    for word in (END_OF_LINE, UNKNOWN):
        if word not in words:
            raise UserError(f"{path} lacks {word}, without which no text can be read with its {len(words):,} words")
    return WordTokenizer(words)


def _symbols(words: list[str]) -> bytes | None:
    """The bytes that the words stand for; None if they are words."""
    if words and all(word in _NUMBERS for word in words):
        return bytes(int(word) for word in words)
    if words and all(len(word) == 1 and word.isascii() for word in words):
        return "".join(words).replace("_", "_" if " " in words else " ").encode()
    return None


def _from_json(content: Any) -> list[str]:
    if isinstance(content, dict):
        if sorted(content.values(), key=str) != sorted(range(len(content)), key=str):
            raise ValueError(f"the ids of its {len(content):,} words are not 0, 1, 2 and so on")
        content = sorted(content, key=content.__getitem__)
    if not isinstance(content, list) or not all(isinstance(word, str) for word in content):
        raise ValueError("it holds something other than words")
    return content


def _from_lines(text: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n")
    empty = [number for number, line in enumerate(lines, start=1) if not line.split()]
    if empty:
        raise ValueError(f"line {empty[0]:,} is empty")
    return [line.split()[0] for line in lines]
