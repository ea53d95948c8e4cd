"""What ends a command with one line: raised anywhere, printed by the command line with the error's exit code."""


class UserError(Exception):
    """A mistake of the user's. The message names the field or file, the value, and what to do about it."""

    exit_code = 2


class Trouble(UserError):
    """No mistake of the user's: a disk or another process fails. The message says what, and what may help."""

    exit_code = 1
