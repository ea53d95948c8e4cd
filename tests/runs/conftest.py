"""Finished runs on speech and on text, which no test changes."""

from pathlib import Path

import pytest

from tests.faults.small_runs import make_speech_run, make_text_run


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/, a finished run on data/, which is of audio/."""
    place = tmp_path_factory.mktemp("speech")
    make_speech_run(place)
    return place


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/, a finished run on data/."""
    place = tmp_path_factory.mktemp("text")
    make_text_run(place)
    return place
