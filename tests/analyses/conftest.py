"""Small token sets for the tests of analyses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import write_tokens
from waveform.engine.token_set import TokenSet


@pytest.fixture
def token_set(tmp_path: Path) -> Callable[[list[int]], TokenSet]:
    """token_set([lengths]) -> TokenSet."""
    return lambda lengths: write_tokens(tmp_path / "a.shard", lengths)
