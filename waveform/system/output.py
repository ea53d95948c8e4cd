"""Files that a user named on the command line, written in one step and in a new folder if need be."""

import json
from os.path import realpath
from pathlib import Path
from typing import Any

from waveform.system.atomic import explain_write_errors, require_writable, write_file
from waveform.system.errors import UserError


def check_files(*, json_file: Path | str | None, plot_file: Path | None = None, page: Path | None = None) -> None:
    """Raises UserError for --json, --plot and a page that cannot all be written, before any work is done."""
    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise UserError(f"--plot {plot_file} is not a .png; only PNG files are drawn")
    require_writable(json_file, option="--json")
    require_writable(plot_file, option="--plot")
    for what, other in (("plot", plot_file), ("page", page)):
        if json_file is not None and other is not None and realpath(json_file) == realpath(other):
            raise UserError(f"the figures and the {what} would be one file, {other}; give --json another name")


def write_json(path: Path | str | None, content: Any) -> None:
    """Write `content` as indented JSON; does nothing for None. Raises UserError if it cannot be written."""
    if path is not None:
        write_bytes(Path(path), (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, or what a link leads to, in one step, in a new folder if need be.

    Raises UserError if it cannot be written.
    """
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(Path(realpath(path)), content)
