"""The pages under docs/ show what works: what docs/extending.md has is run, and what docs/papers.md names exists."""

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest import MonkeyPatch

import recipes.cli
import waveform.cli
from recipes.reinforcement import AGENTS_STUDY
from recipes.reinforcement import RECIPES as AGENTS
from recipes.reinforcement.settings import compose_config as compose_agent_config
from recipes.studies.catalogue import find_study
from recipes.text import compose_config
from tests.calling import write_speech
from tests.docs_settings import page
from tests.recipes.corpus_files import write_folder
from waveform.command.table import parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCK = re.compile(r"(?:^`(?P<file>[^`\n]+)`\n\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLES = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
PAPERS = (ROOT / "docs" / "papers.md").read_text()
# What each paper has: the numbers of its sections, appendices, tables and figures.
CONTENTS = {
    "Rae": ("1 2 3.1 3.2 3.3 4 4.1 4.2 5 5.1 5.2 5.3 5.4 5.5 5.5.1 5.6 5.7 6", "ABCDE", 10, 6),
    "Dai": ("1 2 3.1 3.2 3.3 4 4.1 4.2 4.3 4.4 4.5 5", "ABCDE", 13, 7),
}
COMMANDS = {"waveform": waveform.cli.VERBS, "recipes": recipes.cli.VERBS}


def blocks(title: str) -> Iterator[tuple[str | None, str, str]]:
    """(file name or None, language, text) of every code block in one section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return ((block["file"], block["language"], block["body"]) for block in BLOCK.finditer(section))


def forget_installed(site: Path) -> None:
    """Other tests have packages of the same names."""
    for module in site.glob("*.py"):
        sys.modules.pop(module.stem, None)


def install(project: Path, site: Path) -> None:
    """Make importable what `pip install -e` would, without a network: modules and entry points, in `site`."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for module in project.glob("*.py"):
        (site / module.name).symlink_to(module)
    forget_installed(site)
    info = site / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n")
    groups = metadata["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    """A folder with the audio and the text that the commands name, and an empty `site` for installed packages."""
    (tmp_path / "site").mkdir()
    write_speech(tmp_path / "AUDIO_DIR")
    write_folder(tmp_path, {f"TEXT_DIR/{i}.txt": "in the beginning was the word " * (200 + i) for i in range(4)})
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path
    forget_installed(tmp_path / "site")


def run(command: str, place: Path, monkeypatch: MonkeyPatch) -> None:
    """Run one line of a shell block in `place`."""
    words = shlex.split(command, comments=True)
    if words[:3] == ["pip", "install", "-e"]:
        install(place / words[3], place / "site")
        return
    program, arguments = (waveform, words[1:]) if words[0] == "waveform" else (recipes, words[3:])
    monkeypatch.chdir(place)
    assert program.cli.main(arguments) == 0, command


def test_the_settings_are_what_their_command_writes() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page()
    (help_text,) = (verb.epilog for verb in recipes.cli.VERBS if verb.name == "prepare")
    assert set(re.findall(r"corpus\.\w+", help_text)) <= set(quoted(page()))


def test_every_section_has_files_and_commands() -> None:
    assert len(TITLES) == 4
    for title in TITLES:
        found = list(blocks(title))
        assert any(file for file, _, _ in found) and any(language == "sh" for _, language, _ in found), title


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_example_works(title: str, place: Path, monkeypatch: MonkeyPatch) -> None:
    """Everything in the section, from top to bottom."""
    for file, language, body in blocks(title):
        if file is not None:
            write_folder(place, {file: body})
        elif language == "sh":
            for command in body.splitlines():
                run(command, place, monkeypatch)


def rows(paper: str) -> Iterator[list[str]]:
    """The cells of every line of a paper's table: item, where, command, test."""
    (section,) = re.findall(rf"^## [^\n]*\({paper} et al.*?(?=^## |\Z)", PAPERS, re.MULTILINE | re.DOTALL)
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and cells[0] not in ("item", "---"):
            yield cells


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("paper", CONTENTS)
def test_every_section_table_and_figure_has_its_line(paper: str) -> None:
    sections, appendices, num_tables, num_figures = CONTENTS[paper]
    named = " ".join(cells[0].split(":")[0] for cells in rows(paper))
    listed: dict[str, set[str]] = {kind: set() for kind in ("Section", "Appendix", "Table", "Figure")}
    for kind, numbers in re.findall(r"(Section|Appendix|Table|Figure)s? ((?:[A-E\d.]+(?:, | and )?)+)", named):
        listed[kind] |= set(re.split(r", | and ", numbers.rstrip(", ")))
    assert set(sections.split()) <= listed["Section"] and set(appendices) <= listed["Appendix"]
    assert listed["Table"] == {str(i + 1) for i in range(num_tables)}
    assert listed["Figure"] == {str(i + 1) for i in range(num_figures)}


@pytest.mark.parametrize("paper", CONTENTS)
def test_what_a_line_names_exists(paper: str) -> None:
    for _, where, _, tests in rows(paper):
        assert all((ROOT / path).is_file() for path in quoted(where)), where
        for path, _, name in (test.partition("::") for test in quoted(tests)):
            assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


@pytest.mark.parametrize("paper", CONTENTS)
def test_commands_of_a_line_parse(paper: str) -> None:
    """Their options are the verb's, unabbreviated; studies exist, and settings of training on text compose."""
    commands = {command for cells in rows(paper) for command in quoted(cells[2])}
    assert len(commands) > 10
    for command in sorted(commands):
        words = shlex.split(command)
        program = words.pop(0) if words[0] == "waveform" else "recipes"
        given = parser(program, "", COMMANDS[program]).parse_args(words)
        options = {a.flag for verb in COMMANDS[program] if verb.name == given.verb for a in verb.arguments}
        assert {word for word in words if word.startswith("--")} <= options, command
        if program == "recipes" and given.verb == "train":
            recipe = given.source.name  # `data/enwik8`, or that of an agent
            compose = compose_agent_config if recipe in AGENTS else compose_config
            compose(recipe, vars(given).get("overrides", ()))
        if given.verb == "study" and given.name != AGENTS_STUDY:
            find_study(given.name)
