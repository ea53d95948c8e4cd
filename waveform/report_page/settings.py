"""The settings of several runs as two tables of a report: those that differ, and those that all have in common."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from waveform.report_page.page import Table
from waveform.system.console import printable

_ABSENT = "–"


def settings_tables(labels: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> tuple[Table, Table]:
    """Return (different, same): a row for each setting, by its dotted name; a column for each run, or one for all."""
    flat = [dict(_flatten(config)) for config in configs]
    names = sorted({name for settings in flat for name in settings})
    values = {name: [settings.get(name, _ABSENT) for settings in flat] for name in names}
    different = [[name, *shown] for name, shown in values.items() if len(set(shown)) > 1]
    same = [[name, shown[0]] for name, shown in values.items() if len(set(shown)) == 1]
    return Table(["setting", *labels], different), Table(["setting", "all runs" if len(flat) > 1 else "value"], same)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield printable(f"{prefix}{key}"), printable(str(value))
