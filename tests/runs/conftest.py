"""A finished run on text, for the tests of names and of origins."""

from pathlib import Path

import pytest

from tests.faults.small_runs import make_text_run


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/, a finished run on data/."""
    place = tmp_path_factory.mktemp("text")
    make_text_run(place)
    return place
