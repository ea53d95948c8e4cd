"""docs/settings.md is what its command writes."""

from pathlib import Path

from tests.docs_settings import SECTIONS, comments, page


def test_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[1] / "docs/settings.md").read_text() == page()


def test_comments_above_and_behind_a_field_are_read() -> None:
    (train,) = SECTIONS[0][2]
    assert (
        comments(train)["max_steps"].startswith("Stop after so many steps") and comments(train)["log_every"] == "steps"
    )
