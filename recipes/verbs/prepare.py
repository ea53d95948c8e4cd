"""`python -m recipes prepare`: turns a corpus into a data set of token shards, completely or not at all."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from recipes.corpora.catalogue import find_recipe
from recipes.corpora.documents import SPLITS, Document, Documents
from recipes.corpora.recipe import CorpusConfig, Recipe, open_corpus
from recipes.corpora.sources import Source, open_source
from recipes.corpora.tokenizers import TOKENIZERS, SubwordTokenizer, TextTokenizer, WordTokenizer, save_tokenizer
from recipes.corpora.vocabulary import read_vocabulary
from waveform.engine.dataset import Dataset, is_dataset, read_dataset, write_dataset
from waveform.engine.shards import ShardWriter
from waveform.runs.settings import typed
from waveform.system.atomic import explain_write_errors, sync
from waveform.system.console import counted
from waveform.system.errors import UserError
from waveform.system.locks import locked
from waveform.system.progress import Progress

_MEGABYTE = 1_000_000


@dataclass
class _Amount:
    """What a split contains."""

    tokens: int = 0
    words: int = 0  # separated by ASCII white space
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Counted(Document):
    """A document whose bytes and words are counted as they are read."""

    amount: _Amount
    progress: Progress

    def blocks(self) -> Iterator[bytes]:
        inside = False  # whether the last block ended inside a word
        for block in super().blocks():
            starts_inside = not block[:1].isspace()
            self.amount.words += len(block.split()) - (inside and starts_inside)
            inside = not block[-1:].isspace()
            self.amount.bytes += len(block)
            self.progress.update(len(block) / _MEGABYTE)
            yield block


def corpus_config(recipe: Recipe, settings: Sequence[str]) -> Any:
    """Build the recipe's settings from `corpus.NAME=value`. Raises UserError for an unknown name or a wrong value."""
    content: dict[str, str | None] = {}
    names = [field.name for field in fields(recipe.settings)]
    for setting in settings:
        key, equals, value = setting.partition("=")
        name = key.removeprefix("corpus.")
        if not equals or not key.startswith("corpus.") or name not in names:
            known = ", ".join(f"corpus.{name}" for name in names)
            raise UserError(f"{setting!r} is not a setting of prepare {recipe.name}; its settings are {known}")
        content[name] = None if value == "null" else value
    return typed(recipe.settings, content, section="corpus")


def prepare_paths(recipe: str, paths: Sequence[str], overrides: Sequence[str] = ()) -> Dataset:
    """`prepare` with the paths of the command line: SOURCE and DATA_DIR, or DATA_DIR alone for a generated corpus."""
    *source, data_dir = paths
    if len(source) > 1:
        raise UserError(f"give two paths, SOURCE and DATA_DIR, not {len(paths)}")
    return prepare(recipe, source[0] if source else None, data_dir, overrides)


def prepare(
    recipe: str,
    source: Path | str | None,
    data_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    show_progress: bool = True,
) -> Dataset:
    """Turn a user's copy of a corpus into a data set in `data_dir`, a new folder.

    source: None for a corpus that is generated. overrides: `corpus.NAME=value` settings. Prints what each split
    contains. Raises UserError for a wrong, truncated or damaged source, for a `data_dir` that is not empty or cannot be
    replaced, and if another process is preparing it; in these cases nothing is left behind.
    """
    chosen, data_dir = find_recipe(recipe), Path(data_dir)
    config = corpus_config(chosen, overrides)
    if (source is None) != (chosen.generate is not None):
        generated = "is generated and has no source; give a DATA_DIR alone"
        raise UserError(f"{recipe} {'needs two paths, SOURCE and DATA_DIR' if source is None else generated}")
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        remove = ", or remove it to prepare the data again" if is_dataset(data_dir) else ""
        raise UserError(f"{data_dir} is not empty; give a new folder{remove}")
    if data_dir.exists() and (data_dir.samefile(".") or data_dir.is_mount()):  # which cannot be replaced
        raise UserError(f"{data_dir} is the current folder or a mount point; give a new folder in it")
    write = chosen.generate
    if source is not None:
        chosen, opened = chosen.with_config(config), open_source(Path(source))
        write = partial(_write, chosen, opened, open_corpus(chosen, opened, config=config))
    assert write is not None
    with _partial_folder(data_dir) as folder:
        content = write(folder, config, show_progress)
        with explain_write_errors(data_dir):
            folder.replace(data_dir)
            sync(folder.parent)
    if show_progress:
        print(f"{data_dir}: {content}")
    return read_dataset(data_dir)


@contextmanager
def _partial_folder(data_dir: Path) -> Iterator[Path]:
    """Provide an empty folder next to `data_dir`, removed at the end unless it was renamed.

    What a killed process left in it is removed first. Raises UserError if a running process is using it.
    """
    partial = data_dir.absolute().with_name(f".{data_dir.absolute().name}.partial")
    with explain_write_errors(data_dir):
        partial.mkdir(parents=True, exist_ok=True)
    refusal = f"another process is preparing {data_dir}; wait until it is done"
    with locked(partial, refusal=refusal) as descriptor:
        if not (partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())):  # renamed meanwhile
            raise UserError(refusal)
        try:
            with explain_write_errors(partial):
                for leftover in partial.iterdir():
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write(
    recipe: Recipe, source: Source, documents: Documents, folder: Path, config: CorpusConfig, show_progress: bool
) -> str:
    """Write the data set; return what it contains, in a few lines."""
    tokenizer = _tokenizer(recipe, source, documents["train"], config=config, show_progress=show_progress)
    amounts = {split: _Amount() for split in SPLITS}
    total = sum(document.num_bytes for split in SPLITS for document in documents[split])
    with Progress(f"prepare {recipe.name}", total=total / _MEGABYTE, unit="MB", enabled=show_progress) as progress:
        for split, amount in amounts.items():
            with ShardWriter(folder / f"{split}.shard", vocab_size=tokenizer.vocab_size) as writer:
                for document in documents[split]:
                    read = _Counted(**vars(document), amount=amount, progress=progress)
                    amount.tokens += writer.write(document.name, tokenizer.encode(read)).length
            recipe.require_tokens(source, split, amount.tokens)
    words_are = {split: _words_are(amount.words, recipe.num_words.get(split)) for split, amount in amounts.items()}
    save_tokenizer(tokenizer, folder)
    write_dataset(
        Dataset(
            folder=folder,
            vocab_size=tokenizer.vocab_size,
            modality={"kind": "text", "recipe": recipe.name, "tokens": tokenizer.kind},
            splits={split: [f"{split}.shard"] for split in SPLITS},
            sources={
                "path": str(source.path.resolve()),
                "checked": config.check and config.replaced_words is None,
                "bytes": {split: amount.bytes for split, amount in amounts.items()},
                "words": {split: amount.words for split, amount in amounts.items()},
                "words_are": words_are,
            },
        )
    )
    lines = [f"{recipe.name} as {tokenizer.kind}, vocabulary of {tokenizer.vocab_size:,}"]
    for split, amount in amounts.items():
        num_documents = len(documents[split])
        lines.append(
            f"  {split:5}  {amount.tokens:>13,} tokens  {amount.bytes:>14,} bytes  {amount.words:>13,} words  "
            f"in {counted(num_documents, 'document')} of {amount.words / num_documents:,.0f} words on average"
        )
    lines += [
        f"  {split} has {amounts[split].words:,} words, {words}: word-level perplexity divides by its own"
        for split, words in words_are.items()
        if ";" in words
    ]
    return "\n".join(lines)


def _words_are(num_words: int, published: int | None) -> str:
    """Return what is known of a split's number of words, by which word-level perplexity divides.

    published: the number that was published, or None. A corpus may have the right files, but different text.
    """
    if num_words == published:
        return "as many as published"
    return "counted" if published is None else f"counted; the published corpus has {published:,}"


def _tokenizer(
    recipe: Recipe, source: Source, train: list[Document], *, config: CorpusConfig, show_progress: bool
) -> TextTokenizer:
    """Make the tokenizer of `recipe`; a vocabulary is given, or learned from the training documents only."""
    if config.vocabulary is not None:
        given = read_vocabulary(Path(config.vocabulary))
        wanted = "symbols" if recipe.headline == "bits_per_character" else "words"
        if wanted != given.kind or (wanted == "words" and recipe.tokens != "words"):
            raise UserError(
                f"corpus.vocabulary={config.vocabulary} holds {given.kind}, but {recipe.name} is read as "
                f"{recipe.tokens}; give {'a file of symbols' if wanted == 'symbols' else 'words'}, or leave it out"
            )
        return given
    if recipe.tokens in ("bytes", "characters"):
        return TOKENIZERS[recipe.tokens]({})
    total = sum(document.num_bytes for document in train) / _MEGABYTE
    with Progress(f"{recipe.tokens} of {recipe.name}", total=total, unit="MB", enabled=show_progress) as progress:
        passing = (_Counted(**vars(document), amount=_Amount(), progress=progress) for document in train)
        if recipe.tokens == "subwords":
            return SubwordTokenizer.train(passing, vocab_size=config.vocab_size)
        tokenizer, num_tokens = WordTokenizer.train(passing, min_count=recipe.min_count)
    # Checked here too, so that a wrong source is read once rather than twice.
    recipe.require_tokens(source, "train", num_tokens)
    if recipe.num_types not in (None, tokenizer.vocab_size):
        raise recipe.refuse(source, f"it has {tokenizer.vocab_size:,} types, not {recipe.num_types:,}")
    return tokenizer
