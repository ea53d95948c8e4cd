"""The words of a published model, from a file of JSON or text, in the order of their ids."""

import json
from pathlib import Path
from typing import Any

from recipes.corpora.documents import END_OF_LINE
from recipes.corpora.tokenizers import UNKNOWN
from waveform.system.errors import UserError

VOCABULARY_FILES = ("vocab.json", "vocab.txt")


def read_vocabulary(path: Path) -> list[str]:
    """Return the words of a file.

    JSON: a list of words, or an object from words to ids; either may be the value of `idx2sym` or `sym2idx`. Text: one
    word a line, with or without its count after it. Raises UserError for any other file, for a word that occurs twice,
    and if <eos> or <unk> is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        words = _from_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _from_lines(text)
    except OSError as error:
        raise UserError(f"cannot read the vocabulary {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a vocabulary in JSON or one word a line: {error}") from error
    seen: set[str] = set()
    for word in words:
        if word in seen:
            raise UserError(f"{path} has the word {word!r} twice; each word has one line, or one id")
        seen.add(word)
    for word in (END_OF_LINE, UNKNOWN):
        if word not in seen:
            raise UserError(f"{path} lacks {word}, without which no text can be read with its {len(words):,} words")
    return words


def _from_json(content: Any) -> list[str]:
    if isinstance(content, dict) and ("idx2sym" in content or "sym2idx" in content):
        content = content.get("idx2sym") or content["sym2idx"]
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
