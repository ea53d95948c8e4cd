"""Books of Project Gutenberg are read between the lines that it puts around them."""

from pathlib import Path

import pytest

from recipes.verbs.prepare import prepare
from tests.recipes.calling import mistake, run
from waveform.engine.dataset import read_dataset

START = "*** START OF THE PROJECT GUTENBERG EBOOK {name} ***"
END = "*** END OF THIS PROJECT GUTENBERG EBOOK {name} ***"
BOOKS = {"a": "Call me a.\n" * 9, "b": "Call me b.\n" * 7, "c": "Call me c.\n" * 8}


def test_the_licence_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "books"
    source.mkdir()
    for name, text in BOOKS.items():
        lines = ("The licence.\r\n", START.format(name=name) + "\r\n", text, END.format(name=name) + "\r\n", "More.")
        (source / f"{name}.txt").write_bytes("".join(lines).encode())
    (source / "unmarked.txt").write_text("Call me nothing.\n")
    run("prepare", "folder", source, tmp_path / "data", "corpus.gutenberg=true")
    assert "note: 1 files have no lines of Project Gutenberg" in capsys.readouterr().err
    data = read_dataset(tmp_path / "data")
    texts = {}
    for split in ("train", "valid", "test"):
        tokens = data.open_split(split)
        for i, name in enumerate(tokens.names):
            texts[name] = bytes(tokens.read(i, start=0, stop=10**6).astype("uint8")).decode()
    assert texts == {f"{name}.txt": text for name, text in BOOKS.items()} | {"unmarked.txt": "Call me nothing.\n"}
    prepare("folder", source, tmp_path / "whole", show_progress=False)
    assert sum(read_dataset(tmp_path / "whole").sources["bytes"].values()) > 3 * len("The licence.")


def test_words_are_replaced_as_in_the_published_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole words, in any case, the longer of two first; what is counted is what is read."""
    (tmp_path / "books" / "train").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (tmp_path / "books" / split).mkdir(exist_ok=True)
        (tmp_path / "books" / split / "a.txt").write_text("Bad, a badge: BAD-TEMPERED. badé")
    (tmp_path / "words").write_text("bad\nbad-tempered\n\n")
    run("prepare", "folder", tmp_path / "books", tmp_path / "data", f"corpus.replaced_words={tmp_path / 'words'}")
    data = read_dataset(tmp_path / "data")
    text = "<DW>, a badge: <DW>. badé".encode()
    assert bytes(data.open_split("test").read(0, start=0, stop=10**6).astype("uint8")) == text
    assert data.sources["bytes"]["test"] == len(text)
    (tmp_path / "words").write_text("\n")
    wrong = ["prepare", "folder", tmp_path / "books", tmp_path / "new"]
    assert "has no words" in mistake([*wrong, f"corpus.replaced_words={tmp_path / 'words'}"], capsys)
    assert "cannot read corpus.replaced_words" in mistake([*wrong, "corpus.replaced_words=nowhere"], capsys)


def test_prepare_says_how_long_documents_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "books"
    source.mkdir()
    for i, num_words in enumerate((10, 20, 30, 2, 2)):
        (source / f"{i}.txt").write_text("word " * num_words)
    run("prepare", "folder", source, tmp_path / "data", "corpus.test=0.02", "corpus.valid=0.02")
    out = capsys.readouterr().out
    assert "in 3 documents of 20 words on average" in out and out.count("in 1 document of 2 words") == 2
