"""The scaling tables in docs/performance.md are what the command prints."""

from pathlib import Path

from tests.benchmarks.scaling import SHARES, table


def test_the_page_has_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text().splitlines()
    assert [line for share in SHARES for line in table(share) if line not in page] == []
