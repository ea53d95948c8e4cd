"""The report as one HTML file: what it shows, as plain data that a verb fills in, and how the template becomes a page.

The page loads nothing and runs nothing but its own script: a content security policy names that script by its digest,
so not even markup that got past the escaping of names would be executed.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from waveform.runs.settings import leaves
from waveform.system.atomic import require_writable
from waveform.system.console import printable
from waveform.system.errors import UserError
from waveform.system.output import write_bytes

_HERE = Path(__file__).parent
_GENERATOR = b'<meta name="generator" content="waveform report">'  # in page.html
_NUM_COLOURS = 10  # of runs, in style.css; the same as matplotlib's


class Player(NamedTuple):
    """One sound and its picture."""

    label: str  # of the run, or of the real speech
    audio: str  # data URI
    picture: str  # data URI of its mel spectrogram
    duration_s: float
    own_from_s: float = 0.0  # where the run's own sound begins, after a beginning that it was given


class PlayerRow(NamedTuple):
    """Sounds to compare with each other, at the same position."""

    title: str
    players: Sequence[Player]


class Writing(NamedTuple):
    """Texts to compare with each other."""

    title: str
    beginning: str  # what all of them continue; may be empty
    continuations: Sequence[tuple[str, str]]  # label, text


class Chart(NamedTuple):
    """A picture with a title and a line that says what it shows."""

    title: str
    note: str
    picture: str  # data URI


class Table(NamedTuple):
    """A table of text, with a line below."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """All that a report shows; what is empty is left out."""

    labels: Sequence[str]  # of the runs, each of which has its colour
    made_of: str  # a line on the runs, the data and the samples
    settings: tuple[Table, Table]  # in which the runs differ, and the same in all
    tables: Mapping[str, Table | None]  # title -> table, of NLL and more; None: nothing to show
    symptoms: Sequence[str] = ()  # what is wrong with runs, and what helps
    players: Sequence[PlayerRow] = ()
    writings: Sequence[Writing] = ()
    charts: Sequence[Chart] = ()


def settings_tables(labels: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> tuple[Table, Table]:
    """Return (different, same): a row for each setting, by its dotted name; a column for each run, or one for all."""
    flat = [{printable(name): printable(str(value)) for name, value in leaves(config)} for config in configs]
    names = sorted({name for settings in flat for name in settings})
    values = {name: [settings.get(name, "–") for settings in flat] for name in names}
    different = [[name, *shown] for name, shown in values.items() if len(set(shown)) > 1]
    same = [[name, shown[0]] for name, shown in values.items() if len(set(shown)) == 1]
    return Table(["setting", *labels], different), Table(["setting", "all runs" if len(flat) > 1 else "value"], same)


def require_each_once(run_dirs: Sequence[Path | str]) -> None:
    """Raises UserError if a run is named twice."""
    everyone = [Path(run_dir).resolve() for run_dir in run_dirs]
    for run_dir in run_dirs:
        if everyone.count(Path(run_dir).resolve()) > 1:
            raise UserError(f"{run_dir} is named twice; name each run once")


def require_page(path: Path) -> None:
    """Raises UserError, before any work is done, if no page can be written there or it would replace another file."""
    require_writable(path, option="--out")
    if path.exists() and not (path.is_file() and _GENERATOR in _beginning(path)):
        raise UserError(f"{path} exists, and is not a page that report wrote; give another --out, or move it away")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1024)


def write_page(path: Path, page: Page) -> None:
    """Write the page in one step. Raises UserError if it cannot be written."""
    write_bytes(path, render(page).encode(errors="backslashreplace"))  # a file name need not be valid UTF-8


def render(page: Page) -> str:
    """The page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    policy = (
        f"default-src 'none'; img-src data:; media-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    sounds = "".join(player.audio for row in page.players for player in row.players)
    return environment.get_template("page.html").render(
        page=page,
        policy=policy,
        style=Markup(style),  # our own, as is the script; all else is escaped
        script=Markup(script),
        name_of_sounds=hashlib.blake2b(sounds.encode(), digest_size=8).hexdigest(),
        colours={label: f"c{i % _NUM_COLOURS}" for i, label in enumerate(page.labels)},
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_uri(content: bytes, *, kind: str) -> str:
    """`content` as a data URI; kind: its MIME type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
