"""The corpora: where the documents of each split lie in a user's copy, and whether it is the published one.

    source (recipes.corpora.sources) -> documents of train, valid, test -> tokens (recipes.corpora.tokenizers) -> shards

A document is one unbroken stream of text. The character corpora, WikiText-103, Penn Treebank and each file of the
One Billion Word benchmark are one document a split, as in the papers, which carry memory through all of it; a book of
PG-19 and a file of a folder is a document of its own.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from recipes.corpora.sources import FileSource, FolderSource, Source
from waveform.system.errors import UserError

SPLITS = ("train", "valid", "test")


@dataclass
class CorpusConfig:
    """Settings of `prepare`."""

    check: bool = True  # refuse what differs from the published corpus; false: take it as it is, a slice for example
    tokens: str | None = None  # bytes | subwords, for `folder`; null: bytes
    vocab_size: int = 32_000  # subwords, where there are so many
    valid: float = 0.05  # share of a corpus without splits of its own
    test: float = 0.05

    def __post_init__(self) -> None:
        if min(self.valid, self.test) <= 0 or self.valid + self.test >= 1:
            raise UserError(
                f"corpus.valid {self.valid} and corpus.test {self.test} must be above 0 and leave something to train on"
            )
        if self.vocab_size < 257:
            raise UserError(f"corpus.vocab_size is {self.vocab_size}; it must be above 256, the number of bytes")


@dataclass(frozen=True)
class Document:
    """One stream of text, read in blocks as often as needed."""

    name: str
    source: Source
    file: str
    start: int
    stop: int  # bytes

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def blocks(self) -> Iterator[bytes]:
        """Its bytes. Raises UserError where they cannot be read."""
        return self.source.blocks(self.file, start=self.start, stop=self.stop)


Documents = dict[str, list[Document]]  # by split


@dataclass(frozen=True)
class Recipe:
    """A corpus, the tokens that the papers read it by, and what the published copy holds."""

    name: str
    title: str
    published: str  # what to fetch, and where
    documents: Callable[["Recipe", Source, CorpusConfig], Documents]
    tokens: str  # bytes | characters | words | subwords
    headline: str  # the metric that papers quote (recipes.metrics)
    min_count: int = 1  # rarer words of the training split become <unk>
    size_bytes: int | None = None
    md5: str | None = None
    num_files: Mapping[str, int] = field(default_factory=dict)  # by split
    num_tokens: Mapping[str, int] = field(default_factory=dict)  # by split, with <eos> at the end of each line
    num_types: int | None = None
    num_words: Mapping[str, int] = field(default_factory=dict)  # by split: what word-level perplexity divides by

    def refuse(self, source: Source, found: str) -> UserError:
        """The error for a source that is not the published corpus."""
        return UserError(
            f"{source.path} is not {self.title}: {found}. Expected: {self.published}. "
            "For a slice or another corpus of this form set corpus.check=false"
        )


def _whole(source: Source, file: str, name: str) -> Document:
    return Document(name, source, file, 0, source.sizes[file])


def _one_file(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """enwik8 and text8: 90%, 5% and 5% of one file, in this order."""
    if isinstance(source, FileSource):
        (file,) = source.sizes
    else:
        found = source.find(recipe.name)
        if found is None:
            raise recipe.refuse(source, f"it holds no file {recipe.name!r}")
        file = found
    size = source.sizes[file]
    if config.check:
        if size != recipe.size_bytes:
            raise recipe.refuse(source, f"{file} has {size:,} bytes")
        digest = hashlib.md5(usedforsecurity=False)
        for block in source.blocks(file):
            digest.update(block)
        if digest.hexdigest() != recipe.md5:
            raise recipe.refuse(source, f"the MD5 of {file} is {digest.hexdigest()}")
    valid, test = size * 90 // 100, size * 95 // 100
    if not config.check:
        test = size - round(size * config.test)
        valid = test - round(size * config.valid)
    if not 0 < valid < test < size:
        raise recipe.refuse(source, f"{file} has {size:,} bytes, too few for three splits")
    bounds = {"train": (0, valid), "valid": (valid, test), "test": (test, size)}
    return {split: [Document(split, source, file, *bounds[split])] for split in SPLITS}


def _split_files(names: Mapping[str, tuple[str, ...]]) -> Callable[[Recipe, Source, CorpusConfig], Documents]:
    """WikiText-103 and Penn Treebank: one file a split, under the first of several usual names."""

    def documents(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
        found: Documents = {}
        for split in SPLITS:
            files = [file for name in names[split] if (file := source.find(name)) is not None]
            if not files:
                raise recipe.refuse(source, f"it holds no single file named {' or '.join(names[split])}")
            found[split] = [_whole(source, files[0], split)]
        return found

    return documents


def _one_billion_words(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """All training files; held-out files 1 (validation) and 0 (test, which papers report)."""
    train = [file for file in source.sizes if "training-monolingual.tokenized.shuffled/news.en-" in file]
    heldout = [file for file in source.sizes if "heldout-monolingual.tokenized.shuffled/news.en.heldout-" in file]
    if not train or len(heldout) < 2:
        raise recipe.refuse(
            source,
            "it lacks training-monolingual.tokenized.shuffled/news.en-* or two files of "
            "heldout-monolingual.tokenized.shuffled/news.en.heldout-*",
        )

    def documents(files: list[str]) -> list[Document]:
        return [_whole(source, file, file.rsplit("/", 1)[-1]) for file in files]

    return {"train": documents(train), "valid": documents(heldout[1:2]), "test": documents(heldout[:1])}


def _books(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """Folders train, validation and test of one .txt a book."""
    found: Documents = {split: [] for split in SPLITS}
    folders = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}
    for file in source.sizes:
        folder = file.split("/")[-2] if "/" in file else ""
        if folder in folders and file.endswith(".txt") and source.sizes[file]:
            found[folders[folder]].append(_whole(source, file, file))
    for split, documents in found.items():
        if not documents:
            raise recipe.refuse(source, f"it holds no .txt files for the {split} split")
    return found


def _text_files(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """Any folder of .txt files: its own folders train, valid(ation) and test, or a split by file."""
    if not isinstance(source, FolderSource):
        raise UserError(f"{source.path} is no folder; give a folder of .txt files")
    files = [file for file in source.sizes if file.lower().endswith(".txt") and source.sizes[file]]
    tops = {file.split("/")[0] for file in files if "/" in file}
    if {"train", "test"} <= tops and tops & {"valid", "validation"}:
        names = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
        found: Documents = {split: [] for split in SPLITS}
        for file in files:
            if (top := file.split("/")[0]) in names:
                found[names[top]].append(_whole(source, file, file))
        return found
    if len(files) < 3:
        raise UserError(
            f"{source.path} holds {len(files)} .txt files with anything in them; splitting by file takes at least 3"
        )
    return _by_share(source, files, config)


def _by_share(source: Source, files: list[str], config: CorpusConfig) -> Documents:
    """Deal whole files to test and validation up to their shares of the bytes, in an order that only names decide."""
    waiting = sorted(files, key=lambda file: hashlib.blake2b(file.encode(errors="surrogateescape")).digest())
    total = sum(source.sizes[file] for file in files)
    found: Documents = {}
    for split, share, num_left in (("test", config.test, 2), ("valid", config.valid, 1)):  # a file for each other split
        room = share * total
        taken: list[str] = []
        for file in waiting:
            if source.sizes[file] <= room and len(waiting) - len(taken) > num_left:
                taken.append(file)
                room -= source.sizes[file]
        taken = taken or [min(waiting, key=lambda file: source.sizes[file])]
        waiting = [file for file in waiting if file not in set(taken)]
        found[split] = [_whole(source, file, file) for file in sorted(taken)]
    found["train"] = [_whole(source, file, file) for file in sorted(waiting)]
    return found


_MAHONEY = "of 100,000,000 bytes, raw or zipped, MD5 {md5}, from http://mattmahoney.net/dc/textdata.html"
_ENWIK8_MD5, _TEXT8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a", "3bea1919949baf155f99411df5fada7e"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="enwik8",
            title="enwik8",
            published="the file enwik8 " + _MAHONEY.format(md5=_ENWIK8_MD5),
            documents=_one_file,
            tokens="bytes",
            headline="bits_per_character",
            size_bytes=100_000_000,
            md5=_ENWIK8_MD5,
        ),
        Recipe(
            name="text8",
            title="text8",
            published="the file text8 " + _MAHONEY.format(md5=_TEXT8_MD5),
            documents=_one_file,
            tokens="characters",
            headline="bits_per_character",
            size_bytes=100_000_000,
            md5=_TEXT8_MD5,
        ),
        Recipe(
            name="wikitext103",
            title="WikiText-103 by words",
            published="wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens of 103,227,021, 217,646 and 245,569 "
            "tokens and 267,735 types, in a folder or wikitext-103-v1.zip (Merity et al. 2016)",
            documents=_split_files({s: (f"wiki.{s}.tokens", f"{s}.txt") for s in SPLITS}),
            tokens="words",
            headline="perplexity",
            num_tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
            num_types=267_735,
        ),
        Recipe(
            name="pg19",
            title="PG-19",
            published="folders train, validation and test of 28,602, 50 and 100 books, one .txt each, from "
            "https://github.com/google-deepmind/pg19",
            documents=_books,
            tokens="subwords",
            headline="word_perplexity",
            num_files={"train": 28_602, "valid": 50, "test": 100},
            num_words={"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499},
        ),
        Recipe(
            name="lm1b",
            title="the One Billion Word benchmark",
            published="1-billion-word-language-modeling-benchmark-r13output.tar.gz, or its folder, with 99 training "
            "files and 159,658 tokens in held-out file 0, from https://www.statmt.org/lm-benchmark/",
            documents=_one_billion_words,
            tokens="words",
            headline="perplexity",
            min_count=3,  # as the benchmark's own vocabulary (Chelba et al. 2013)
            num_files={"train": 99, "valid": 1, "test": 1},
            num_tokens={"test": 159_658},
        ),
        Recipe(
            name="ptb",
            title="Penn Treebank by words",
            published="ptb.train.txt, ptb.valid.txt and ptb.test.txt of 929,589, 73,760 and 82,430 tokens and 10,000 "
            "types, in a folder or simple-examples.tgz (Mikolov et al. 2010)",
            documents=_split_files({s: (f"ptb.{s}.txt", f"{s}.txt") for s in SPLITS}),
            tokens="words",
            headline="perplexity",
            num_tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
            num_types=10_000,
        ),
        Recipe(
            name="folder",
            title="a folder of text",
            published="a folder of .txt files",
            documents=_text_files,
            tokens="bytes",
            headline="bits_per_byte",
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises UserError where there is none."""
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def open_corpus(recipe: Recipe, source: Source, *, config: CorpusConfig) -> Documents:
    """The documents of each split, in the order of their names. Raises UserError for a wrong or cut source."""
    found = recipe.documents(recipe, source, config)
    for split in SPLITS:
        expected = recipe.num_files.get(split)
        if config.check and expected is not None and len(found[split]) != expected:
            raise recipe.refuse(source, f"its {split} split has {len(found[split]):,} files, not {expected:,}")
        if not sum(document.num_bytes for document in found[split]):
            raise UserError(f"{source.path}: the {split} split is empty")
    return {split: sorted(found[split], key=lambda document: document.name) for split in SPLITS}
