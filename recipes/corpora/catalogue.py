"""The recipes: those of the papers, with what the published copy of each corpus contains, and those of other packages.

To add one, write an entry here, or give your own package an entry point of the group `waveform.recipes` that names a
`Recipe` (docs/extending.md).
"""

from pathlib import Path

from recipes.corpora.documents import SPLITS
from recipes.corpora.layouts import books, one_billion_words, one_file, split_files, text_files
from recipes.corpora.recall import RecallConfig
from recipes.corpora.recipe import Recipe
from waveform.system.errors import UserError

_GROUP = "waveform.recipes"


def _write_recall(folder: Path, config: RecallConfig, show_progress: bool) -> str:
    from recipes.corpora.episodes import write_recall  # loads numpy and torch, and `--help` needs only RECIPES

    return write_recall(folder, config, show_progress)


def _of_mahoney(name: str, *, tokens: str, md5: str) -> Recipe:
    """One of Mahoney's two files, in which each character is a byte."""
    where = "http://mattmahoney.net/dc/textdata.html"
    return Recipe(
        name=name,
        title=name,
        published=f"the file {name} of 100,000,000 bytes, raw or zipped, MD5 {md5}, from {where}",
        documents=one_file,
        tokens=tokens,
        headline="bits_per_character",
        state="carry",
        size_bytes=100_000_000,
        md5=md5,
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        _of_mahoney("enwik8", tokens="bytes", md5="a1fa5ffddb56f4953e226637dabbb36a"),
        _of_mahoney("text8", tokens="characters", md5="3bea1919949baf155f99411df5fada7e"),
        Recipe(
            name="wikitext103",
            title="WikiText-103 by words",
            published="wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens of 103,227,021, 217,646 and 245,569 "
            "tokens and 267,735 types, in a folder or wikitext-103-v1.zip (Merity et al. 2016)",
            documents=split_files({s: (f"wiki.{s}.tokens", f"{s}.txt") for s in SPLITS}),
            tokens="words",
            headline="perplexity",
            state="carry",
            num_tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
            num_types=267_735,
        ),
        Recipe(
            name="pg19",
            title="PG-19",
            published="folders train, validation and test of 28,602, 50 and 100 books, one .txt each, from "
            "https://github.com/google-deepmind/pg19",
            documents=books,
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
            documents=one_billion_words,
            tokens="words",
            headline="perplexity",
            state="carry",
            min_count=3,  # as the benchmark's own vocabulary (Chelba et al. 2013)
            num_files={"train": 99, "valid": 1, "test": 1},
            num_tokens={"test": 159_658},
        ),
        Recipe(
            name="ptb",
            title="Penn Treebank by words",
            published="ptb.train.txt, ptb.valid.txt and ptb.test.txt of 929,589, 73,760 and 82,430 tokens and 10,000 "
            "types, in a folder or simple-examples.tgz (Mikolov et al. 2010)",
            documents=split_files({s: (f"ptb.{s}.txt", f"{s}.txt") for s in SPLITS}),
            tokens="words",
            headline="perplexity",
            state="carry",
            num_tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
            num_types=10_000,
        ),
        Recipe(
            name="recall",
            title="recall",
            published="nothing: it is generated",
            documents=None,
            tokens="facts",
            headline="bits_per_answer",
            settings=RecallConfig,
            generate=_write_recall,
        ),
        Recipe(
            name="folder",
            title="a folder of text",
            published="a folder of .txt files",
            documents=text_files,
            tokens="bytes",
            other_tokens=("subwords",),
            headline="bits_per_byte",
        ),
    )
}


def recipe_names() -> list[str]:
    """Names of every recipe, the papers' first."""
    from waveform.system.plugins import entry_points  # slow, and `--help` needs only RECIPES

    return [*RECIPES, *sorted(entry_points(group=_GROUP).names - RECIPES.keys())]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name. Raises UserError if there is none, or if its package does not load."""
    if name in RECIPES:
        return RECIPES[name]
    from waveform.system.plugins import entry_points

    found = entry_points(group=_GROUP, name=name)
    if not found:
        raise UserError(f"unknown recipe {name!r}; choose one of {', '.join(recipe_names())}")
    try:
        recipe = next(iter(found)).load()
    except Exception as error:  # whatever is wrong with another package
        raise UserError(f"the recipe {name!r} of an installed package does not load: {error!r}") from error
    if not isinstance(recipe, Recipe) or recipe.name != name:
        raise UserError(f"the entry point {name!r} of the group {_GROUP} must name a Recipe(name={name!r}, ...)")
    return recipe
