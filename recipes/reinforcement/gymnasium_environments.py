"""Any Gymnasium environment, one object for each row: MiniGrid's, DMLab, a user's own.

Gymnasium cannot save an environment, so what is saved is what led to its state: each episode begins with a seed of its
own, and restoring replays the episode's actions. That is exact for every environment that its seed makes deterministic.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from recipes.reinforcement.environment import Observation, Outcome
from recipes.reinforcement.random_rows import RandomRows
from waveform.system.errors import UserError

_STREAM = 3  # of random numbers
_LONGEST_EPISODE = 10_000  # steps of an environment that names no limit; longer ones are ended there
_LARGEST_GRID = 4096  # cells; more whole numbers than that are pixels
_GRID_VALUES = 16  # MiniGrid's cells have kinds up to 10, colours up to 5, states up to 3
# These packages register their environments when they are imported.
_PACKAGES = {"MiniGrid-": "minigrid", "DMLab-": "recipes.reinforcement.dmlab"}
_KINDS = "agents see images, small grids and real numbers (Box), or one number (Discrete)"


class GymnasiumEnvironments:
    """N rows of a Gymnasium environment; see the module's docstring."""

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        rows: np.ndarray,
        options: Mapping[str, Any] | None = None,
        num_actions: int | None = None,
    ) -> None:
        """options: arguments with which each is made; num_actions: of its actions, the first so many; None: all.

        Raises UserError for an environment that is unknown or not installed, or that agents cannot see or act in.
        """
        self._name = name
        self._envs = [_make(name, options or {}) for _ in rows]
        first = self._envs[0]
        self.observation, self._shown = _observation(name, first.observation_space)
        space = first.observation_space if self._shown is None else first.observation_space[self._shown]
        self._first_value = int(getattr(space, "start", 0))  # of a Discrete one
        actions = first.action_space
        if type(actions).__name__ != "Discrete":
            raise UserError(f"env={name} has actions of the kind {actions}; agents choose one of several (Discrete)")
        self.num_actions = int(actions.n) if num_actions is None else num_actions
        if self.num_actions > actions.n:
            raise UserError(f"env_actions is {num_actions}, but env={name} has {actions.n} actions")
        self._first_action = int(actions.start)
        limit = getattr(first.spec, "max_episode_steps", None) or getattr(first.unwrapped, "max_steps", None)
        self._limit = min(int(limit or _LONGEST_EPISODE), _LONGEST_EPISODE)
        self._random = RandomRows(seed, stream=_STREAM, rows=rows)
        num_rows = len(rows)
        self._episode = np.zeros(num_rows, np.int64)
        self._length = np.zeros(num_rows, np.int64)
        self._actions = np.zeros((num_rows, self._limit), np.int32)
        self._return = np.zeros(num_rows)

    def begin(self) -> np.ndarray:
        return np.stack([self._begin_episode(row) for row in range(len(self._envs))])

    def _begin_episode(self, row: int) -> np.ndarray:
        self._episode[row] += 1
        self._length[row], self._return[row] = 0, 0.0
        return self._reset(row)

    def _reset(self, row: int) -> np.ndarray:
        uniform = self._random.uniform(self._episode[row : row + 1], slice(row, row + 1))
        observation, _ = self._envs[row].reset(seed=int(uniform[0] * 2**31))
        return self._seen(observation)

    def step(self, actions: np.ndarray) -> Outcome:
        """actions [N] -> what follows; an episode ends when the environment says so, or at its limit of steps.

        An episode is a success if its return is above 0.
        """
        observations, rewards, ends = [], np.zeros(len(actions), np.float32), np.zeros(len(actions), bool)
        for row, (env, action) in enumerate(zip(self._envs, actions.tolist(), strict=True)):
            observation, reward, terminated, truncated, _ = env.step(action + self._first_action)
            self._actions[row, self._length[row]] = action
            self._length[row] += 1
            rewards[row] = float(reward)
            ends[row] = terminated or truncated or self._length[row] >= self._limit
            self._return[row] += float(reward)
            observations.append(self._seen(observation) if not ends[row] else None)
        successes = ends & (self._return > 0)
        shown = [seen if seen is not None else self._begin_episode(row) for row, seen in enumerate(observations)]
        return Outcome(np.stack(shown), rewards, ends, successes, ends)

    def _seen(self, observation: Any) -> np.ndarray:
        """One observation, of the part that agents see."""
        part = observation if self._shown is None else observation[self._shown]
        shown = np.asarray(part) - self._first_value
        return shown.astype(self.observation.dtype).reshape(self.observation.shape)

    def state(self) -> Sequence[np.ndarray]:
        """The episode's number, its steps [N], its actions [N, limit] and its return so far [N]."""
        return (self._episode, self._length, self._actions, self._return)

    def restore(self, state: Sequence[np.ndarray]) -> None:
        """Play the present episodes again, up to where they were."""
        self._episode, self._length, self._actions, self._return = (array.copy() for array in state)
        for row, env in enumerate(self._envs):
            self._reset(row)
            for action in self._actions[row, : self._length[row]].tolist():
                env.step(action + self._first_action)

    def picture(self) -> np.ndarray:
        """The first row as the environment draws it. Raises UserError if it does not."""
        drawn = self._envs[0].render()
        if not isinstance(drawn, np.ndarray):
            raise UserError(f"env={self._name} does not draw itself (render_mode rgb_array)")
        return drawn.astype(np.uint8)


def _make(name: str, options: Mapping[str, Any]) -> Any:
    """Make an environment. Raises UserError, naming the remedy, if there is no such environment here."""
    module, colon, registered = name.rpartition(":")
    needed = [package for prefix, package in _PACKAGES.items() if name.startswith(prefix)]
    for package in ("gymnasium", *needed):
        if find_spec(package) is None:
            raise UserError(
                f'env={name} needs {package}, which is not installed; install it with pip install "waveform[rl]"'
            )
        import_module(package)
    gymnasium: Any = import_module("gymnasium")
    try:
        if colon:
            import_module(module)  # which registers it
        maker: Any = gymnasium.spec(registered).entry_point
        if isinstance(maker, str):
            maker = gymnasium.envs.registration.load_env_creator(maker)
        draws = "rgb_array" in getattr(maker, "metadata", {}).get("render_modes", ())
        return gymnasium.make(registered, **({"render_mode": "rgb_array"} if draws else {}), **options)
    except UserError:
        raise
    except Exception as error:  # of whatever the environment's package raises
        reason = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
        raise UserError(
            f"env={name}: Gymnasium cannot make it ({reason}); check its name, package and options"
        ) from error


def _observation(name: str, space: Any) -> tuple[Observation, str | None]:
    """What agents see of a space: all of it, or the `image` of a dict, as MiniGrid and DMLab have it."""
    shown = None
    if type(space).__name__ == "Dict":
        shown = next((key for key in ("image", "rgb", "RGB_INTERLEAVED") if key in space.spaces), None)
        if shown is None:
            raise UserError(f"env={name} shows {', '.join(space.spaces)}, of which none is an image; {_KINDS}")
        space = space.spaces[shown]
    kind = type(space).__name__
    if kind == "Discrete":
        return Observation("grid", (1,), int(space.n)), shown
    if kind != "Box":
        raise UserError(f"env={name} shows observations of the kind {kind}; {_KINDS}")
    shape = tuple(space.shape)
    if np.issubdtype(space.dtype, np.floating) and len(shape) < 3:
        return Observation("vector", (int(np.prod(shape)),)), shown
    if len(shape) == 3 and shape[2] in (1, 3, 4) and min(shape[:2]) >= 16 and space.dtype == np.uint8:
        return Observation("image", shape), shown
    if np.issubdtype(space.dtype, np.integer) and np.prod(shape) <= _LARGEST_GRID and len(shape) < 4:
        highest = int(space.high.max())
        if highest < 256 and space.low.min() >= 0:
            # MiniGrid declares its small numbers as 0 to 255; flat bytes, such as Atari's RAM, do fill that range.
            says_nothing = highest == 255 and space.dtype == np.uint8 and len(shape) == 3
            return Observation("grid", (int(np.prod(shape)),), _GRID_VALUES if says_nothing else highest + 1), shown
    raise UserError(f"env={name} shows observations of the kind {space}; {_KINDS}")
