"""`waveform serve`: sounds as they are drawn, for several listeners, none of whom is trusted."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import waveform
from tests.calling import mistake
from tests.faults.forks import wait_for
from waveform.audio.wav import pcm_bytes
from waveform.engine.sampler import SamplingConfig
from waveform.speech import sound_server
from waveform.speech.run import Run, load
from waveform.speech.sound_server import ServeConfig, SoundServer
from waveform.system.errors import UserError


@pytest.fixture(scope="module")
def run(speech: Path) -> Run:
    return load(speech / "run", device="cpu")


@contextmanager
def serving(*names: str, run: Run, **config: Any) -> Iterator[SoundServer]:
    with SoundServer(dict.fromkeys(names, run), ServeConfig(port=0, **config)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(run: Run) -> Iterator[SoundServer]:
    with serving("a", "b/<script>", run=run, max_seconds=2) as server:
        yield server


def ask(
    server: SoundServer, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, body, headers or {})
    return connection.getresponse()


def sound(server: SoundServer, body: bytes = b"", **asked: object) -> HTTPResponse:
    return ask(server, "POST", f"/sound?{urlencode(asked)}", body)


def refused(response: HTTPResponse) -> tuple[int, str]:
    return response.status, response.read().decode()


def test_a_sound_is_what_sample_draws(server: SoundServer, run: Run) -> None:
    drawn = run.sample(seconds=0.1, sampling=SamplingConfig(seed=3, temperature=0.9))
    response = sound(server, run="a", seconds=0.1, seed=3, temperature=0.9)
    assert response.status == 200 and response.headers["X-Sample-Rate"] == "24000"
    assert response.read() == pcm_bytes(drawn[0])


def test_an_upload_is_continued(server: SoundServer, speech: Path) -> None:
    recording = next((speech / "audio" / "test").iterdir())
    heard = np.frombuffer(sound(server, recording.read_bytes(), seconds=0.1).read(), dtype="<i2")
    plain = np.frombuffer(sound(server, seconds=0.1).read(), dtype="<i2")
    assert len(heard) == 2400 + 720 and not np.array_equal(heard[-2400:], plain)


def test_two_listeners_take_turns_and_a_third_waits(run: Run) -> None:
    with serving("a", run=run) as server:
        alone = sound(server, seconds=3, seed=1).read()
        first, second = sound(server, seconds=3, seed=1), sound(server, seconds=3, seed=2)  # headers come at once
        assert refused(sound(server, seconds=1)) == (503, "others are listening; try again when they have finished")
        assert first.read() == alone and len(second.read()) == len(alone)
        assert sound(server, seconds=0.1).status == 200


def test_a_cut_connection_makes_room(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    with serving("a", run=run, clients=1) as server:
        with socket.create_connection(("127.0.0.1", server.server_port)) as cut:
            cut.sendall(b"POST /sound?seconds=60 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert cut.recv(12) == b"HTTP/1.0 200"
            assert sound(server, seconds=0.1).status == 503
        wait_for(lambda: sound(server, seconds=0.1).status == 200)
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_out_of_range_is_one_line(server: SoundServer) -> None:
    assert refused(sound(server, seconds=2.5)) == (400, "seconds is 2.5; it must be above 0 and at most 2")
    for name, value in (("seconds", "nan"), ("seconds", 0), ("seconds", "x"), ("seed", -1), ("temperature", -1)):
        assert sound(server, **{name: value}).status == 400, (name, value)
    assert refused(sound(server, run="c")) == (404, "there is no such run here")
    assert "trained without labels" in refused(sound(server, label="ann"))[1]
    assert ask(server, "GET", "/../../etc/passwd").status == 404
    with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
        raw.sendall(b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.0 400"


def test_uploads_that_are_no_audio_are_refused(server: SoundServer) -> None:
    status, line = refused(sound(server, b"RIFF" + bytes(100)))
    assert status == 400 and line.startswith("cannot use the recording: ") and "/" not in line
    for length in (str(1 << 40), "9" * 5000):  # Python converts no number of more than 4300 digits
        answer = refused(ask(server, "POST", "/sound", headers={"Content-Length": length}))
        assert answer == (413, "a recording may have 20 MiB at most"), length
    for headers in ({"Content-Length": "-1"}, {"Content-Length": "x"}, {"Transfer-Encoding": "chunked"}):
        assert ask(server, "POST", "/sound", headers=headers).status == 411, headers


def test_an_upload_that_drips_is_given_up(server: SoundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_server, "_UPLOAD_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port)) as slow:
        slow.sendall(b"POST /sound HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(4):
            slow.sendall(b"R")
            time.sleep(0.1)
        assert slow.recv(12) == b"HTTP/1.0 408"


def test_other_sites_are_refused(server: SoundServer) -> None:
    assert refused(ask(server, "GET", "/", headers={"Host": "rebound.example"}))[0] == 403
    assert refused(ask(server, "GET", "/", headers={"Host": "["}))[0] == 400
    assert refused(ask(server, "POST", "/sound", headers={"Origin": "http://other.example"}))[0] == 403
    own = {"Origin": f"http://127.0.0.1:{server.server_port}"}
    assert ask(server, "POST", "/sound?seconds=0.1", headers=own).status == 200


def test_mistakes_on_the_command_line(speech: Path, server: SoundServer) -> None:
    run = str(speech / "run")
    assert "give another --port" in mistake(["serve", run, "--port", server.server_port])
    with pytest.raises(UserError, match="give another --port"):
        waveform.serve(run, ServeConfig(port=server.server_port))  # one run need not be in a list
    assert "--port is 70000" in mistake(["serve", run, "--port", 70_000])
    assert "--max-seconds is inf" in mistake(["serve", run, "--max-seconds", "inf"])
    assert "--clients is 0" in mistake(["serve", run, "--clients", 0])
    assert "is named twice" in mistake(["serve", run, run])
    assert "no such run folder" in mistake(["serve", "nosuch"])


def test_the_page_draws_plays_and_saves(server: SoundServer, speech: Path, open_page: Callable[..., Any]) -> None:
    driver = open_page("<p></p>")
    driver.get(server.address)
    driver.find_element("css selector", "#run option:nth-child(2)").click()
    assert "rate" not in driver.find_element("id", "about").text
    seconds = driver.find_element("id", "seconds")
    seconds.clear()
    seconds.send_keys("0.5")
    driver.find_element("id", "prime").send_keys(str(next((speech / "audio" / "test").iterdir())))
    driver.find_element("id", "draw").click()
    link = wait_for(lambda: driver.find_elements("css selector", "#sounds a"))[0]
    assert link.get_attribute("download") == "<script>_seed0_1.wav"
    samples = "return document.querySelector('#sounds audio').duration"
    assert wait_for(lambda: driver.execute_script(samples)) == pytest.approx(0.53, abs=0.01)
    assert "x real time" in driver.find_element("id", "status").text
    driver.execute_script("document.getElementById('prime').value = ''; document.getElementById('seconds').value = 9")
    driver.execute_script("document.getElementById('form').noValidate = true")
    driver.find_element("id", "draw").click()
    wait_for(lambda: "at most 2" in driver.find_element("id", "status").text)
    assert [entry for entry in driver.get_log("browser") if "400" not in entry["message"]] == []
