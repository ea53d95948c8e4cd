"""Sources and corpora: splits, refusal of wrong or truncated files, constant RAM, and nothing left after a failure."""

import dataclasses
import hashlib
import json
import shutil
import tracemalloc
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from recipes.corpora import catalogue, sources
from recipes.corpora.catalogue import RECIPES, find_recipe
from recipes.corpora.documents import SPLITS, Document, read_words
from recipes.corpora.recipe import CorpusConfig, open_corpus
from recipes.corpora.sources import open_source
from recipes.corpora.tokenizers import load_tokenizer
from recipes.verbs.prepare import prepare
from tests.recipes.calling import Capsys, mistake, printed, run
from tests.recipes.corpus_files import sentences, write_folder, write_source
from waveform.engine.dataset import Dataset, read_dataset
from waveform.system.errors import UserError

UNCHECKED = CorpusConfig(check=False)


def texts_of(data: Dataset, split: str) -> dict[str, str]:
    """What each document of a split decodes to."""
    tokenizer, tokens = load_tokenizer(data.folder), data.open_split(split)
    return {name: tokenizer.decode(tokens.read(i, start=0, stop=10**9).tolist()) for i, name in enumerate(tokens.names)}


def files_of(recipe: str, source: Path, config: CorpusConfig = UNCHECKED) -> dict[str, list[str]]:
    """The names of the documents of each split."""
    found = open_corpus(find_recipe(recipe), open_source(source), config=config)
    return {split: [document.name for document in documents] for split, documents in found.items()}


def publish(monkeypatch: MonkeyPatch, name: str, **expected: Any) -> None:
    """Make the recipe `name` expect something small."""
    monkeypatch.setitem(catalogue.RECIPES, name, dataclasses.replace(RECIPES[name], **expected))


def test_enwik8_is_cut_at_90_and_95_percent(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    text = bytes(range(256)) * 10
    publish(monkeypatch, "enwik8", size_bytes=2560, md5=hashlib.md5(text).hexdigest())
    (tmp_path / "raw").write_bytes(text)
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "enwik8").write_bytes(text)
    checksums = set()
    for source in ("raw", "enwik8.zip", "folder"):
        data = prepare("enwik8", tmp_path / source, tmp_path / f"data of {source}", show_progress=False)
        found = [data.open_split(split) for split in ("train", "valid", "test")]
        parts = [tokens.read(0, start=0, stop=9999).tobytes() for tokens in found]
        assert [len(part) for part in parts] == [2304, 128, 128]
        assert b"".join(parts) == text
        assert data.vocab_size == 256 and data.sources["checked"]
        checksums.add(tuple(tokens.checksum for tokens in found))
    assert len(checksums) == 1


@pytest.mark.parametrize(
    ("content", "words"), [(b"x" * 2559, "has 2,559 bytes"), (b"y" * 2560, "MD5"), (b"", "has 0 bytes")]
)
def test_a_wrong_or_cut_file_is_refused(content: bytes, words: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    publish(monkeypatch, "enwik8", size_bytes=2560, md5=hashlib.md5(b"x" * 2560).hexdigest())
    (tmp_path / "enwik8").write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        prepare("enwik8", tmp_path / "enwik8", tmp_path / "data", show_progress=False)
    assert "mattmahoney.net" in str(error.value) and "corpus.check=false" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["enwik8"]


def test_who_accepts_another_corpus_is_not_told_to(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(b"x")
    with pytest.raises(UserError, match=r"has 1 bytes, too few for three splits\. Expected: .*textdata\.html$"):
        prepare("enwik8", tmp_path / "enwik8", tmp_path / "data", ["corpus.check=false"], show_progress=False)


ARCHIVES = ("enwik8", "ptb", "wikitext103")


@pytest.mark.parametrize(("recipe", "damage"), [*product(ARCHIVES, ("cut", "flipped")), ("ptb", "checksum at the end")])
def test_a_damaged_archive_is_refused(recipe: str, damage: str, tmp_path: Path) -> None:
    path = write_source(recipe, tmp_path / "source")
    content, why = bytearray(path.read_bytes()), ""
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[len(content) // 3] ^= 255
    else:
        content[-8:-4], why = bytes(byte ^ 255 for byte in content[-8:-4]), r" \(CRC check failed"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^[^\n]*damaged or cut short{why}[^\n]*fetch it again$"):
        prepare(recipe, path, tmp_path / "data", ["corpus.check=false"], show_progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_wikitext_tokens_are_words_and_line_ends(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    source = write_source("wikitext103", tmp_path / "source")
    with zipfile.ZipFile(source) as archive:
        texts = {s: archive.read(f"wikitext-103/wiki.{s}.tokens").decode() for s in ("train", "valid", "test")}
    expected = {
        split: [word for line in text.splitlines() for word in [*line.split(), "<eos>"]]
        for split, text in texts.items()
    }
    counts = {split: len(words) for split, words in expected.items()}
    publish(monkeypatch, "wikitext103", num_tokens=counts, num_types=len(set(expected["train"])))
    data = prepare("wikitext103", source, tmp_path / "data", show_progress=False)
    words = json.loads((data.folder / "tokenizer.json").read_text())["words"]
    for split, tokens in expected.items():
        split_set = data.open_split(split)
        assert [words[i] for i in split_set.read(0, start=0, stop=10**9)] == tokens and len(split_set) == 1
    assert data.open_split("train").counts.tolist() == sorted(data.open_split("train").counts, reverse=True)
    for wrong in ({"num_types": 7}, {"num_tokens": {**counts, "train": 7}}, {"num_tokens": {**counts, "test": 7}}):
        publish(monkeypatch, "wikitext103", **{"num_tokens": counts, **wrong})
        with pytest.raises(UserError, match=r"not 7\. Expected: wiki\.train\.tokens"):
            prepare("wikitext103", source, tmp_path / "refused", show_progress=False)
    assert not (tmp_path / "refused").exists()


def test_pg19_divides_by_its_own_words_and_compares_them_with_the_published(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    source = write_source("pg19", tmp_path / "source")
    settings = ["corpus.vocab_size=300"]
    with pytest.raises(UserError, match="train split has 2 files, not 28,602"):
        prepare("pg19", source, tmp_path / "no", settings, show_progress=False)
    counted = prepare("pg19", source, tmp_path / "counted", [*settings, "corpus.check=false"], show_progress=False)
    words = {
        split: sum(len(path.read_bytes().split()) for path in (source / folder).iterdir())
        for split, folder in {"train": "train", "valid": "validation", "test": "test"}.items()
    }
    assert counted.sources["words"] == words and set(counted.sources["words_are"].values()) == {"counted"}
    expected = {**words, "valid": 3_007_061}
    publish(monkeypatch, "pg19", num_files={"train": 2, "valid": 1, "test": 2}, num_words=expected)
    capsys.readouterr()
    data = prepare("pg19", source, tmp_path / "published", settings)
    assert data.sources["words"] == words  # its own, also where the published corpus has others
    assert data.sources["words_are"] == {
        "train": "as many as published",
        "valid": "counted; the published corpus has 3,007,061",
        "test": "as many as published",
    }
    told = f"valid has {words['valid']:,} words, counted; the published corpus has 3,007,061: word-level"
    assert [line for line in capsys.readouterr().out.splitlines() if told in line]
    names = ["test/50.txt", "test/60.txt"]  # one document a book
    assert texts_of(data, "test") == {name: (source / name).read_bytes().decode() for name in names}


def test_lm1b_tests_on_heldout_file_0(tmp_path: Path) -> None:
    assert files_of("lm1b", write_source("lm1b", tmp_path)) == {
        "train": ["news.en-00001-of-00100", "news.en-00002-of-00100"],
        "valid": ["news.en.heldout-00001-of-00050"],
        "test": ["news.en.heldout-00000-of-00050"],
    }


def test_a_folder_is_split_by_file_and_names_decide(tmp_path: Path) -> None:
    source = write_source("folder", tmp_path)
    config = CorpusConfig(valid=0.2, test=0.2)
    found = files_of("folder", source, config)
    files = [path.relative_to(source).as_posix() for path in source.rglob("book*.txt")]
    assert sorted(name for names in found.values() for name in names) == sorted(files)
    total = sum((source / name).stat().st_size for name in files)
    for name in ("valid", "test"):
        share = sum((source / file).stat().st_size for file in found[name]) / total
        assert 0.08 < share <= 0.2
    assert files_of("folder", source, config) == found


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    names = ("a.txt", ".b.txt", "__MACOSX/._a.txt", ".git/c.txt")
    texts = write_folder(tmp_path / "texts", dict.fromkeys(names, "words"))
    # Names in a tar begin with ./ here.
    archives = [shutil.make_archive(str(texts), kind, texts) for kind in ("zip", "gztar")]
    for source in (texts, *map(Path, archives)):
        assert open_source(source).texts == ["a.txt"]


def test_no_split_is_empty_with_one_large_file(tmp_path: Path) -> None:
    sizes = {"a.txt": 5000, "b.txt": 10, "c.txt": 10}
    found = files_of("folder", write_folder(tmp_path, {name: "x" * size for name, size in sizes.items()}))
    assert found["train"] == ["a.txt"]
    assert len(found["valid"]) == len(found["test"]) == 1


def test_one_file_is_cut_at_lines_and_characters(tmp_path: Path) -> None:
    verses = [f"{i} Und Gott sprach: Es werde Licht! Und es ward Licht, schön und groß.\n" for i in range(100)]
    write_folder(tmp_path / "lines", {"a.txt": "".join(verses), "b.txt": "ä" * 1001})
    documents = open_corpus(find_recipe("folder"), open_source(tmp_path / "lines"), config=CorpusConfig())
    a, b = ([b"".join(documents[split][i].blocks()).decode() for split in SPLITS] for i in (0, 1))
    assert "".join(a) == "".join(verses) and all(part.endswith("\n") for part in a)
    assert [part.count("\n") for part in a] == [91, 5, 4]
    assert "".join(b) == "ä" * 1001 and [len(part) for part in b] == [901, 50, 50]
    assert [document.name for document in documents["test"]] == ["a.txt: test", "b.txt: test"]
    documents = open_corpus(find_recipe("folder"), open_source(tmp_path / "lines" / "a.txt"), config=CorpusConfig())
    assert [b"".join(document.blocks()).decode() for document in documents["valid"]] == [a[1]]
    (tmp_path / "lines" / "a.txt").unlink()
    for few in ("x y z\n" * 20, "ä " * 500 + "\n"):  # the next line begins in the next split, or never
        (tmp_path / "lines" / "b.txt").write_text(few)
        documents = open_corpus(find_recipe("folder"), open_source(tmp_path / "lines"), config=CorpusConfig())
        assert "".join(b"".join(documents[split][0].blocks()).decode() for split in SPLITS) == few
    (tmp_path / "lines" / "b.txt").write_text("a\nb")
    with pytest.raises(UserError, match=r"b.txt has 3 bytes, too few for three splits"):
        open_corpus(find_recipe("folder"), open_source(tmp_path / "lines"), config=CorpusConfig())


@pytest.mark.parametrize(("other", "lacking"), [("test", "valid"), ("validation", "test")])
def test_a_folder_that_lacks_one_split_is_refused(other: str, lacking: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path, dict.fromkeys(("train/a.txt", "train/b.txt", f"{other}/d.txt"), "some words"))
    with pytest.raises(
        UserError, match=rf"has folders for the other splits, but no \.txt files in {lacking}/; add them"
    ):
        files_of("folder", source)


@pytest.mark.parametrize(
    ("recipe", "setting", "says"),
    [
        ("enwik8", "corpus.valid=0.1", "has no effect on enwik8: published files are cut alike; leave it out, or"),
        ("wikitext103", "corpus.valid=0.1", "has no effect on wikitext103: it has its own splits; leave it out"),
        ("lm1b", "corpus.test=0.1", "has no effect on lm1b: it has its own splits"),
        ("pg19", "corpus.test=0.1", "has no effect on pg19: it has its own splits"),
        ("folder", "corpus.valid=0.1", "has no effect on folder: it has its own splits"),
        ("text8", "corpus.vocab_size=300", "has no effect on text8: it is read as characters; leave it out"),
        (
            "folder",
            "corpus.vocab_size=300",
            "has no effect on folder: it is read as bytes; leave it out, or set corpus.tokens=subwords",
        ),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(recipe: str, setting: str, says: str, tmp_path: Path) -> None:
    if recipe == "folder":
        source = write_folder(tmp_path / "source", dict.fromkeys(("train/a.txt", "valid/b.txt", "test/c.txt"), "words"))
    else:
        source = write_source(recipe, tmp_path / "source")
    with pytest.raises(UserError, match=f"^{setting} {says}"):
        prepare(recipe, source, tmp_path / "data", [setting], show_progress=False)


def test_the_current_folder_and_a_mount_point_are_not_replaced(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    source = write_source("folder", tmp_path / "source")
    for name in ("here", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    for given in (".", tmp_path / "here", tmp_path / "disk"):
        with pytest.raises(UserError, match="is the current folder or a mount point; give a new folder in it"):
            prepare("folder", source, given, show_progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "here", "source"]


def test_a_folder_with_splits_keeps_them(tmp_path: Path) -> None:
    names = ("train/a.txt", "train/deep/b.txt", "validation/c.txt", "test/d.txt", "other/e.txt")
    kept = {"train": ["train/a.txt", "train/deep/b.txt"], "valid": ["validation/c.txt"], "test": ["test/d.txt"]}
    assert files_of("folder", write_folder(tmp_path / "mine", dict.fromkeys(names, "some words"))) == kept
    within = {split: [f"mine/{name}" for name in names] for split, names in kept.items()}
    assert files_of("folder", tmp_path) == within  # as in an archive of it


def test_large_files_are_streamed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A line of 3 MB, read 16 KB at a time, never needs a third of that in RAM."""
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 1 << 14)
    (tmp_path / "text8").write_text(" ".join(sentences(1000)) * 90)
    (document,) = open_corpus(find_recipe("text8"), open_source(tmp_path / "text8"), config=UNCHECKED)["train"]
    assert document.num_bytes > 2_500_000
    tracemalloc.start()
    num_words = sum(len(words) for words in read_words(document))
    prepare("text8", tmp_path / "text8", tmp_path / "data", ["corpus.check=false"], show_progress=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_words > 100_000
    assert peak < 1_000_000, f"{peak:,} bytes"


def test_an_endless_word_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text("x" * 3_000_000)
    document = Document("train", open_source(tmp_path), "ptb.train.txt", 0, 3_000_000)
    with pytest.raises(UserError, match="a word of more than 1,048,576 letters"):
        list(read_words(document))


def test_words_and_bytes_are_counted_across_blocks(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 3)
    written = ("a bc  def\nghij", " k lm nop ", "qrs tuv\n\nwx yz", "a  b")
    write_folder(tmp_path, {f"{i}.txt": text for i, text in enumerate(written)})
    data = prepare("folder", tmp_path, tmp_path / "data", show_progress=False)
    for split in SPLITS:
        texts = texts_of(data, split)
        assert data.sources["words"][split] == sum(len((tmp_path / name).read_text().split()) for name in texts)
        assert data.sources["bytes"][split] == sum(len(text.encode()) for text in texts.values())


MARKED = """The licence.\r
*** START OF THE PROJECT GUTENBERG EBOOK {name} ***\r
{text}*** END OF THIS PROJECT GUTENBERG EBOOK {name} ***\r
More."""


def test_the_licence_is_cut_off(tmp_path: Path, capsys: Capsys) -> None:
    books = {"a.txt": "Call me a.\n" * 9, "b.txt": "Call me b.\n" * 7, "c.txt": "Call me c.\n" * 8}
    unmarked = {"unmarked.txt": "Call me nothing.\n"}
    marked = {name: MARKED.format(name=name, text=text) for name, text in books.items()}
    source = write_folder(tmp_path / "books", marked | unmarked)
    run("prepare", "folder", source, tmp_path / "data", "corpus.gutenberg=true")
    assert "note: 1 files have no lines of Project Gutenberg" in capsys.readouterr().err
    data = read_dataset(tmp_path / "data")
    assert texts_of(data, "train") | texts_of(data, "valid") | texts_of(data, "test") == books | unmarked
    prepare("folder", source, tmp_path / "whole", show_progress=False)
    assert sum(read_dataset(tmp_path / "whole").sources["bytes"].values()) > 3 * len("The licence.")
    verses = "".join(f"Verse {i}.\n" for i in range(100))
    (tmp_path / "alone.txt").write_text(MARKED.format(name="alone", text=verses))
    alone = prepare("folder", tmp_path / "alone.txt", tmp_path / "cut", ["corpus.gutenberg=true"], show_progress=False)
    assert "".join(text for split in SPLITS for text in texts_of(alone, split).values()) == verses


def test_words_are_replaced_as_in_the_published_corpus(tmp_path: Path) -> None:
    """Whole words, in any case, the longer of two first; what is counted is what is read."""
    write_folder(tmp_path / "books", {f"{split}/a.txt": "Bad, a badge: BAD-TEMPERED. badé" for split in SPLITS})
    (tmp_path / "words").write_text("bad\nbad-tempered\n\n")
    run("prepare", "folder", tmp_path / "books", tmp_path / "data", f"corpus.replaced_words={tmp_path / 'words'}")
    data = read_dataset(tmp_path / "data")
    text = "<DW>, a badge: <DW>. badé"
    assert texts_of(data, "test") == {"test/a.txt": text} and data.sources["bytes"]["test"] == len(text.encode())
    assert data.sources["checked"] is False  # it is no longer what was published
    (tmp_path / "words").write_text("\n")
    wrong = ["prepare", "folder", tmp_path / "books", tmp_path / "new"]
    assert "has no words" in mistake([*wrong, f"corpus.replaced_words={tmp_path / 'words'}"])
    assert "cannot read corpus.replaced_words" in mistake([*wrong, "corpus.replaced_words=nowhere"])


def test_prepare_says_how_long_documents_are(tmp_path: Path) -> None:
    texts = {f"{i}.txt": "word " * num_words for i, num_words in enumerate((10, 20, 30, 2, 2))}
    source = write_folder(tmp_path / "books", texts)
    out = printed("prepare", "folder", source, tmp_path / "data", "corpus.test=0.02", "corpus.valid=0.02")
    assert "in 3 documents of 20 words on average" in out and out.count("in 1 document of 2 words") == 2
