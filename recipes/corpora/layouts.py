"""How the documents of each split are found in a source; a recipe names one of these functions."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from recipes.corpora.documents import SPLITS, Document, Documents
from recipes.corpora.recipe import CorpusConfig, Recipe
from recipes.corpora.sources import Source
from waveform.system.errors import UserError

# Usual names of the splits' folders.
_SPLIT_FOLDERS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
_OWN_SPLITS = "it has its own splits; leave it out"


def one_file(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """enwik8 and text8: the first 90%, the next 5% and the last 5% of one file."""
    name = source.path.name
    file = name if list(source.sizes) == [name] else source.find(recipe.name)
    if file is None:
        raise recipe.refuse(source, f"it contains no file {recipe.name!r}")
    if config.check:
        recipe.refuse_ignored(config, "published files are cut alike; leave it out, or set corpus.check=false")
        size = source.sizes[file]
        if size != recipe.size_bytes:
            raise recipe.refuse(source, f"{file} has {size:,} bytes")
        digest = hashlib.md5(usedforsecurity=False)
        for block in source.blocks(file):
            digest.update(block)
        if digest.hexdigest() != recipe.md5:
            raise recipe.refuse(source, f"the MD5 of {file} is {digest.hexdigest()}")
    return {split: [part] for split, part in _cut(recipe, source, file, config).items()}


def _cut(
    recipe: Recipe, source: Source, file: str, shares: CorpusConfig, *, at_lines: bool = False
) -> dict[str, Document]:
    """A document of each split, named after it: the beginning of a file trains, its end tests.

    at_lines: each begins with a line, or in a text without lines at least with a character.
    """
    size = source.sizes[file]
    test = size - round(size * shares.test)
    valid = test - round(size * shares.valid)
    if at_lines:
        # Each below the next bound, so that no split is empty in a text of few or long lines.
        valid, test = _next_line(source, file, valid, test - 1), _next_line(source, file, test, size - 1)
    if not 0 < valid < test < size:
        raise recipe.refuse(source, f"{file} has {size:,} bytes, too few for three splits")
    bounds = {"train": (0, valid), "valid": (valid, test), "test": (test, size)}
    return {split: Document(split, source, file, *bounds[split]) for split in SPLITS}


def _next_line(source: Source, file: str, position: int, stop: int) -> int:
    """Where the next line begins, up to `stop` and within a block; if none does, the next character of UTF-8."""
    block = next(source.blocks(file, start=position, stop=stop), b"")
    return position + (block.find(b"\n") + 1 or len(block) - len(block.lstrip(bytes(range(0x80, 0xC0)))))


def split_files(names: Mapping[str, tuple[str, ...]]) -> Callable[[Recipe, Source, CorpusConfig], Documents]:
    """WikiText-103 and Penn Treebank: one file per split, under the first of several usual names."""

    def documents(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
        recipe.refuse_ignored(config, _OWN_SPLITS)
        found: Documents = {}
        for split in SPLITS:
            files = [file for name in names[split] if (file := source.find(name)) is not None]
            if not files:
                raise recipe.refuse(source, f"it contains no single file named {' or '.join(names[split])}")
            found[split] = [Document.whole(source, files[0], split)]
        return found

    return documents


def one_billion_words(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """All training files; held-out file 1 for validation and 0 for testing, the one that papers report."""
    recipe.refuse_ignored(config, _OWN_SPLITS)
    train = [file for file in source.sizes if "training-monolingual.tokenized.shuffled/news.en-" in file]
    heldout = [file for file in source.sizes if "heldout-monolingual.tokenized.shuffled/news.en.heldout-" in file]
    if not train or len(heldout) < 2:
        raise recipe.refuse(
            source,
            "it lacks training-monolingual.tokenized.shuffled/news.en-* or two files of "
            "heldout-monolingual.tokenized.shuffled/news.en.heldout-*",
        )

    def documents(files: list[str]) -> list[Document]:
        return [Document.whole(source, file, file.rsplit("/", 1)[-1]) for file in files]

    return {"train": documents(train), "valid": documents(heldout[1:2]), "test": documents(heldout[:1])}


def books(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """PG-19: folders train, validation and test, one .txt file per book."""
    recipe.refuse_ignored(config, _OWN_SPLITS)
    found = _by_folder(source)
    for split, documents in found.items():
        if not documents:
            raise recipe.refuse(source, f"it contains no .txt files for the {split} split")
    return found


def text_files(recipe: Recipe, source: Source, config: CorpusConfig) -> Documents:
    """Any .txt files: split by the folders train, valid(ation) and test, or else by file; one or two files are cut."""
    found = _by_folder(source)
    if all(found.values()):
        recipe.refuse_ignored(config, _OWN_SPLITS)
        return found
    if len(lacking := [split for split in SPLITS if not found[split]]) == 1:
        raise UserError(f"{source.path} has folders for the other splits, but no .txt files in {lacking[0]}/; add them")
    if not source.texts:
        raise UserError(f"{source.path} has no .txt files that are not empty")
    if len(source.texts) >= len(SPLITS):
        return _by_share(source, config)
    cut = [_cut(recipe, source, file, config, at_lines=True) for file in source.texts]
    return {split: [replace(of[split], name=f"{of[split].file}: {split}") for of in cut] for split in SPLITS}


def _by_folder(source: Source) -> Documents:
    """The .txt files of each split, by the outermost folder with such a name: an archive may have one around them."""
    found: Documents = {split: [] for split in SPLITS}
    for file in source.texts:
        if split := next((_SPLIT_FOLDERS[name] for name in file.split("/")[:-1] if name in _SPLIT_FOLDERS), None):
            found[split].append(Document.whole(source, file))
    return found


def _by_share(source: Source, config: CorpusConfig) -> Documents:
    """Deal files to test and validation up to their shares of the bytes, in an order that only their names decide."""
    files = source.texts
    waiting = sorted(files, key=lambda file: hashlib.blake2b(file.encode(errors="surrogateescape")).digest())
    total = sum(source.sizes[file] for file in files)
    dealt: dict[str, set[str]] = {}
    for split, share, num_left in (("test", config.test, 2), ("valid", config.valid, 1)):  # one file per split to come
        room = share * total
        taken: list[str] = []
        for file in waiting:
            if source.sizes[file] <= room and len(waiting) - len(taken) > num_left:
                taken.append(file)
                room -= source.sizes[file]
        dealt[split] = set(taken or [min(waiting, key=source.sizes.__getitem__)])
        waiting = [file for file in waiting if file not in dealt[split]]
    dealt["train"] = set(waiting)
    return {split: [Document.whole(source, file) for file in sorted(chosen)] for split, chosen in dealt.items()}
