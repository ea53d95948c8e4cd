"""The contract between environments and actors: actions in, observations and rewards out, for many rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class Observation:
    """What an environment shows at each step, which decides the encoder."""

    kind: str  # grid: cells of small whole numbers; image: pixels, 0 to 255; vector: real numbers
    shape: tuple[int, ...]  # of one row: grid [cells], image [height, width, channels], vector [size]
    num_values: int = 0  # of a cell, for a grid

    @property
    def dtype(self) -> type[np.generic]:
        if self.kind == "vector":
            return np.float32
        return np.uint8 if self.num_values <= 256 else np.int32


class Outcome(NamedTuple):
    """What follows an action."""

    observation: np.ndarray  # [N, ...]: if the episode has ended, the first one of the next
    reward: np.ndarray  # [N] fp32
    ended: np.ndarray  # [N] bool
    successes: np.ndarray  # [N] bool: a right choice, or an episode that ended well
    chances: np.ndarray  # [N] bool: whether there could have been one


class Environments(Protocol):
    """N rows of an environment, each of which begins another episode when one ends."""

    observation: Observation
    num_actions: int

    def begin(self) -> np.ndarray:
        """Begin the first episode of every row -> observations [N, ...]."""

    def step(self, actions: np.ndarray) -> Outcome:
        """actions [N], whole numbers below `num_actions`."""

    def state(self) -> Sequence[np.ndarray]:
        """Arrays of fixed shapes, rows first, from which `restore` continues exactly."""

    def restore(self, state: Sequence[np.ndarray]) -> None:
        """Continue from what `state` returned, with any rows of it that belong to this process."""

    def picture(self) -> np.ndarray:
        """The first row, drawn: [height, width, 3], uint8."""
