"""Packages of which waveform uses more than their public interface: a warning of versions that were not tested."""

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

_BOUNDED = ("numba", "torch")


def warn_of_untested() -> None:
    """Print a line for each of them whose version is not one that waveform was tested with."""
    try:
        needed = [Requirement(line) for line in requires("waveform") or ()]
        for one in needed:
            if one.name in _BOUNDED and not one.specifier.contains(version(one.name), prereleases=True):
                print(
                    f"warning: waveform is tested with {one.name}{one.specifier}, and this is {version(one.name)}; if "
                    f'something fails, try pip install "{one.name}{one.specifier}"',
                    file=sys.stderr,
                )
    except PackageNotFoundError:  # run from a folder, not installed
        return
