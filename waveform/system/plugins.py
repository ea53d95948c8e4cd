"""What installed packages add: `entry_points` as importlib's, but reads the files of all packages only once."""

import functools
import sys
from importlib import metadata
from typing import Any


def entry_points(**parameters: Any) -> metadata.EntryPoints:
    """The entry points of a group, or of a group and a name; parameters: as of `importlib.metadata.entry_points`."""
    return _of_all_packages(tuple(sys.path)).select(**parameters)


@functools.lru_cache(maxsize=1)
def _of_all_packages(path: tuple[str, ...]) -> Any:
    return metadata.entry_points()
