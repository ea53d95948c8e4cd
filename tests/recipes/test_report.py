"""`python -m recipes report`: a page of runs on words, without players."""

import re
from pathlib import Path

import pytest

from tests.recipes.calling import figures_of, mistake, run
from tests.recipes.corpus_files import write_source

SHORT = ["train.max_steps=4", "train.evaluate_every=4", "train.checkpoint_every=4"]


@pytest.mark.slow
def test_a_page_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source("wikitext103", tmp_path / "source")
    run("prepare", "wikitext103", source, tmp_path / "data", "corpus.check=false")
    for name, seed in (("<b>a", 0), ("b", 1)):
        run("train", tmp_path / "data", tmp_path / name, "preset=smoke", f"seed={seed}", *SHORT)
    options = ["--documents", 2, "--prefix", 8, "--tokens", 5, "--split", "train", "--out", tmp_path / "page.html"]
    figures = figures_of(tmp_path / "f.json", "report", tmp_path / "<b>a", tmp_path / "b", *options)
    html = (tmp_path / "page.html").read_text()
    assert "<b>" not in html and "<audio" not in html and 'id="listen"' not in html
    section = re.search(r'<section id="read">.*?</section>', html, re.DOTALL)
    assert section is not None and section[0].count("<details") == 2
    assert section[0].count("<h3>") == 6 and section[0].count("as it goes on") == 2  # two runs and the truth, twice
    assert 'id="frequencies"' in html and "gain over the first" in html
    assert "Attention by position" in html
    assert "<td>seed</td>" in html
    assert len(figures["comparison"]) == len(figures["by_place"]) == len(figures["attention"]) == 2
    assert figures["by_place"][0]["edges"][:3] == [0, 64, 128]
    assert "is named twice" in mistake(["report", tmp_path / "b", tmp_path / "b"], capsys)
    config = tmp_path / "b" / "config.yaml"
    assert f"{config} exists, and is not a page" in mistake(["report", tmp_path / "b", "--out", config], capsys)
    run("report", tmp_path / "b", "--documents", 0, "--out", tmp_path / "page.html")  # its own is replaced
    assert "--tokens is 0" in mistake(["report", tmp_path / "b", "--tokens", 0], capsys)
