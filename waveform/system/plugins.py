"""What installed packages add: `entry_points` as importlib's, which reads the files of all packages at every call."""

import functools
import sys
from importlib import metadata
from typing import Any


def entry_points(**parameters: Any) -> metadata.EntryPoints:
    """Those of a group, or of a name too; parameters: as of `importlib.metadata.entry_points`."""
    return _of_all_packages(tuple(sys.path)).select(**parameters)


@functools.lru_cache(maxsize=1)
def _of_all_packages(path: tuple[str, ...]) -> Any:
    return metadata.entry_points()
