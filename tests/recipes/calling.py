"""Calls `python -m recipes` within the test's process."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import main


def run(*arguments: Any) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def figures_of(json_file: Path, *arguments: Any) -> Any:
    """What a command writes into the file."""
    run(*arguments, "--json", json_file)
    return json.loads(json_file.read_bytes())


def mistake(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that must fail with exit code 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]
