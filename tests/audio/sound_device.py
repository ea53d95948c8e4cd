"""A stand-in for the module sounddevice, with one device that plays in a time that the test lets pass."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

_STEP_S = 0.01
_STEP_BYTES = 480  # that the device plays in a step: 24,000 samples of two bytes a second


class SoundDevice(ModuleType):
    """The module, its device and its clock. What was played, with the silence between, is `heard`."""

    class PortAudioError(Exception):
        pass

    class CallbackStop(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("sounddevice")
        self.heard = bytearray()
        self.now_s = self._played_until_s = 0.0
        self.refusal: Exception | None = None
        self.latency = 0.15
        self.active = self.is_closed = False
        self.stopped = True

    def check_output_settings(self, *, samplerate: int, channels: int, dtype: str) -> None:
        assert (samplerate, channels, dtype) == (24_000, 1, "int16")
        if self.refusal is not None:
            raise self.refusal

    def RawOutputStream(self, *, callback: Callable[..., None], latency: float, **settings: Any) -> "SoundDevice":
        self.check_output_settings(**settings)
        assert latency >= self.latency
        self._callback = callback
        return self

    def start(self) -> None:
        assert self.stopped
        self.active, self.stopped = True, False

    def close(self) -> None:
        self.active, self.stopped, self.is_closed = False, True, True

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass, in which the device plays."""
        self.now_s += seconds
        while self._played_until_s + _STEP_S <= self.now_s:
            self._played_until_s += _STEP_S
            self.heard += self._next_step() if self.active else bytes(_STEP_BYTES)

    def _next_step(self) -> bytes:
        out = bytearray(_STEP_BYTES)
        try:
            self._callback(memoryview(out), _STEP_BYTES // 2, None, None)
        except self.CallbackStop:
            self.active = False
            # As PortAudio does with ALSA: what waits in the device is never heard.
            del self.heard[-round(self.latency * 100) * _STEP_BYTES :]
        return bytes(out)
