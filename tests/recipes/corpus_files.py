"""Writes small sources in the true format of every recipe."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

_SYLLABLES = ["ka", "lo", "mi", "ne", "su", "ra", "te", "vo"]
_TYPES = [a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in ("", "n")]  # 128 words


def sentences(num: int, *, seed: int = 0) -> list[str]:
    """Sentences of 4 to 9 words, in which the next word is predictable half of the time."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(_TYPES) + 1)
    made = []
    for _ in range(num):
        words = [int(random.choice(len(_TYPES), p=weights / weights.sum()))]
        while len(words) < random.integers(4, 10):
            follows = (words[-1] * 7 + 3) % len(_TYPES)
            drawn = int(random.choice(len(_TYPES), p=weights / weights.sum()))
            words.append(follows if random.random() < 0.5 else drawn)
        made.append(" ".join(_TYPES[word] for word in words))
    return made


def _archive(path: Path, kind: str, files: dict[str, str]) -> Path:
    """kind: one that shutil knows, such as zip."""
    with TemporaryDirectory() as folder:
        write_folder(Path(folder), files)
        return Path(shutil.make_archive(str(path), kind, folder)).rename(path)


def write_folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def _wikitext(num: int, seed: int) -> str:
    lines = sentences(num, seed=seed)
    return "".join(f" \n = {lines[i]} = \n \n {lines[i + 1]} , <unk> {lines[i + 2]} . \n" for i in range(0, num - 2, 3))


def _lines(num: int, seed: int) -> str:
    return "\n".join(sentences(num, seed=seed)) + "\n"


def write_source(recipe: str, folder: Path) -> Path:
    """Write a small source of `recipe` into `folder`, in a published format; return the path to give to `prepare`."""
    folder.mkdir(parents=True, exist_ok=True)
    if recipe == "enwik8":
        return _archive(folder / "enwik8.zip", "zip", {"enwik8": "<page>é\n".join(sentences(600))})
    if recipe == "text8":
        return write_folder(folder, {"text8": " ".join(sentences(600))}) / "text8"
    if recipe == "wikitext103":
        sizes = {"train": 600, "valid": 60, "test": 90}
        files = {f"wikitext-103/wiki.{split}.tokens": _wikitext(n, n) for split, n in sizes.items()}
        return _archive(folder / "wikitext-103-v1.zip", "zip", files)
    if recipe == "pg19":
        books = {
            f"{split}/{n}.txt": "\r\n".join(sentences(n, seed=n))
            for split, sizes in (("train", (200, 250)), ("validation", (40,)), ("test", (50, 60)))
            for n in sizes
        }
        return write_folder(folder / "pg19", books)
    if recipe == "lm1b":
        base = "1-billion-word-language-modeling-benchmark-r13output"
        train = f"{base}/training-monolingual.tokenized.shuffled/news.en-0000"
        heldout = f"{base}/heldout-monolingual.tokenized.shuffled/news.en.heldout-0000"
        files = {f"{train}{i}-of-00100": _lines(200, i) for i in (1, 2)}
        files |= {f"{heldout}{i}-of-00050": _lines(40 - 10 * i, 3 + i) for i in range(3)}
        return write_folder(folder, files)
    if recipe == "ptb":
        files = {
            f"simple-examples/data/ptb.{split}.txt": "".join(f" {line} \n" for line in sentences(n, seed=n))
            for split, n in (("train", 400), ("valid", 50), ("test", 60))
        }
        return _archive(folder / "simple-examples.tgz", "gztar", files)
    assert recipe == "folder"
    books = {f"shelf {i % 2}/book {i}.txt": _lines(40 + i, i) for i in range(12)}
    return write_folder(folder / "texts", books | {"notes.md": "not text", "empty.txt": ""})
