"""A real Chromium without a network, and pages of synthesised sounds to open in it."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.runs.conftest import speech as speech  # a fixture
from waveform.report_page.page import Page, Player, PlayerRow, Table
from waveform.speech.report import player

SECONDS = 1.2


def tone(label: str, *, hz: float, own_from_s: float = 0.0) -> Player:
    samples = (0.3 * np.sin(2 * np.pi * hz * np.arange(round(SECONDS * 24_000)) / 24_000)).astype(np.float32)
    return player(label, samples, 24_000, own_from_s=own_from_s)


def page_of(labels: list[str], *, title: str = "a beginning", **content: Any) -> Page:
    """Two rows of players, a comparison and settings, of runs with these names."""
    real = tone("real speech", hz=200)
    continued = [tone(label, hz=300 + 50 * i, own_from_s=0.3) for i, label in enumerate(labels)]
    free = [tone(label, hz=600 + 50 * i) for i, label in enumerate(labels)]
    given = {
        "tables": {"Comparison": Table(["model", "nats/sample"], [[label, "2.0000"] for label in labels])},
        "players": [PlayerRow(title, [real, *continued]), PlayerRow("from nothing", free)],
        "settings": (
            Table(["setting", *labels], [["model.name", *labels]]),
            Table(["setting", "all runs"], [["seed", "0"]]),
        ),
        **content,
    }
    return Page(labels=labels, made_of="sines", **given)


@pytest.fixture(scope="session")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """open_page(html, width=1200) -> selenium's driver of a Chromium that shows it, from a file, without a network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'waveform[test]'")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        # No package of Python's brings a browser; .ci/run installs one wherever it may.
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    folder = tmp_path_factory.mktemp("pages")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--mute-audio", "--disable-gpu",
                     "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                     f"--user-data-dir={folder / 'profile'}"):  # fmt: skip
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))

    def show(html: str, *, width: int = 1200) -> Any:
        path = folder / f"{len(list(folder.glob('*.html')))}.html"
        path.write_text(html)
        for old in folder.glob("*.json"):
            old.unlink()
        driver.set_window_size(width, 900)
        driver.get_log("browser")
        driver.get(path.as_uri())
        driver.folder = folder
        return driver

    yield show
    driver.quit()


@pytest.fixture
def tones() -> Page:
    return page_of(["compressive_transformer", "wavenet"])
