"""Plays sound as it is drawn, on the machine's sound device; the only importer of sounddevice (the extra `play`)."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from waveform.audio.wav import pcm_bytes
from waveform.system.errors import Trouble, UserError

_HEAD_START_S = 0.5  # least sound that is drawn before playing begins
_MOST_SPARE_S = 10.0  # with more to spare, drawing waits, so that RAM does not grow with the length
_LATENCY_S = 0.2  # of the sound device: Python may be too busy to answer it for that long
_POLL_S = 0.02
_INSTEAD = "or give the sound to another program: --out - | aplay"


def require_sound_device(*, sample_rate_hz: int) -> None:
    """Raises UserError if sound at this rate cannot be played here."""
    with _explained() as sounddevice:
        sounddevice.check_output_settings(samplerate=sample_rate_hz, channels=1, dtype="int16")


@contextmanager
def speaker(
    *, sample_rate_hz: int, seconds: float, tell: Callable[[str], None]
) -> Iterator[Callable[[np.ndarray], None]]:
    """Play the blocks [1, n] of one sound as they come, and on leaving, wait until the last has been played.

    seconds: length of the sound, which may be inf. tell: shows the user a line. Raises UserError if sound cannot be
    played here, and Trouble if the device stops.
    """
    reserve = _Reserve(seconds, tell, sample_rate_hz=sample_rate_hz)

    def callback(out: memoryview, _frames: int, _time: object, _status: object) -> None:
        if not reserve.fill(out):
            raise sounddevice.CallbackStop

    with _explained() as sounddevice:
        stream = sounddevice.RawOutputStream(
            samplerate=sample_rate_hz, channels=1, dtype="int16", latency=_LATENCY_S, callback=callback
        )

    def start() -> None:
        if stream.stopped:
            with _explained():
                stream.start()

    def write(block: np.ndarray) -> None:
        if reserve.add(block[0]):
            start()  # not before: while kernels are compiled, Python would leave the device waiting
        while stream.active and reserve.spare_s() > _MOST_SPARE_S:
            time.sleep(_POLL_S)
        if not (stream.active or stream.stopped):
            raise Trouble(f"the sound device has stopped; connect it again, {_INSTEAD}")

    try:
        yield write
        # When the callback stops, PortAudio drops what ALSA has not played yet, so silence is added for it to drop.
        reserve.end(silence_s=stream.latency)
        start()
        while stream.active:
            time.sleep(_POLL_S)
    finally:
        stream.close()


class _Reserve:
    """What is drawn and not yet played; the sound device takes from it in a thread of its own.

    Playing begins when there is enough to play to the end without a pause: half a second, and more if the model is
    slower than real time. An endless sound is played whenever half a second of it is ready.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None], *, sample_rate_hz: int) -> None:
        self._undrawn_s = seconds
        self._tell: Callable[[str], None] | None = tell  # None: the user has been told
        self._bytes_per_s = 2 * sample_rate_hz
        self._lock = threading.Lock()  # for the next three fields
        self._pcm = bytearray()
        self._is_playing = self._is_whole = False
        self._num_blocks = 0
        self._timed_s, self._timed_since_s = 0.0, 0.0  # sound drawn since a time, which gives the speed

    def add(self, samples: np.ndarray) -> bool:
        """Add the next samples [n]; return whether sound is to be played now, which begins when there is enough."""
        pcm = pcm_bytes(samples)
        self._undrawn_s -= len(pcm) / self._bytes_per_s
        self._num_blocks += 1
        if self._num_blocks > 2:
            self._timed_s += len(pcm) / self._bytes_per_s
        else:  # a prime, or a block that waited for the prime to be read or for kernels to be compiled
            self._timed_since_s = time.monotonic()
        with self._lock:
            self._pcm += pcm
            spare_s = self.spare_s()
            waits = not self._is_playing and len(self._pcm) >= _HEAD_START_S * self._bytes_per_s
            self._is_playing |= spare_s >= 0
        is_endless = math.isinf(self._undrawn_s)
        if waits and self._tell and self._timed_s and self._slowness() > 1 and (is_endless or spare_s < 0):
            speed = f"the model draws at {1 / self._slowness():.2f} x real time"
            if is_endless:
                self._tell(f"{speed}, so playing pauses again and again; with --seconds N it does not")
            else:
                self._tell(f"{speed}, so playing waits for about {math.ceil(-spare_s)} s, and then need not pause")
            self._tell = None
        return self._is_playing

    def spare_s(self) -> float:
        """Return how many seconds more are ready than are needed to play without a pause; below 0: too few."""
        if not self._timed_s:
            return -math.inf
        waits_s = self._undrawn_s * (self._slowness() - 1) if math.isfinite(self._undrawn_s) else 0
        return len(self._pcm) / self._bytes_per_s - _HEAD_START_S - max(waits_s, 0)

    def end(self, *, silence_s: float) -> None:
        """Add a last silence, after which nothing follows."""
        with self._lock:
            self._pcm += bytes(2 * math.ceil(silence_s * self._bytes_per_s / 2))
            self._is_playing = self._is_whole = True

    def fill(self, out: memoryview) -> bool:
        """Fill the sound device's buffer, with silence if nothing is to be played; return whether more will come."""
        with self._lock:
            part = self._pcm[: len(out)] if self._is_playing else bytearray()
            del self._pcm[: len(part)]
            out[:] = part.ljust(len(out), b"\0")
            self._is_playing = len(part) == len(out)
            return self._is_playing or not self._is_whole

    def _slowness(self) -> float:
        """Return the seconds that a second of sound takes to draw."""
        return (time.monotonic() - self._timed_since_s) / self._timed_s


@contextmanager
def _explained() -> Iterator[Any]:
    """Yield the module sounddevice; raise its absence, and errors of the sound device, as a UserError of one line."""
    try:
        import sounddevice
    except ImportError as error:
        raise UserError(f'--play needs sounddevice: pip install "waveform[play]", {_INSTEAD}') from error
    except Exception as error:  # an OSError without PortAudio; a PortAudioError if PortAudio does not start
        raise UserError(
            f"--play needs PortAudio ({error}): apt install libportaudio2 or brew install portaudio, {_INSTEAD}"
        ) from error
    try:
        yield sounddevice
    except (sounddevice.PortAudioError, ValueError) as error:  # a ValueError names a device that does not exist
        raise UserError(f"no sound device can be used ({error}); connect one, {_INSTEAD}") from error
