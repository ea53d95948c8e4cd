"""Mistakes that a user can mend: raised anywhere, printed by the command line as one line with exit code 2."""


class UserError(Exception):
    """A mistake of the user's. The message names the field or file, the value, and what to do about it."""
