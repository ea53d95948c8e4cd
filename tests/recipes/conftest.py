"""What the tests of several verbs on text have in common."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.studies import children
from tests.recipes.calling import run
from tests.recipes.corpus_files import write_source

Calls = list[tuple[str, ...]]


@pytest.fixture(scope="session", name="data")
def prepare_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of bytes, of a folder of texts."""
    place = tmp_path_factory.mktemp("texts")
    run("prepare", "folder", write_source("folder", place / "source"), place / "data")
    return place / "data"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The study's calls, made in this process one after the other."""
    calls: Calls = []

    def call(self: children.Children, *arguments: str) -> None:
        calls.append(arguments)
        run(*arguments)

    monkeypatch.setattr(children.Children, "call", call)
    monkeypatch.setattr(
        children, "ThreadPoolExecutor", lambda jobs: SimpleNamespace(map=map, shutdown=lambda **_: None)
    )
    return calls
