"""A recipe: a corpus, the tokens that the papers read it as, and what the published copy contains.

`recipes.corpora.catalogue` lists them; `recipes.corpora.layouts` says how the documents are found in a source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from recipes.corpora.documents import SPLITS, Documents, without_licence, without_words
from recipes.corpora.sources import Source
from waveform.system.errors import UserError
from waveform.system.rules import check_rules, whole_number


@dataclass
class CorpusConfig:
    """Settings of `prepare`."""

    check: bool = True  # refuse whatever differs from the published corpus; false: accept it, for example a slice
    tokens: str | None = None  # a different kind that the recipe offers, such as subwords for `folder`; null: its own
    # Subwords, if the text yields that many. The tokenizer makes a table of this size at once; no published vocabulary
    # has a million words.
    vocab_size: Annotated[int, whole_number(257, 2**20)] = 32_000
    vocabulary: str | None = None  # file with the words or symbols of a published model
    valid: float = 0.05  # share held out for validation, if the corpus has no splits of its own
    test: float = 0.05  # the same for testing
    gutenberg: bool = False  # cut off the licence of Project Gutenberg around each file
    replaced_words: str | None = None  # file with words, one per line, each of which becomes <DW>

    def __post_init__(self) -> None:
        check_rules(self, section="corpus")
        if min(self.valid, self.test) <= 0 or self.valid + self.test >= 1:
            raise UserError(
                f"corpus.valid={self.valid} and corpus.test={self.test} must be above 0 and leave something to train on"
            )


# The metrics that each kind of token allows, any of which can be a recipe's headline (recipes.metrics computes them).
METRICS = {
    "bytes": ("bits_per_character", "bits_per_byte", "word_perplexity"),
    "characters": ("bits_per_character", "bits_per_byte", "word_perplexity"),
    "symbols": ("bits_per_character",),  # of a published model
    "words": ("perplexity",),
    "subwords": ("bits_per_byte", "word_perplexity"),
    "facts": ("bits_per_answer",),  # words of recall
}


@dataclass(frozen=True)
class Recipe:
    """What `prepare`, `train` and `evaluate` need to know about a corpus."""

    name: str
    title: str
    published: str  # what to download, and from where
    documents: Callable[["Recipe", Source, CorpusConfig], Documents] | None  # None: there is no source, see `generate`
    tokens: str  # bytes | characters | words | subwords | facts
    headline: str  # the metric that papers quote, one of METRICS[tokens]
    other_tokens: tuple[str, ...] = ()  # that corpus.tokens can choose instead
    state: str = "utterance"  # train.state: carry (one stream, cut into one part per row) or reset at each document
    min_count: int = 1  # rarer words of the training split become <unk>
    size_bytes: int | None = None
    md5: str | None = None
    num_files: Mapping[str, int] = field(default_factory=dict)  # by split
    num_tokens: Mapping[str, int] = field(default_factory=dict)  # by split, with <eos> at the end of each line
    num_types: int | None = None
    num_words: Mapping[str, int] = field(default_factory=dict)  # by split; papers divide by it for word perplexity
    settings: type = CorpusConfig  # a dataclass: what `prepare` can be asked for
    # Writes the data set: (folder, settings, whether to show progress) -> what it contains, in a few lines.
    generate: Callable[[Path, Any, bool], str] | None = None
    is_checked: bool = True  # whether a source that is not the published corpus is refused

    def __post_init__(self) -> None:
        if (self.documents is None) == (self.generate is None):
            raise UserError(f"recipe {self.name} must have either documents or generate")
        for tokens in (self.tokens, *self.other_tokens):
            if self.headline not in METRICS.get(tokens, ()):
                raise UserError(
                    f"recipe {self.name}: {tokens} with the headline {self.headline}; choose from "
                    + ", ".join(f"{kind}: {' or '.join(names)}" for kind, names in METRICS.items())
                )

    def with_config(self, config: CorpusConfig) -> "Recipe":
        """The recipe with the tokens that are asked for; it expects nothing of a corpus that is not to be checked.

        Raises UserError for tokens that it does not have, and for a number of subwords if its tokens are not subwords.
        """
        choices = (self.tokens, *self.other_tokens)
        if config.tokens not in (None, *choices):
            raise UserError(f"corpus.tokens is {config.tokens!r}; {self.name} is read as {' or '.join(choices)}")
        chosen = replace(self, tokens=config.tokens or self.tokens)
        if chosen.tokens != "subwords":
            other = ", or set corpus.tokens=subwords" if "subwords" in choices else ""
            self.refuse_ignored(config, f"it is read as {chosen.tokens}; leave it out{other}", ("vocab_size",))
        unchecked = replace(chosen, is_checked=False, num_tokens={}, num_types=None, num_words={})
        return chosen if config.check else unchecked

    def refuse_ignored(self, config: CorpusConfig, why: str, names: Sequence[str] = ("valid", "test")) -> None:
        """Raises UserError if one of these settings, which have no effect on this corpus, was changed."""
        for name in names:
            if (value := getattr(config, name)) != getattr(CorpusConfig, name):
                raise UserError(f"corpus.{name}={value} has no effect on {self.name}: {why}")

    def require_tokens(self, source: Source, split: str, num_tokens: int) -> None:
        """Raises UserError for a split with another number of tokens than the published one has, if that is known."""
        published = self.num_tokens.get(split, num_tokens)
        if num_tokens != published:
            raise self.refuse(source, f"its {split} split has {num_tokens:,} tokens, not {published:,}")

    def refuse(self, source: Source, found: str) -> UserError:
        """Return the error for a source that is not the published corpus."""
        remedy = ". For a slice or another corpus of this form set corpus.check=false" if self.is_checked else ""
        return UserError(f"{source.path} is not {self.title}: {found}. Expected: {self.published}{remedy}")


def open_corpus(recipe: Recipe, source: Source, *, config: CorpusConfig) -> Documents:
    """Find the documents of each split, sorted by name. Raises UserError for a wrong or truncated source."""
    assert recipe.documents is not None
    if config.gutenberg:
        source = without_licence(source)
    found = recipe.documents(recipe, source, config)
    if config.replaced_words is not None:
        found = without_words(found, Path(config.replaced_words))
    for split in SPLITS:
        num_files = len(found[split])
        if config.check and num_files != recipe.num_files.get(split, num_files):
            raise recipe.refuse(source, f"its {split} split has {num_files:,} files, not {recipe.num_files[split]:,}")
        if not sum(document.num_bytes for document in found[split]):
            raise UserError(f"{source.path}: the {split} split is empty")
    return {split: sorted(found[split], key=lambda document: document.name) for split in SPLITS}
