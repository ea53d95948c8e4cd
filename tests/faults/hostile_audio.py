"""A corpus of fuzzed and odd files among good ones."""

import contextlib
import io
import json
import os
import random
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile

from tests.faults.calling import forget_peak_memory, must_work, peak_memory_mb
from tests.faults.fault import fault
from waveform.audio import decoding_process
from waveform.audio.decoding_process import DecodingProcess
from waveform.cli import main as waveform
from waveform.engine.dataset import read_dataset

_FORMATS = {
    "pcm.wav": ("WAV", "PCM_16"), "float.wav": ("WAV", "FLOAT"), "adpcm.wav": ("WAV", "IMA_ADPCM"),
    "ms.wav": ("WAV", "MS_ADPCM"), "gsm.wav": ("WAV", "GSM610"), "rf64.wav": ("RF64", "PCM_16"),
    "w64.wav": ("W64", "PCM_24"), "flac.flac": ("FLAC", "PCM_16"), "vorbis.ogg": ("OGG", "VORBIS"),
    "opus.opus": ("OGG", "OPUS"), "layer3.mp3": ("MP3", "MPEG_LAYER_III"), "aiff.aiff": ("AIFF", "PCM_16"),
    "caf.aif": ("CAF", "ALAC_16"), "au.wav": ("AU", "ULAW"), "nist.wav": ("NIST", "PCM_16"),
}  # fmt: skip
_NUMBERS = [bytes(4), b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\0\x80", b"\x80\0\0\0", b"\1\0\0\0"]
# Run in the decoding process: does what a broken codec might do.
_TRAPS = """
import os, signal, time, soundfile
real = soundfile.SoundFile
def trapped(path, *arguments):
    if b"crashes" in path: os.kill(os.getpid(), signal.SIGSEGV)
    if b"aborts" in path: os.abort()
    if b"hangs" in path: time.sleep(600)
    if b"hungry" in path: bytearray(8 << 30)
    return real(path, *arguments)
soundfile.SoundFile = trapped
"""


def _tone(*, seconds: float = 0.2, rate: int = 24_000, channels: int = 1, seed: int = 0) -> np.ndarray:
    noise = 0.01 * np.random.default_rng(seed).standard_normal((round(seconds * rate), channels))
    tone = 0.3 * np.sin(np.arange(len(noise)) * (0.03 + 0.01 * seed))
    return (tone[:, None] + noise).astype(np.float32)


def _encoded(format: str, subtype: str, samples: np.ndarray | None = None, *, rate: int = 24_000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, _tone() if samples is None else samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def _wav(samples: np.ndarray | None = None, *, subtype: str = "PCM_16", rate: int = 24_000) -> bytes:
    return _encoded("WAV", subtype, samples, rate=rate)


def _patched(content: bytes, at: int, value: bytes) -> bytes:
    return content[:at] + value + content[at + len(value) :]


def _with(value: float) -> bytes:
    samples = _tone()
    samples[1000] = value
    return _wav(samples, subtype="FLOAT")


def _odd_files() -> dict[str, tuple[bytes, str | None]]:
    """Return name -> content, and words of the reason that must be given; None if the file must be used."""
    wav, flac, text = _wav(), _encoded("FLAC", "PCM_16"), b"This is a text, and no audio at all.\n" * 50
    long_flac = _encoded("FLAC", "PCM_16", _tone(seconds=3))
    ogg, opus = (_encoded("OGG", codec, _tone(seconds=2)) for codec in ("VORBIS", "OPUS"))  # of several pages
    odd_names = (
        *("good.wav", "upper.WAV", " blank at the ends .wav", "new\nline.wav", "bell\a and escape\x1b[31m.wav"),
        *("größe-日本-🎵.wav", "caf\udce9.wav", "-rf.wav", "$(reboot) `x` %s {0}.wav", "x" * 240 + ".wav"),
    )
    return {
        **{name: (wav, None) for name in odd_names},
        "good.flac": (flac, None),
        "a wav as mp3.mp3": (wav, None),
        "a flac as wav.wav": (flac, None),
        "cut header.wav": (wav[:20], "not readable"),
        "cut header.flac": (flac[:20], "not readable"),
        "half.wav": (wav[: len(wav) // 2], "cut short"),
        "half.flac": (flac[: len(flac) // 2], "cut short"),
        "damaged.flac": (_patched(long_flac, len(long_flac) // 2, bytes(2000)), "damaged or cut short"),
        # libsndfile considers these three complete
        "no last page.ogg": (ogg[: ogg.rindex(b"OggS")], "cut short: its Ogg stream has no end"),
        "no last page.opus": (opus[: opus.rindex(b"OggS")], "cut short: its Ogg stream has no end"),
        "two streams.ogg": (ogg + _encoded("OGG", "VORBIS"), "several Ogg streams, of which only the first can be"),
        "zero length.wav": (b"", "empty"),
        "zero length.mp3": (b"", "empty"),
        "no samples.wav": (_wav(np.zeros((0, 1), np.float32)), "no samples"),
        "0 Hz.wav": (_patched(wav, 24, bytes(4)), ""),
        "minus 1 Hz.wav": (_patched(wav, 24, b"\xff" * 4), ""),
        "999 Hz.wav": (_patched(wav, 24, struct.pack("<I", 999)), "999 Hz is outside"),
        "800 kHz.wav": (_patched(wav, 24, struct.pack("<I", 800_000)), "800000 Hz is outside 1000 to 768000 Hz"),
        "2^31 frames.wav": (_patched(wav, 40, struct.pack("<I", 0x7FFE0000)), "cut short"),
        "2^31 frames.flac": (_patched(flac, 21, struct.pack(">BI", flac[21] | 0x0F, 0x7FFFFFFF)), "cut short"),
        "0 channels.wav": (_patched(wav, 22, bytes(2)), ""),
        "65535 channels.wav": (_patched(wav, 22, b"\xff\xff"), ""),
        "65 channels.wav": (_wav(_tone(channels=65)), "it has 65 channels, more than 64"),
        "32 channels.wav": (_wav(_tone(channels=32)), None),
        "32 channels of floats.wav": (_wav(_tone(channels=32), subtype="DOUBLE"), None),
        **{f"{value}.wav": (_with(float(value)), "not finite") for value in ("nan", "inf", "-inf")},
        "huge floats.wav": (_with(3e38), "or above 1e30"),
        "huge floats below 0.wav": (_with(-3e38), "or above 1e30"),
        "denormal.wav": (_with(1e-42), None),
        "768 kHz.wav": (_wav(_tone(rate=768_000, seconds=0.02), rate=768_000), None),
        "awkward rate.wav": (_wav(_tone(rate=44_101, seconds=0.1), rate=44_101), None),
        "one sample.wav": (_wav(_tone(seconds=1 / 24_000)), None),
        "silence.wav": (_wav(np.zeros((5000, 1), np.float32)), None),
        "text.wav": (text, "not readable"),
        "text.mp3": (text, ""),
        "html.mp3": (b"<!DOCTYPE html><html><body>404</body></html>", ""),
        "zip.flac": (b"PK\x03\x04" + bytes(500), "not readable"),
        "zeros.wav": (bytes(10_000), "not readable"),
        "zeros.mp3": (bytes(10_000), ""),
        "broken\nname.wav": (b"x", "not readable"),
        "broken caf\udce9.wav": (b"x", "not readable"),
        "crashes.wav": (wav, "SIGSEGV"),
        "aborts.wav": (wav, "SIGABRT"),
        "hangs.wav": (wav, "no progress"),
        "hungry.wav": (wav, "too much RAM"),
        "forbidden.wav": (wav, "no permission"),
    }


def _fuzzed(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(max(1, len(changed)))
        kind = rng.choice(["byte", "byte", "head", "number", "cut", "insert", "zeros"])
        if kind == "cut":
            del changed[at:]
        elif kind == "insert":
            changed[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif kind == "zeros":
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
        elif kind == "number":
            at = rng.randrange(100)
            changed[at : at + 4] = rng.choice(_NUMBERS)
        elif changed:
            at = rng.randrange(min(80, len(changed))) if kind == "head" else at
            changed[at % len(changed)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(changed)


def _place_special(folder: Path) -> tuple[dict[str, str], list[Callable[[], Any]]]:
    """Make what is not a regular file, and a file that grows; return the reasons, and calls that clean up."""
    os.mkfifo(folder / "pipe.wav")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(folder / "socket.wav"))
    (folder / "dangling.wav").symlink_to("nowhere")
    (folder / "loop.wav").symlink_to("loop.wav")
    (folder / "device.wav").symlink_to("/dev/zero")
    (folder / "up").symlink_to("..")
    (folder / "round").mkdir()
    (folder / "round" / "trip").symlink_to(folder)
    growing = folder / "grows.wav"
    growing.write_bytes(_wav(_tone(seconds=60)))
    loop = subprocess.Popen(["sh", "-c", 'while :; do printf x >> "$0" || exit; done', growing])
    reasons = {
        **dict.fromkeys(("pipe.wav", "socket.wav", "device.wav"), "not a regular file"),
        "dangling.wav": "no such file", "loop.wav": "symbolic links", "grows.wav": "changed while it was being read",
    }  # fmt: skip
    return reasons, [loop.kill, loop.wait, server.close]


@contextlib.contextmanager
def _trapped_decoders() -> Iterator[dict[int, float]]:
    """Make the decoding process die, hang and swell on some names, and deny permission for another.

    Yields the most RAM, in MB, that each decoding process has held, as seen before each message and before its end.
    """
    peaks: dict[int, float] = {}
    access, open_file = os.access, DecodingProcess.open

    def may_read(path: Any, mode: int, **options: Any) -> bool:
        return "forbidden" not in os.fsdecode(path) and access(path, mode, **options)

    def open_impatiently(self: DecodingProcess, path: Path) -> None:
        # On a busy machine, any other file may take seconds.
        self._channel.settimeout(0.5 if path.name == "hangs.wav" else decoding_process.PATIENCE_S)
        open_file(self, path)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def look_first(self: DecodingProcess, *arguments: Any) -> Any:
            with contextlib.suppress(FileNotFoundError):  # one that ended by itself
                pid = self._process.pid
                peaks[pid] = max(peaks.get(pid, 0.0), peak_memory_mb(pid))
            return real(self, *arguments)

        return look_first

    start = decoding_process._START.replace("serve()", f"exec({_TRAPS!r}); serve()")
    receive, kill = watched(DecodingProcess.receive), watched(DecodingProcess.kill)
    decoding_process._end_idle()
    with (
        mock.patch.object(decoding_process, "_START", start),
        mock.patch.multiple(DecodingProcess, open=open_impatiently, receive=receive, kill=kill),
        mock.patch.object(os, "access", may_read),
    ):
        yield peaks
    decoding_process._end_idle()


@fault("hostile audio", short=307, long=2000)
def prepare(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: no file stops the preparation; each is used, or listed with the reason; RAM and time stay bounded."""
    audio = folder / "audio"
    for split in ("train", "valid", "test"):
        (audio / split).mkdir(parents=True)
        (audio / split / "surely good.wav").write_bytes(_wav())
    expected: dict[str, str | None] = {}
    for name, (content, reason) in _odd_files().items():
        (audio / "train" / name).write_bytes(content)
        expected[f"train/{name}"] = reason
    seeds = {name: _encoded(*kind) for name, kind in _FORMATS.items()}
    for case in range(max(0, cases - len(expected))):
        name = rng.choice(list(seeds))
        (audio / rng.choice(["train", "test"]) / f"{case} {name}").write_bytes(_fuzzed(seeds[name], rng))
    reasons, ends = _place_special(audio / "train")
    expected |= {f"train/{name}": reason for name, reason in reasons.items()}
    command = ["prepare", audio, folder / "data"]
    memory_before = forget_peak_memory()
    try:
        with _trapped_decoders() as peaks:
            outcome = must_work(waveform, command, seconds=120 + cases)
    finally:
        for end in ends:
            end()
    assert all(line.isprintable() for line in outcome.out.splitlines()), "control characters reach the terminal"
    report = json.loads((folder / "data" / "report.json").read_bytes())
    files = read_dataset(folder / "data").sources["files"]
    used = {path for path, record in files.items() if "refused" not in record}
    refused: dict[str, str] = report["refused"]
    present = {os.path.relpath(f"{parent}/{name}", audio) for parent, _, names in os.walk(audio) for name in names}
    assert used | refused.keys() == present and not used & refused.keys(), used ^ refused.keys() ^ present
    for path, reason in expected.items():
        if reason is None:
            assert path in used, f"{path!r} is refused: {refused.get(path)}"
        else:
            assert reason in refused.get(path, f"{path!r} is used"), f"{path!r}: {refused.get(path)}"
    assert all("\n" not in reason and reason for reason in refused.values())
    grown_mb = peak_memory_mb() - memory_before
    assert grown_mb < 700, f"{grown_mb} MB more here"
    assert len(peaks) >= 3, peaks  # so many traps end the decoding process
    decoder_mb = max(peaks.values())
    assert decoder_mb < 200, f"{decoder_mb} MB in a decoding process"
    must_work(waveform, command, seconds=120 + cases)
    kinds = Counter(reason.split(":")[0].split(" (")[0] for reason in refused.values())
    return {
        "used": len(used),
        "refused": len(refused),
        "reasons": dict(kinds.most_common(8)),
        "memory_grown_mb": round(grown_mb),
        "decoder_mb": round(decoder_mb),
    }
