"""A web page on which one hears sounds as they are drawn: an HTML file, and a stream of raw PCM.

    GET /                       the page
    POST /sound?run=NAME&label=NAME&temperature=1&seconds=10&seed=0    16-bit little-endian mono PCM, as it is drawn
                                the body, if any: an audio file that the sound begins with and continues

One sound is drawn at a time, block by block, so several listeners take turns. Clients are not trusted: requests from
other sites are refused (by the headers Host and Origin), lengths and numbers are bounded, and another process decodes
what is sent.
"""

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import BoundedSemaphore, Lock
from typing import Annotated, Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import numpy as np

from waveform.audio.files import read_blocks
from waveform.audio.wav import pcm_bytes
from waveform.engine.sampler import SamplingConfig
from waveform.runs.configured_model import num_parameters
from waveform.speech.run import Run
from waveform.system.errors import UserError
from waveform.system.rules import POSITIVE, check_rules, whole_number

_MAX_BODY_BYTES = 20 << 20
_MOST_DIGITS = 18  # of a length that is read as a number; Python refuses more than 4,300
_PRIME_S = 10.0  # of an uploaded recording: its end
_UPLOAD_S = 60.0  # for all of a recording to arrive
_SILENT_S = 30.0  # a client that neither sends nor reads for so long counts as gone
_LOCAL = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class ServeConfig:
    """Where the page is served, and how much its users may ask for."""

    host: str = "127.0.0.1"
    port: Annotated[int, whole_number(0, 65535)] = 8000  # 0: any that is free
    max_seconds: Annotated[float, POSITIVE] = 60.0  # length of a sound
    clients: Annotated[int, whole_number(1)] = 2  # that listen at once

    def __post_init__(self) -> None:
        check_rules(self)


class SoundServer(ThreadingHTTPServer):
    """Serves sounds of `runs`, by name. Raises UserError if the address is taken."""

    daemon_threads = True

    def __init__(self, runs: Mapping[str, Run], config: ServeConfig) -> None:
        self.runs, self.config = dict(runs), config
        self.drawing, self.listening = Lock(), BoundedSemaphore(config.clients)
        try:
            super().__init__((config.host, config.port), _Handler)
        except (OSError, OverflowError) as error:
            at = f"{config.host}:{config.port}"
            raise UserError(f"cannot serve at {at} ({error}); give another --port or --host") from error

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{self.config.host}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # a client that is gone is not an error
            super().handle_error(request, client_address)

    def page(self, *, nonce: str) -> str:
        """The page, with the runs and the limits that it offers."""
        runs = {
            name: {
                "rate": run.audio_format.sample_rate_hz,
                "labels": run.labels,
                "about": f"{run.name}, {num_parameters(run.model):,} parameters, trained for "
                f"{run.train_seconds / 60:.0f} minutes{f', after {run.origin}' if run.origin else ''}",
            }
            for name, run in self.runs.items()
        }
        known = json.dumps({"runs": runs, "maxSeconds": self.config.max_seconds, "primeSeconds": _PRIME_S})
        text = files("waveform.speech").joinpath("sound_server.html").read_text(encoding="utf-8")
        return text.replace("{{nonce}}", nonce).replace("{{known}}", escape(known, quote=True))


class _Refused(Exception):
    """Refuses a request; its arguments are the status and a line of text. (A UserError has the status 400.)"""


def _parts(address: str) -> SplitResult:
    """Split an address that a client sent."""
    try:
        return urlsplit(address)
    except ValueError as error:
        raise UserError(f"not an address: {error}") from error


class _Handler(BaseHTTPRequestHandler):
    server: SoundServer
    server_version, sys_version = "waveform", ""
    timeout = _SILENT_S

    def do_GET(self) -> None:
        self._answer("/", self._page)

    def do_POST(self) -> None:
        self._answer("/sound", self._sound)

    def _answer(self, path: str, make: Callable[[str], None]) -> None:
        """Call `make` with the query, if the client asks for `path`."""
        self._began = False
        try:
            self._require_same_site()
            address = _parts(self.path)
            if address.path != path:
                raise _Refused(HTTPStatus.NOT_FOUND, f"there is only {path}")
            make(address.query)
        except (_Refused, UserError) as error:
            status, line = error.args if isinstance(error, _Refused) else (HTTPStatus.BAD_REQUEST, str(error))
            if not self._began:
                self._begin(status, "text/plain; charset=utf-8")
                self.wfile.write(line.encode())

    def _begin(self, status: HTTPStatus, kind: str, **headers: str) -> None:
        self._began, self.close_connection = True, True
        self.send_response(status)
        common = {"Content-Type": kind, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _require_same_site(self) -> None:
        """Refuse requests from pages of other sites, and by other host names that lead here."""
        host = _parts(f"//{self.headers.get('Host', '')}")
        if self.server.config.host in _LOCAL and host.hostname not in _LOCAL:
            raise _Refused(HTTPStatus.FORBIDDEN, "this server answers to localhost only")
        origin = self.headers.get("Origin")
        if origin is not None and _parts(origin).netloc != host.netloc:
            raise _Refused(HTTPStatus.FORBIDDEN, "other sites may not ask for sounds")

    def _page(self, _query: str) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = {"Content-Security-Policy": _POLICY.format(nonce=nonce)}
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", **policy)
        self.wfile.write(self.server.page(nonce=nonce).encode())

    def _sound(self, query: str) -> None:
        asked = {name: values[-1] for name, values in parse_qs(query).items()}
        run = self.server.runs.get(asked.get("run", next(iter(self.server.runs))))
        if run is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such run here")
        most = self.server.config.max_seconds
        try:
            seconds, seed = float(asked.get("seconds", min(5, most))), int(asked.get("seed", 0))
            sampling = SamplingConfig(temperature=float(asked.get("temperature", 1)), seed=seed)
        except ValueError as error:
            raise UserError(f"not a number: {error}") from error
        if not 0 < seconds <= most:
            raise UserError(f"seconds is {seconds:g}; it must be above 0 and at most {most:g}")
        label = asked.get("label") or None
        run.label_number(label)  # refuses one that the run does not know
        if not self.server.listening.acquire(blocking=False):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "others are listening; try again when they have finished")
        try:
            self._draw(run, self._prime(run), seconds=seconds, sampling=sampling, label=label)
        finally:
            self.server.listening.release()

    def _prime(self, run: Run) -> np.ndarray | None:
        """The end of the recording that was sent [n], at the run's rate; None if there is none."""
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "say how long the recording is")
        if len(length) > _MOST_DIGITS or int(length) > _MAX_BODY_BYTES:
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a recording may have {_MAX_BODY_BYTES >> 20} MiB at most"
            )
        content, end = b"", time.monotonic() + _UPLOAD_S
        while len(content) < int(length) and (part := self.rfile.read1(int(length) - len(content))):
            content += part
            if time.monotonic() > end:
                raise _Refused(HTTPStatus.REQUEST_TIMEOUT, f"a recording may take {_UPLOAD_S:g} s to arrive")
        if not content:
            return None
        rate = run.audio_format.sample_rate_hz
        with NamedTemporaryFile(prefix="waveform-", suffix=".audio") as file:
            Path(file.name).write_bytes(content)
            try:
                samples = np.zeros(0, dtype=np.float32)
                for block in read_blocks(file.name, sample_rate_hz=rate):  # of hours, only the end is kept
                    samples = np.concatenate([samples, block])[-round(_PRIME_S * rate) :]
            except UserError as error:
                raise UserError(str(error).replace(file.name, "the recording")) from error
        return run.audio_format.scale(samples)

    def _draw(
        self, run: Run, prime: np.ndarray | None, *, seconds: float, sampling: SamplingConfig, label: str | None
    ) -> None:
        rate = {"X-Sample-Rate": str(run.audio_format.sample_rate_hz)}
        self._begin(HTTPStatus.OK, "application/octet-stream", **rate)
        if prime is not None:
            self.wfile.write(pcm_bytes(prime))
        drawing = self.server.drawing

        def send(block: np.ndarray) -> None:
            drawing.release()  # others draw while this one is sent
            try:
                self.wfile.write(pcm_bytes(block[0]))
            finally:
                drawing.acquire()

        with drawing:
            run.sample(seconds=seconds, sampling=sampling, prime=prime, on_block=send, labels=[label])

    def log_message(self, *arguments: object) -> None:
        """Requests are not listed."""
