"""Errors that end a command with one line: raised anywhere, printed by the command line with their exit code."""

from pathlib import Path

_given: dict[str, str] = {}  # folder -> what it was made from


def alias_in_messages(folder: Path, given: Path) -> None:
    """Have messages say `given`, which the user knows, instead of a temporary `folder` made from it."""
    _given[str(folder)] = str(given)


class UserError(Exception):
    """A user's mistake. The message names the field or file, the value, and what to do about it."""

    exit_code = 2

    def __str__(self) -> str:
        message = super().__str__()
        for folder, given in _given.items():
            message = message.replace(folder, given)
        return message


class Trouble(UserError):
    """Not the user's mistake: a disk or another process failed. The message says what, and what may help."""

    exit_code = 1
