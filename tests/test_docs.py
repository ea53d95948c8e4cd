"""The pages under docs/ show what works: the files of docs/extending.md are written and its commands run."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from waveform.audio.demo_speech import demo_speech_dir

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCK = re.compile(r"(?:^`(?P<file>[^`\n]+)`\n\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLES = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)


def blocks(title: str) -> Iterator[tuple[str | None, str, str]]:
    """(file name or None, language, text) of every code block in one section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return ((block["file"], block["language"], block["body"]) for block in BLOCK.finditer(section))


def install(project: Path, site: Path) -> None:
    """Make importable what `pip install -e` would, without a network: modules and entry points, in `site`."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for module in project.glob("*.py"):
        (site / module.name).symlink_to(module)
    info = site / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n")
    groups = metadata["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the audio and the text that the commands name, and an empty `site` for installed packages."""
    (tmp_path / "site").mkdir()
    recordings = sorted(demo_speech_dir().rglob("*.flac"), key=lambda path: path.stat().st_size)
    for split, recording in zip(("train", "valid", "test"), recordings[-3:], strict=True):
        (tmp_path / "AUDIO_DIR" / split).mkdir(parents=True)
        (tmp_path / "AUDIO_DIR" / split / recording.name).symlink_to(recording)
    (tmp_path / "TEXT_DIR").mkdir()
    for i in range(4):
        (tmp_path / "TEXT_DIR" / f"{i}.txt").write_text("in the beginning was the word " * (200 + i))
    return tmp_path


def run(command: str, place: Path) -> None:
    """Run one line of a shell block in `place`."""
    words = shlex.split(command, comments=True)
    if words[:3] == ["pip", "install", "-e"]:
        install(place / words[3], place / "site")
        return
    program = {"waveform": [sys.executable, "-m", "waveform"], "python": [sys.executable]}[words[0]]
    path = os.pathsep.join([str(place / "site"), str(ROOT)])
    done = subprocess.run(
        [*program, *words[1:]], cwd=place, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_every_section_has_files_and_commands() -> None:
    assert len(TITLES) == 3
    for title in TITLES:
        found = list(blocks(title))
        assert any(file for file, _, _ in found) and any(language == "sh" for _, language, _ in found), title


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_example_works(title: str, place: Path) -> None:
    """Everything in the section, from top to bottom."""
    for file, language, body in blocks(title):
        if file is not None:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text(body)
        elif language == "sh":
            for command in body.splitlines():
                run(command, place)
