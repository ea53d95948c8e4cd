"""Every file, module and link of the project that a page, a docstring or a comment cites exists."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("waveform", "baselines", "recipes", "tests")
ENTRY_POINT_GROUPS = {f"waveform.{group}" for group in ("models", "configs", "recipes", "compressions", "domains")}
_FILE = re.compile(rf"(?<![\w/-])(?:{'|'.join(TOPS)}|docs|results)/[\w/.-]+\.(?:py|md|json|yaml|png)\b")
_NAME = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOPS)})(?:\.[a-zA-Z_]\w*)+")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def prose(source: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source.read_text()).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string):
            yield token.string


def exists(name: str) -> bool:
    """Whether `a.b.c` is an entry-point group, a package, a module, or a word in the module that `a.b` is."""
    if name in ENTRY_POINT_GROUPS:
        return True
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:i])
        if path.with_suffix(".py").is_file():
            return i == len(parts) or re.search(rf"\b{parts[i]}\b", path.with_suffix(".py").read_text()) is not None
        if path.is_dir():
            return i == len(parts) or parts[i] in (path / "__init__.py").read_text()
    return False


def stale(text: str, folder: Path) -> list[str]:
    """Return the citations in `text` that lead nowhere; links are relative to `folder`."""
    return [
        *(file for file in _FILE.findall(text) if not (ROOT / file).exists()),
        *(name for name in _NAME.findall(text) if not exists(name)),
        *(link for link in _LINK.findall(text) if not (folder / link).exists()),
    ]


def test_what_pages_cite_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(page for top in ("docs", "results", *TOPS) for page in (ROOT / top).rglob("*.md"))]
    found = {page.relative_to(ROOT).as_posix(): stale(page.read_text(), page.parent) for page in pages}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}


def test_what_docstrings_and_comments_cite_exists() -> None:
    sources = [source for top in TOPS for source in (ROOT / top).rglob("*.py") if source != Path(__file__)]
    found = {source.relative_to(ROOT).as_posix(): stale("\n".join(prose(source)), ROOT) for source in sources}
    assert {source: wrong for source, wrong in found.items() if wrong} == {}


# Where a paper says what a file sets or does: no one sees from a number alone that it is another section's.
SECTIONS = {
    "waveform/conf/preset/speech_paper.yaml": "Rae et al. 2019, section 5.6:",
    "waveform/engine/train_config.py": "Rae et al. 2019, section 5)",
    "waveform/models/compression.py": "Rae et al. 2019, section 3.2)",
    "recipes/verbs/sample.py": "Rae et al. 2019, appendix E",
    "waveform/models/attention.py": "Dai et al. 2019, section 3.3 and appendix B",
    "waveform/analyses/context.py": "Dai et al. 2019, section 4.3 and appendix C",
    "waveform/analyses/state_reuse.py": "Dai et al. 2019, section 4.5, Table 9",
}


@pytest.mark.parametrize(("file", "citation"), SECTIONS.items())
def test_sections_are_those_of_the_papers(file: str, citation: str) -> None:
    text = (ROOT / file).read_text()
    assert citation in text
    paper = citation.partition(", ")[0]
    assert set(re.findall(rf"{paper}, section [\d.]*\d", text)) <= set(re.findall(r".* section [\d.]*\d", citation))


def test_recipes_of_the_papers_preset_cite_their_own_sections() -> None:
    text = (ROOT / "recipes/conf/preset/paper.yaml").read_text()
    recipes = re.findall(r"((?:^  # .*\n)+)  (\w+):", text, re.MULTILINE)
    assert {recipe: re.findall(r"Rae et al. 2019, section [\d.]*\d", comment) for comment, recipe in recipes} == {
        "enwik8": ["Rae et al. 2019, section 5.2"], "wikitext103": ["Rae et al. 2019, section 5.3"],
        "pg19": ["Rae et al. 2019, section 5.1"], "lm1b": [], "ptb": [],
    }  # fmt: skip
    assert text.count("Rae et al. 2019, section") == 4 and "Rae et al. 2019, section 5:" in text


def test_a_stale_citation_is_found() -> None:
    text = "`waveform/verbs/train.py`, waveform.verbs.train.train, [x](docs/symptoms.md); waveform/gone.py"
    assert stale(f"{text} waveform.verbs.gone waveform.verbs.train.gone [y](gone.md)", ROOT) == [
        "waveform/gone.py", "waveform.verbs.gone", "waveform.verbs.train.gone", "gone.md",
    ]  # fmt: skip
