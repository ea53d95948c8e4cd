"""Topics of texts that are known to be about two things."""

from pathlib import Path

import numpy as np
import pytest

from tests.recipes.calling import figures_of, mistake

SEA, GARDEN = ["ship", "sail", "whale", "harbour", "anchor"], ["rose", "tulip", "soil", "spade", "meadow"]


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(20):
        words = random.choice(SEA if i % 2 else GARDEN, size=60)
        (folder / f"{i}.txt").write_text("the and of " + " ".join(words))
    return folder


def test_topics_are_what_the_texts_are_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_texts(tmp_path / "texts")
    found = figures_of(tmp_path / "t.json", "topics", folder, "--topics", 2)
    assert sorted(sorted(list(topic["words"])[:5]) for topic in found) == sorted([sorted(SEA), sorted(GARDEN)])
    assert sum(topic["share"] for topic in found) == pytest.approx(1)
    assert all(sum(topic["words"].values()) > 0.9 for topic in found)
    assert ", ".join(found[0]["words"]) in capsys.readouterr().out
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("alone")
    assert "contains 1 .txt files" in mistake(["topics", tmp_path / "one"], capsys)
    (tmp_path / "one" / "b.txt").write_text("of the")
    (tmp_path / "one" / "a.txt").write_text("of the")
    assert "no words that tell its documents apart" in mistake(["topics", tmp_path / "one"], capsys)
    assert "--topics is 0" in mistake(["topics", tmp_path, "--topics", 0], capsys)
