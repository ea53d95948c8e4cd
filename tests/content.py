"""What folders hold, to be compared; apart from tests/calling.py, for forked cases need not import pytest."""

from pathlib import Path


def content(folder: Path) -> dict[str, bytes | None]:
    """What every file under a folder holds; None for each folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}
