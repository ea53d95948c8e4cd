"""The page in a real Chromium, opened from a file, without a network: it plays, seeks, switches, hides and exports."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.faults.forks import wait_for
from tests.report.conftest import SECONDS, page_of
from waveform.analyses.nll_by_place import NllByPlace
from waveform.report_page.charts import learning_chart, place_chart
from waveform.report_page.page import Page, Writing, render
from waveform.report_page.ratings import rate
from waveform.runs.learning_curves import LearningCurve

pytestmark = pytest.mark.slow

HOSTILE = [
    "</script><script>window.executed=1</script>",
    "\"><img src=x onerror='window.executed=2'>",
    "$\\frac{ {{ 7 * 7 }} ' onmouseover=window.executed=3 x='",
]

SHOWN = "[...document.querySelectorAll('.player')]"  # in the order of the page


@pytest.fixture
def driver(open_page: Callable[..., Any], tones: Page) -> Any:
    """That of a Chromium which shows the page of the tones."""
    return open_page(render(tones))


def time_of(driver: Any, number: int) -> float:
    return float(driver.execute_script(f"return players[{number}].querySelector('audio').currentTime"))


def playhead_of(driver: Any, number: int) -> float:
    left = f"players[{number}].querySelector('.playhead').style.left"
    return float(driver.execute_script(f"return parseFloat({left}) / 100"))


def is_playing(driver: Any, number: int) -> bool:
    return not driver.execute_script(f"return players[{number}].querySelector('audio').paused")


def click(driver: Any, selector: str, number: int = 0, *, share: float = 0.5) -> None:
    """Click an element at a share of its width, as a mouse does."""
    from selenium.webdriver import ActionChains

    element = driver.find_elements("css selector", selector)[number]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    offset = round((share - 0.5) * element.size["width"])
    ActionChains(driver).move_to_element_with_offset(element, offset, 0).click().perform()


def press(driver: Any, key: str) -> None:
    from selenium.webdriver import ActionChains, Keys

    ActionChains(driver).send_keys(getattr(Keys, key, key)).perform()


def test_it_opens_without_a_network_or_a_complaint(driver: Any) -> None:
    assert driver.title == "compressive_transformer, wavenet"
    assert driver.get_log("browser") == []
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert driver.execute_script("return [...document.images].every(image => image.complete && image.naturalWidth)")


def test_a_player_plays_to_its_end(driver: Any) -> None:
    click(driver, ".play", 0)
    wait_for(lambda: 0 < playhead_of(driver, 0) < 0.9)
    places = [playhead_of(driver, 0)]
    wait_for(lambda: places.append(playhead_of(driver, 0)) or places[-1] == pytest.approx(1, abs=0.02))
    assert places == sorted(places) and len(set(places)) > 2
    wait_for(lambda: not is_playing(driver, 0))
    assert time_of(driver, 0) == pytest.approx(SECONDS, abs=0.05)
    assert driver.get_log("browser") == []


def test_seeking_by_mouse_and_keys(driver: Any) -> None:
    click(driver, ".track", 1, share=0.5)
    assert time_of(driver, 1) >= 0.5 * SECONDS - 0.02  # at once, and not because it played until there
    wait_for(lambda: is_playing(driver, 1))
    press(driver, "SPACE")
    wait_for(lambda: not is_playing(driver, 1))
    at = time_of(driver, 1)
    press(driver, "ARROW_LEFT")
    wait_for(lambda: time_of(driver, 1) == pytest.approx(at - 0.25, abs=0.01))
    for _ in range(5):
        press(driver, "ARROW_LEFT")
    wait_for(lambda: time_of(driver, 1) == 0 == playhead_of(driver, 1))
    press(driver, "ARROW_RIGHT")
    wait_for(lambda: playhead_of(driver, 1) == pytest.approx(0.25 / SECONDS, abs=0.01))


def test_switching_keeps_the_position(driver: Any) -> None:
    """Paused or playing, within a row; another row's player begins where it was."""
    click(driver, ".track", 0, share=0.4)
    wait_for(lambda: is_playing(driver, 0))
    press(driver, "SPACE")
    wait_for(lambda: not is_playing(driver, 0))
    at = time_of(driver, 0)
    press(driver, "ARROW_DOWN")
    wait_for(lambda: time_of(driver, 1) == pytest.approx(at, abs=0.001))
    assert not is_playing(driver, 1)
    press(driver, "ARROW_LEFT")
    press(driver, "SPACE")
    wait_for(lambda: is_playing(driver, 1))
    press(driver, "ARROW_DOWN")
    wait_for(lambda: is_playing(driver, 2) and time_of(driver, 2) > at - 0.25)
    assert not is_playing(driver, 1)
    click(driver, ".play", 3)
    wait_for(lambda: is_playing(driver, 3))
    assert not is_playing(driver, 2) and time_of(driver, 3) < time_of(driver, 2)


def test_blind_mode_begins_anew(driver: Any) -> None:
    """Neither what was heard before, nor where a name stands, tells a sound from the others."""
    click(driver, ".track", 1, share=0.5)
    wait_for(lambda: is_playing(driver, 1))
    click(driver, "#blind")
    at_rest = {(0, 0, False)}
    wait_for(lambda: {(time_of(driver, i), playhead_of(driver, i), is_playing(driver, i)) for i in range(5)} == at_rest)
    assert not driver.find_elements("css selector", ".player.current")
    lefts = driver.execute_script(f"""return {SHOWN}.map(player => {{
        const text = document.createRange();
        text.selectNode(player.querySelector(".label").lastChild);
        return Math.round(text.getBoundingClientRect().left - player.getBoundingClientRect().left);
    }})""")
    assert len(set(lefts)) == 1


def test_blind_mode_hides_names_and_exports(driver: Any) -> None:
    rows = driver.find_element("id", "rows")
    before = rows.text
    assert "wavenet" in before and "real speech" in before and "a beginning" in before
    assert not driver.find_element("css selector", ".rating").is_displayed()
    orders = set()
    for _ in range(12):  # shuffled anew each time
        click(driver, "#blind")
        hidden = rows.text
        assert not any(name in hidden for name in ("wavenet", "compressive", "real", "beginning", "nothing"))
        assert "Sound A" in hidden and "Row 1" in hidden
        hints = rows.find_elements("css selector", ".track img, .own, .swatch")
        assert len(hints) == 15 and not any(hint.is_displayed() for hint in hints)
        spoken = [element.accessible_name for element in rows.find_elements("css selector", ".player")]
        assert sorted(spoken) == ["Sound A", "Sound A", "Sound B", "Sound B", "Sound C"]
        orders.add(tuple(driver.execute_script(f"return {SHOWN}.map(player => players.indexOf(player))")))
        click(driver, "#blind")
    assert rows.text == before and len(orders) > 3
    click(driver, "#blind")
    for number, rating in {0: 5, 1: 2, 2: 1, 3: 3}.items():
        place = driver.execute_script(f"return {SHOWN}.indexOf(players[{number}])")
        if number:
            click(driver, f".player input[value='{rating}']", place)
        else:  # by key
            click(driver, ".track", place)
            press(driver, str(rating))
    assert "4 of 5 rated" in driver.find_element("id", "rated").text
    click(driver, "#export")
    path = wait_for(lambda: next(driver.folder.glob("ratings*.json"), None))
    wait_for(lambda: path.stat().st_size)
    exported = json.loads(path.read_text())
    assert sorted((one["run"], one["row"], one["rating"]) for one in exported["ratings"]) == [
        ("compressive_transformer", 0, 2), ("compressive_transformer", 1, 3), ("real speech", 0, 5), ("wavenet", 0, 1)
    ]  # fmt: skip
    assert [entry["run"] for entry in rate([path])] == ["real speech", "compressive_transformer", "wavenet"]
    assert driver.get_log("browser") == []


def test_hostile_names_are_text(open_page: Callable[..., Any]) -> None:
    curve = LearningCurve([1, 2], [1, 2], [1.0, 2.0], [1.0, 2.0], [3.0, 2.0])
    place = NllByPlace([0, 2], np.array([[1.0]]), np.array([[2]]))
    charts = [
        learning_chart([(label, curve) for label in HOSTILE], unit="sample"),
        place_chart(dict.fromkeys(HOSTILE, place), unit="sample", unit_s=1 / 24_000),
    ]
    writings = [Writing(HOSTILE[1], HOSTILE[2], [(label, label) for label in HOSTILE])]
    driver = open_page(render(page_of(HOSTILE, title=HOSTILE[0], writings=writings, charts=charts)))
    assert driver.execute_script("return window.executed") is None
    assert driver.execute_script("return document.scripts.length") == 1
    assert driver.execute_script("return document.querySelectorAll('img[src=x], [onmouseover], [onerror]').length") == 0
    assert driver.get_log("browser") == []  # nothing was left for the security policy to stop
    for label in HOSTILE:
        assert label in driver.find_element("id", "comparison").text
    click(driver, "#blind")
    click(driver, "#blind")
    assert driver.execute_script("return window.executed") is None
    labels = driver.execute_script("return [...document.querySelectorAll('.row .label')].map(e => e.textContent)")
    assert [label.strip() for label in labels] == ["real speech", *HOSTILE, *HOSTILE]


def test_markup_that_got_through_would_not_run(open_page: Callable[..., Any], tones: Page) -> None:
    """The security policy is a second lock."""
    html = render(tones).replace("sines", "<img src=x onerror=window.executed=1><script>window.executed=2</script>")
    driver = open_page(html)
    assert driver.execute_script("return window.executed") is None
    assert len(driver.get_log("browser")) >= 2  # it was stopped


@pytest.mark.parametrize("width", [1200, 400])
def test_nothing_is_wider_than_the_window(open_page: Callable[..., Any], tones: Page, width: int) -> None:
    driver = open_page(render(tones), width=width)
    room, needed = driver.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
    assert needed <= room
