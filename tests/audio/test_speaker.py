"""Playing as sound is drawn, by fast models and slow ones, on a device whose time the test lets pass."""

import math
import re

import numpy as np
import pytest

from tests.audio.sound_device import SoundDevice
from waveform.audio.speaker import speaker
from waveform.audio.wav import pcm_bytes
from waveform.system.errors import Trouble

BLOCK_S = 0.04


def loud(seconds: float) -> np.ndarray:
    """Samples of which none is 0, as silence is."""
    return np.random.default_rng(0).uniform(0.1, 0.9, round(24_000 * seconds)).astype(np.float32)


def play(device: SoundDevice, samples: np.ndarray, *, speed: float, total_s: float | None = None) -> list[str]:
    """Draw `samples` at `speed` x real time, after two seconds in which kernels are compiled; return what was told."""
    told: list[str] = []
    with speaker(sample_rate_hz=24_000, seconds=total_s or len(samples) / 24_000, tell=told.append) as write:
        device.sleep(2)
        for block in np.split(samples, range(round(BLOCK_S * 24_000), len(samples), round(BLOCK_S * 24_000))):
            device.sleep(len(block) / 24_000 / speed)
            write(block[None])
    return told


def sounding(device: SoundDevice) -> list[tuple[float, float]]:
    """The stretches, in seconds, in which the device played sound."""
    is_sound = np.frombuffer(bytes(device.heard), dtype="<i2") != 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_sound, [0]]).astype(int))) / 24_000
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.mark.parametrize("speed", [0.1, 0.5, 0.9, 1.0, 1.1, 4.0])
@pytest.mark.parametrize("seconds", [0.02, 0.4, 12.0])
def test_a_sound_is_heard_whole_without_a_pause_and_soon(
    sound_device: SoundDevice, speed: float, seconds: float
) -> None:
    samples = loud(seconds)
    told = play(sound_device, samples, speed=speed)
    ((began_s, ended_s),) = sounding(sound_device)
    assert bytes(sound_device.heard).strip(b"\0") == pcm_bytes(samples).strip(b"\0")
    drawn_s = 2 + seconds / speed
    assert ended_s <= max(drawn_s, 2 + seconds) + 1.0, "it was kept waiting"
    assert began_s >= min(drawn_s, 2 + 0.5 / speed) - 0.02 and sound_device.is_closed
    assert len(told) == (speed < 1 and seconds == 12.0)
    if told:
        found = re.fullmatch(r"the model draws at (\S+) x real time, so playing waits for about (\d+) s, .*", told[0])
        assert found and float(found[1]) == pytest.approx(speed, abs=0.011)
        assert began_s == pytest.approx(2 + 0.5 / speed + int(found[2]), abs=1.2)


def test_a_prime_is_heard_with_what_continues_it(sound_device: SoundDevice) -> None:
    """Not before the model, which first has to read it, goes on."""
    prime, samples = loud(3), loud(4)
    with speaker(sample_rate_hz=24_000, seconds=7, tell=pytest.fail) as write:
        write(prime[None])
        sound_device.sleep(5)
        for block in np.split(samples, 100):
            write(block[None])
            sound_device.sleep(0.03)
    ((began_s, ended_s),) = sounding(sound_device)
    assert 5 < began_s < 5.2 and ended_s - began_s == pytest.approx(7, abs=0.001)


def test_a_slow_model_without_an_end_pauses_and_says_so_once(sound_device: SoundDevice) -> None:
    samples = loud(8)
    told = play(sound_device, samples, speed=0.5, total_s=math.inf)
    assert len(told) == 1 and "0.50 x real time, so playing pauses" in told[0]
    played = sounding(sound_device)
    assert 3 < len(played) < 12 and min(end_s - begin_s for begin_s, end_s in played[:-1]) > 0.5
    assert bytes(sound_device.heard).replace(b"\0\0", b"") == pcm_bytes(samples)


@pytest.mark.parametrize(("stall_s", "num_stretches"), [(2, 1), (4, 2)])
def test_what_is_drawn_ahead_bridges_a_stall(sound_device: SoundDevice, stall_s: float, num_stretches: int) -> None:
    """At twice real time, two seconds are ahead after four; a longer stall is heard, and then what is left is whole."""
    samples = loud(10)
    told: list[str] = []
    with speaker(sample_rate_hz=24_000, seconds=10, tell=told.append) as write:
        for i, block in enumerate(np.split(samples, 250)):
            sound_device.sleep(stall_s if i == 100 else 0.02)
            write(block[None])
    assert len(sounding(sound_device)) == num_stretches == 1 + len(told)


def test_drawing_waits_when_it_is_far_ahead(sound_device: SoundDevice) -> None:
    """Ten seconds are drawn ahead, and no more, however fast the model is; RAM is bounded."""
    with speaker(sample_rate_hz=24_000, seconds=math.inf, tell=pytest.fail) as write:
        for i in range(2000):
            write(loud(BLOCK_S)[None])
            sound_device.sleep(0.01)
            assert (i + 1) * BLOCK_S - sound_device.now_s < 12


def test_a_device_that_stops_is_trouble(sound_device: SoundDevice) -> None:
    playing = speaker(sample_rate_hz=24_000, seconds=math.inf, tell=pytest.fail)
    with pytest.raises(Trouble, match="the sound device has stopped"), playing as write:
        for _ in range(3):
            write(loud(1)[None])
        assert sound_device.active
        sound_device.active = False
        write(loud(1)[None])
    assert sound_device.is_closed
