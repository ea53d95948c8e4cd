"""The page as text: what is in it, what is left out, and that names are escaped wherever they stand."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report.conftest import page_of
from waveform.analyses.nll_by_place import NllByPlace
from waveform.audio.audio_format import AudioFormat
from waveform.report_page.charts import attention_chart, learning_chart, place_chart
from waveform.report_page.page import Page, PlayerRow, Table, Writing, render, require_page, settings_tables, write_page
from waveform.runs.learning_curves import LearningCurve
from waveform.speech.report import player
from waveform.system.errors import UserError

NAME = "<b>a</b>\"'&"


def test_names_are_escaped_and_nothing_is_loaded() -> None:
    texts = {"writings": [Writing(NAME, NAME, [(NAME, NAME)])], "tables": {NAME: Table([NAME], [[NAME]], note=NAME)}}
    html = render(page_of([NAME], title=NAME, **texts))
    assert "<b>" not in html and html.count("&lt;b&gt;") > 10
    assert re.findall(r"(?:src|href)=\"(?!data:)", html) == []
    assert "default-src &#39;none&#39;" in html and "http://" not in html and "https://" not in html


def test_three_runs_of_four_sounds_are_under_5_mb() -> None:
    """With continuations of four recordings: 28 sounds of 2 s. Noise of -26 dB, louder than speech, packs badly."""
    random = np.random.default_rng(0)
    players = []
    for i in range(28):
        noise = AudioFormat().encode(0.05 * random.standard_normal(48_000))
        players.append(player(str(i % 3), AudioFormat().decode(noise), 24_000))
    html = render(page_of(["0", "1", "2"], players=[PlayerRow("noise", players)]))
    assert 2e6 < len(html.encode()) < 4.5e6  # half a megabyte is left for charts


def test_what_is_empty_is_left_out() -> None:
    tables = {"Comparison": Table(["model"], [["a"]]), "By label": None}
    html = render(Page(labels=["a"], made_of="", tables=tables, settings=settings_tables(["a"], [{}])))
    for section in ("listen", "read", "by-label"):
        assert f'id="{section}"' not in html
    assert 'id="comparison"' in html and 'id="settings"' in html


def test_settings_that_differ_stand_apart() -> None:
    configs = [{"seed": 0, "model": {"name": "ct", "memory": 64}}, {"seed": 0, "model": {"name": "wavenet"}}]
    different, same = settings_tables(["a", "b"], configs)
    assert different.rows == [["model.memory", "64", "–"], ["model.name", "ct", "wavenet"]]
    assert same.rows == [["seed", "0"]]


def test_charts_follow_the_page_from_light_to_dark() -> None:
    places = {
        label: NllByPlace([0, 2, 4], np.array([[2.0, 2.0 - i]] * 6), np.full((6, 2), 2))
        for i, label in enumerate(["$a", "_b"])
    }
    svg = base64.b64decode(place_chart(places, unit="sample", unit_s=0.5).picture.partition(",")[2]).decode()
    assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg and "var(--ink)" in svg
    assert "#000000" not in svg and "$a" in svg and "_b" in svg and "seconds since" in svg


def test_what_cannot_be_drawn_has_no_chart() -> None:
    absent = [{"label": "wavenet", "attention_by_position": {"absent": "the model has no attention"}}]
    assert attention_chart(absent) is None
    assert learning_chart([("a", LearningCurve([], [], [], [], []))], unit="sample") is None
    assert learning_chart([("a", LearningCurve([1], [1], [64.0], [1.0], [2.0]))], unit="sample") is not None


def test_names_that_are_not_utf_8_are_written_and_where_a_link_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "new" / "page.html", tmp_path / "link.html"
    write_page(path, page_of(["\udcff"]))
    assert "\\udcff" in path.read_text(encoding="utf-8")
    link.symlink_to("page.html")
    write_page(link, page_of(["one"]))
    assert link.is_symlink() and (tmp_path / "page.html").is_file()


def test_only_its_own_pages_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    require_page(path)
    write_page(path, page_of(["a" * 10_000]))
    require_page(path)
    for content in (b"", b"notes on <html>"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a page that report wrote"):
            require_page(path)
