"""What the tests of several studies have in common."""

from types import SimpleNamespace

import pytest

from recipes.studies import children
from tests.recipes.calling import run

Calls = list[tuple[str, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The study's calls, made in this process one after the other."""
    return calls_in_this_process(monkeypatch)


def calls_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The same for a part of a test."""
    calls: Calls = []

    def call(self: children.Children, *arguments: str) -> None:
        calls.append(arguments)
        run(*arguments)

    monkeypatch.setattr(children.Children, "call", call)
    monkeypatch.setattr(
        children, "ThreadPoolExecutor", lambda jobs: SimpleNamespace(map=map, shutdown=lambda **_: None)
    )
    return calls
