"""DeepMind Lab as a Gymnasium environment, `env=DMLab-v0`, by the Python module `deepmind_lab` that its users build.

Frames, actions and their repetition are IMPALA's (Espeholt et al. 2018, appendix D, and its script scalable_agent).
A process can have only one, so each row needs its own: env_processes=true.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from waveform.system.errors import UserError

LEVEL = "contributed/dmlab30/rooms_select_nonmatching_object"  # Rae et al. 2019, section 5.7
_PIXELS = "RGB_INTERLEAVED"
# Look right, look down, strafe right, forward, fire, jump, crouch; IMPALA's nine (Table D.2).
_ACTIONS = np.array(
    [
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, -1, 0, 0, 0],
        [0, 0, -1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [-20, 0, 0, 0, 0, 0, 0],
        [20, 0, 0, 0, 0, 0, 0],
        [-20, 0, 0, 1, 0, 0, 0],
        [20, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
    ],
    np.intc,
)


class DMLab(gymnasium.Env[np.ndarray, int]):
    """One level; actions are the numbers of IMPALA's set."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's type
    _made = False  # in this process

    def __init__(
        self,
        level: str = LEVEL,
        *,
        width: int = 96,
        height: int = 72,
        action_repeat: int = 4,  # frames, of which a second has 60
        renderer: str = "software",
        render_mode: str | None = None,
    ) -> None:
        """level: as DeepMind Lab names it; width, height: pixels.

        Raises UserError if DeepMind Lab is not installed, or if this process has one already.
        """
        if find_spec("deepmind_lab") is None:
            raise UserError(
                "env=DMLab-v0 needs DeepMind Lab's Python module, deepmind_lab, which has to be built; "
                "recipes/README.md says how"
            )
        if DMLab._made:
            raise UserError("a process can have only one DMLab; give env_processes=true, and each row has its own")
        DMLab._made = True
        lab: Any = import_module("deepmind_lab")
        sizes = {"width": str(width), "height": str(height), "fps": "60"}
        self._lab = lab.Lab(level, [_PIXELS], config=sizes, renderer=renderer)
        self._repeat = action_repeat
        self._frame = np.zeros((height, width, 3), np.uint8)
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, self._frame.shape, np.uint8)
        self.action_space = spaces.Discrete(len(_ACTIONS))  # type: ignore[assignment]  # of NumPy's integers

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode, which `seed` decides -> pixels [height, width, 3]."""
        super().reset(seed=seed)
        self._lab.reset(seed=seed)
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Repeat an action for some frames -> pixels, their reward, whether the episode has ended."""
        reward = float(self._lab.step(_ACTIONS[action], num_steps=self._repeat))
        running = self._lab.is_running()
        return self._look() if running else self._frame, reward, not running, False, {}

    def _look(self) -> np.ndarray:
        self._frame = np.asarray(self._lab.observations()[_PIXELS], np.uint8)
        return self._frame

    def render(self) -> np.ndarray:
        """The last frame."""
        return self._frame

    def close(self) -> None:
        """Release the engine."""
        self._lab.close()


gymnasium.register("DMLab-v0", entry_point=f"{__name__}:{DMLab.__name__}")
