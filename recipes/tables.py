"""Tables as text whose rows are dictionaries, so that a column's name stands beside what is in it."""

from collections.abc import Mapping, Sequence

from waveform.system.console import table


def as_table(rows: Sequence[Mapping[str, str]], *below: str) -> str:
    """Rows, which all have the columns of the first, and lines below them."""
    return "\n".join([*table(list(rows[0]), [list(row.values()) for row in rows]), *below])
