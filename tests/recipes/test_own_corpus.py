"""A package of one's own adds a corpus by one `Recipe` and one entry point: every verb knows it."""

from pathlib import Path

import pytest

from recipes.corpora.catalogue import find_recipe, recipe_names
from recipes.corpora.layouts import text_files
from recipes.corpora.recipe import Recipe
from recipes.text import compose_config
from tests.recipes.calling import figures_of, run
from tests.recipes.corpus_files import sentences, write_folder
from waveform.system.errors import UserError

_MODULE = """
from recipes.corpora.layouts import split_files
from recipes.corpora.recipe import Recipe

FILES = split_files({split: (f"kjv.{split}.txt",) for split in ("train", "valid", "test")})
KJV = Recipe("kjv", "the King James Bible", "31,102 verses", FILES, "words", "perplexity", state="carry")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the corpus `kjv`, and two entry points that are mistakes."""
    points = "[waveform.recipes]\nbroken = my_corpora:GONE\nkjv = my_corpora:KJV\nwrong = my_corpora:KJV\n"
    files = {"my_corpora.py": _MODULE, "my_corpora-1.0.dist-info/entry_points.txt": points}
    monkeypatch.syspath_prepend(write_folder(tmp_path / "site", files))
    return tmp_path


def test_a_corpus_of_your_own_is_prepared_trained_and_evaluated(package: Path) -> None:
    for split, num in (("train", 300), ("valid", 40), ("test", 50)):
        (package / f"kjv.{split}.txt").write_text("\n".join(sentences(num, seed=num)) + "\n")
    assert recipe_names()[-3:] == ["broken", "kjv", "wrong"]
    run("prepare", "kjv", package, package / "data")
    run("train", package / "data", package / "run", "preset=smoke", "train.max_steps=2")
    figures = figures_of(package / "figures.json", "evaluate", package / "run")
    assert (figures["recipe"], figures["headline"]) == ("kjv", "perplexity")
    assert figures["num_tokens"] == len((package / "kjv.test.txt").read_text().replace("\n", " <eos> ").split())
    assert compose_config("kjv")["train"]["state"] == "carry"


def test_an_entry_point_must_name_its_recipe(package: Path) -> None:
    with pytest.raises(UserError, match="'broken' of an installed package does not load: AttributeError"):
        find_recipe("broken")
    with pytest.raises(UserError, match=r"'wrong' of the group waveform.recipes must name a Recipe\(name='wrong'"):
        find_recipe("wrong")
    with pytest.raises(UserError, match=r"choose one of enwik8, .*, folder, broken, kjv, wrong"):
        find_recipe("genesis")


@pytest.mark.parametrize(("tokens", "headline"), [("runes", "perplexity"), ("words", "bits_per_byte")])
def test_tokens_and_headline_go_together(tokens: str, headline: str) -> None:
    with pytest.raises(UserError, match=f"recipe mine: {tokens} with the headline {headline}; choose from bytes: "):
        Recipe("mine", "mine", "nothing", text_files, tokens, headline)
