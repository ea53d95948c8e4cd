"""Topics of texts that are known to be about two things."""

from pathlib import Path

import numpy as np
import pytest

from tests.recipes.calling import Capsys, figures_of, mistake
from tests.recipes.corpus_files import write_folder

SEA, GARDEN = ["ship", "sail", "whale", "harbour", "anchor"], ["rose", "tulip", "soil", "spade", "meadow"]


def test_topics_are_what_the_texts_are_about(tmp_path: Path, capsys: Capsys) -> None:
    random = np.random.default_rng(0)
    words = [random.choice(SEA if i % 2 else GARDEN, size=60) for i in range(20)]
    texts = {f"{i}.txt": "the and of " + " ".join(drawn) for i, drawn in enumerate(words)}
    found = figures_of(tmp_path / "t.json", "topics", write_folder(tmp_path / "texts", texts), "--topics", 2)
    assert sorted(sorted(list(topic["words"])[:5]) for topic in found) == sorted([sorted(SEA), sorted(GARDEN)])
    assert sum(topic["share"] for topic in found) == pytest.approx(1)
    assert all(sum(topic["words"].values()) > 0.9 for topic in found)
    assert ", ".join(found[0]["words"]) in capsys.readouterr().out
    other = write_folder(tmp_path / "other", {"a.txt": "alone"})
    assert "contains 1 .txt files" in mistake(["topics", other])
    write_folder(other, {"a.txt": "of the", "b.txt": "of the"})
    assert "no words that tell its documents apart" in mistake(["topics", other])
    assert "--topics is 0" in mistake(["topics", tmp_path, "--topics", 0])
