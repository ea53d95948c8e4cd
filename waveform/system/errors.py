"""Errors that end a command with one line: raised anywhere, printed by the command line with their exit code."""


class UserError(Exception):
    """A user's mistake. The message names the field or file, the value, and what to do about it."""

    exit_code = 2


class Trouble(UserError):
    """Not the user's mistake: a disk or another process failed. The message says what, and what may help."""

    exit_code = 1
