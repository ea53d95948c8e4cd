"""Stands in for DeepMind Lab's module: the calls of its Python interface, and a level of three seconds.

What is seen depends on the seed and on all actions since; looking to the right pays 1 a frame.
"""

import numpy as np

_SECONDS = 3
_LOW, _HIGH = np.array([-512, -512, -1, -1, 0, 0, 0]), np.array([512, 512, 1, 1, 1, 1, 1])


class Lab:
    """What a process may have only one of."""

    _is_there = False

    def __init__(self, level: str, observations: list[str], config: dict[str, str], renderer: str) -> None:
        assert not Lab._is_there, "a second engine in one process"
        assert level == "contributed/dmlab30/rooms_select_nonmatching_object" and observations == ["RGB_INTERLEAVED"]
        assert all(isinstance(value, str) for value in config.values()) and renderer in ("software", "hardware")
        Lab._is_there = True
        self._shape = int(config["height"]), int(config["width"]), 3
        self._last_frame = _SECONDS * int(config["fps"])
        self._frame = self._last_frame

    def reset(self, episode: int = -1, seed: int | None = None) -> None:
        assert seed is not None and 0 <= seed < 2**31
        self._frame, self._seen = 0, seed

    def is_running(self) -> bool:
        return self._frame < self._last_frame

    def step(self, action: np.ndarray, num_steps: int = 1) -> float:
        assert self.is_running() and action.dtype == np.intc and action.shape == (7,)
        assert (action >= _LOW).all() and (action <= _HIGH).all()
        frames = min(num_steps, self._last_frame - self._frame)
        self._frame += frames
        self._seen = (self._seen * 31 + int(action @ np.arange(1, 8)) + 1000) % 2**31
        return frames * float(action[0] > 0)

    def observations(self) -> dict[str, np.ndarray]:
        assert self.is_running(), "nothing is seen after the end"
        return {"RGB_INTERLEAVED": np.random.default_rng(self._seen).integers(0, 256, self._shape, np.uint8)}

    def close(self) -> None:
        self._frame = self._last_frame
