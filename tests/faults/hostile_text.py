"""Files that are not proper text, before every recipe's reader; a tokenizer of bytes must take them as they are."""

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from recipes.cli import main as recipes
from tests.faults.calling import call, forget_peak_memory, peak_memory_mb
from tests.faults.fault import fault
from tests.recipes.corpus_files import sentences
from waveform.engine.dataset import read_dataset

_GOOD = ("\n".join(sentences(20)) + "\n").encode()
_ODD: dict[str, bytes] = {
    "no UTF-8": b"kaka \xff\xfe lolo\n" * 20,
    "cut in a character": "日本 ".encode()[:-2],
    "overlong": b"\xc0\xaf \xe0\x80\xaf\n" * 9,
    "lone surrogates": b"\xed\xa0\x80 \xed\xbf\xbf\n" * 9,
    "UTF-16": "kaka lolo\n".encode("utf-16") * 9,
    "Latin-1": "größe über\n".encode("latin-1") * 9,
    "NULs": b"\0" * 5000,
    "NULs in text": b"ka\0ka lo\0lo\n" * 30,
    "BOM": b"\xef\xbb\xbf" + _GOOD,
    "several BOMs": b"\xef\xbb\xbf" * 500 + _GOOD,
    "noncharacters": "\uffff\ufdd0\U0010ffff kaka\n".encode() * 20,
    "right to left": "\u202ekaka\u202c \u200f\u200b\n".encode() * 20,
    "combining": ("e" + "\u0301" * 3000 + "\n").encode(),
    "control characters": bytes(range(32)) * 50,
    "every byte": bytes(range(256)) * 20,
    "line ends of all kinds": b"a\r\nb\rc\nd\x0be\x0cf\x85g\xe2\x80\xa8h\n" * 20,
    "line separators": "a\u2028b\u2029c\x1cd\x85e\n".encode() * 20,
    "only line ends": b"\n" * 5000,
    "only spaces": b" " * 5000,
    "no end of line": b"kaka lolo",
    "one byte": b"k",
    "no-break spaces": "ka\u00a0ka\u3000lo\n".encode() * 30,
    "markup": b"<unk> <eos> <|endoftext|> [PAD]\n" * 30,
    "a pickle": b"cos\nsystem\n(S'touch ran'\ntR.",
    "empty": b"",
}
_NAMES = [
    "odd.txt", "caf\udce9.txt", "new\nline.txt", "größe-日本-🎵.txt", "-rf.txt", " blank .txt", "$(reboot).txt",
    "x" * 240 + ".txt", "\x1b[31m.txt",
]  # fmt: skip
_BYTE_TOKENS = ("folder", "enwik8")
_WORD_FILES = {"wikitext103": "wiki.{}.tokens", "ptb": "ptb.{}.txt"}
_RECIPES = ("folder", "folder by subwords", "enwik8", "text8", "wikitext103", "ptb", "pg19", "lm1b")
_SETTINGS = {
    "folder by subwords": ["corpus.tokens=subwords", "corpus.vocab_size=300"],
    "pg19": ["corpus.vocab_size=300"],
}


def _place(recipe: str, folder: Path, name: str, odd: bytes) -> tuple[Path, Path]:
    """Make a source for `recipe` with one odd file; return the source and that file."""
    source = folder
    if recipe.startswith("folder"):
        good, where = [f"{i}.txt" for i in range(4)], name
    elif recipe in ("enwik8", "text8"):
        good, where, source = [], recipe, folder / recipe
        odd = (b"kaka lolo " if recipe == "text8" else _GOOD) + odd
    elif recipe == "pg19":
        good, where = [f"{split}/good.txt" for split in ("train", "validation", "test")], f"train/{name}"
    elif recipe == "lm1b":
        train, heldout = (f"{part}-monolingual.tokenized.shuffled/news.en" for part in ("training", "heldout"))
        good = [f"{train}-00001-of-00100", *(f"{heldout}.heldout-0000{i}-of-00050" for i in range(2))]
        where = f"{train}-00002-of-00100"
    else:
        good = [_WORD_FILES[recipe].format(split) for split in ("train", "valid", "test")]
        where = _WORD_FILES[recipe].format("valid")
    for path, content in {**dict.fromkeys(good, _GOOD), where: odd}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return source, folder / where


def _prepared(recipe: str, source: Path, path: Path, case: str, *, seconds: float = 60) -> str:
    """Prepare a source whose file `path` is odd; return what became of it."""
    data = source.with_name(f"{source.name} data")
    arguments = ["prepare", recipe.split()[0], source, data, "corpus.check=false", *_SETTINGS.get(recipe, ())]
    outcome = call(recipes, arguments, seconds=seconds)
    context = f"{case}\n{outcome.err[-3000:]}"
    if not outcome.refused(case):
        dataset = read_dataset(data)
        if recipe in _BYTE_TOKENS:  # nothing may be lost
            count = sum(dataset.open_split(split).num_tokens for split in ("train", "valid", "test"))
            files = [path] if recipe == "enwik8" else list(path.parent.iterdir())
            assert count == sum(file.stat().st_size for file in files), context
        return "taken"
    assert outcome.err.rstrip("\n").isprintable(), f"no single line: {context}"
    name = os.path.basename(path).encode("utf-8", "backslashreplace").decode()
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in os.path.basename(path))
    split_is_empty = "split is empty" in outcome.err or "splitting by file takes" in outcome.err
    assert name in outcome.err or escaped in outcome.err or split_is_empty, f"the file is not named: {context}"
    assert recipe not in _BYTE_TOKENS or not path.stat().st_size or split_is_empty, f"bytes are refused: {context}"
    assert not data.exists() and not list(data.parent.glob("*.partial")), f"something is left behind: {context}"
    return "refused"


def _long_line(folder: Path, num_bytes: int) -> dict[str, Any]:
    """Prepare one line of that many bytes with spaces, and one without, for every kind of tokens."""
    figures: dict[str, Any] = {}
    for kind, unit in (("spaces", b"kaka lolo "), ("one word", b"kakalolomi")):
        for recipe in ("folder", "folder by subwords", "wikitext103"):
            name = f"long {kind} {recipe}"
            source, path = _place(recipe, folder / name, "odd.txt", b"")
            # For any line, the library takes half a second per megabyte to learn and encode subwords.
            length = min(num_bytes, 1 << 26) if "subwords" in recipe else num_bytes
            with open(path, "wb") as file:
                for _ in range(length // (len(unit) * 100_000)):
                    file.write(unit * 100_000)
            before, began = forget_peak_memory(), time.perf_counter()
            result = _prepared(recipe, source, path, name, seconds=60 + num_bytes / 200_000)
            took, grown = f"{time.perf_counter() - began:.1f} s", peak_memory_mb() - before
            assert grown < 400, f"{name}: {grown} MB more"
            figures[f"{recipe}, {length >> 20} MB, {kind}"] = [result, took, f"{grown:.0f} MB more"]
            path.unlink()
    return figures


@fault("hostile text", short=60, long=400)
def prepare(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: taken as it is, or refused in one line that names the file; nothing is left behind; RAM does not grow
    with a line.

    Try every kind of odd text with every recipe, then long lines: 1 GB in the long form, 64 MB for subwords.
    """
    pairs = [(recipe, odd) for recipe in _RECIPES for odd in _ODD]
    rng.shuffle(pairs)
    outcomes: Counter[str] = Counter()
    for i in range(cases):
        recipe, kind = pairs[i % len(pairs)]
        odd = _ODD[kind]
        if i >= len(pairs):  # what nobody has thought of
            odd = b"".join(rng.choice(list(_ODD.values()))[: rng.randrange(1, 99)] for _ in range(rng.randrange(1, 9)))
            kind = f"a mixture, {odd[:60]!r}"
        name = rng.choice(_NAMES)
        source, path = _place(recipe, folder / str(i), name, odd)
        result = _prepared(recipe, source, path, f"case {i}: {recipe}, {kind}, named {name!r}")
        outcomes[f"{recipe}: {result}"] += 1
    return {"outcomes": dict(sorted(outcomes.items())), **_long_line(folder, (1 << 30) if cases >= 300 else (1 << 20))}
