from pathlib import Path

from tests.benchmarks.scaling import table


def test_the_readme_has_what_the_command_prints() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text().splitlines()
    assert [line for line in table() if line not in readme] == []
