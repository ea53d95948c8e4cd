"""Object matching: remember an object, and choose the one that differs; a vectorised environment in numpy.

    first room            corridor            second room
    an object on the wall,  nothing is seen     two objects, one of which was on the wall:
    out of reach, a pad     for `delay` steps   the other one pays +10, this one -10,
    that pays +1                                and the trial begins anew

After the rules of DMLab's `rooms_select_nonmatching_object` (Beattie et al. 2016; DMLab-30), in small rooms seen from
above. The shown object stays for the episode; the pad's place, the other object and both places are drawn anew in each
trial. The corridor is ours: in the original, touching the pad leads to the second room at once. With `shortest_delay`,
corridors differ in length, and what an agent learns in short ones helps it in long ones.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from recipes.reinforcement.environment import Observation, Outcome
from recipes.reinforcement.random_rows import RandomRows
from waveform.system.errors import UserError
from waveform.system.rules import Rule, check_rules, whole_number

PAD_REWARD, CHOICE_REWARD = 1.0, 10.0
# What a cell can show; objects follow.
WALL, FLOOR, DARK, PAD, AGENT, FIRST_OBJECT = range(6)
_MOST_OBJECTS = 256 - FIRST_OBJECT  # cells are bytes
FIRST_ROOM, WAY, SECOND_ROOM = range(3)
# Of random numbers; an agent's actions are drawn from stream 2.
_STREAM, _DELAY_STREAM = 1, 3
_DRAWS_PER_TRIAL = 5
_CELL_PIXELS = 24
_Delay = Annotated[int, whole_number(0, 1 << 20)]
_ROOM = Rule(lambda value: value in range(3, 32, 2), "it must be odd, from 3 to 31")


@dataclass
class ObjectMatchingConfig:
    """Fields of `task` of the recipe object_matching."""

    objects: Annotated[int, whole_number(2, _MOST_OBJECTS)] = 8  # kinds of objects
    delay: _Delay = 8  # steps of the corridor between the rooms, in which nothing is seen
    shortest_delay: _Delay | None = None  # each trial draws its delay from here to `delay`; null: always `delay`
    room: Annotated[int, _ROOM] = 3  # cells on each side of a room; odd, because the agent begins in the middle
    episode: Annotated[int, whole_number(1, 1 << 24)] = 180  # steps; 12 s of the original

    def __post_init__(self) -> None:
        check_rules(self, section="task")
        if self.shortest_delay is not None and self.shortest_delay > self.delay:
            raise UserError(
                f"task.shortest_delay is {self.shortest_delay}; it must be at most task.delay, {self.delay}"
            )


class ObjectMatching:
    """N rows of the task; see the module's docstring. Actions are up, right, down and left."""

    num_actions = 4

    def __init__(self, config: ObjectMatchingConfig, *, seed: int, rows: np.ndarray) -> None:
        """rows: indices [N] over all processes."""
        self.config = config
        size = config.room
        # The first line of cells is the wall on which the object hangs, those below it are the room.
        self.observation = Observation("grid", ((size + 1) * size,), FIRST_OBJECT + config.objects)
        self._random = RandomRows(seed, stream=_STREAM, rows=rows)
        self._random_delays = RandomRows(seed, stream=_DELAY_STREAM, rows=rows)
        self._rows = np.arange(len(rows))
        self._centre = size * size // 2
        self._wall = size // 2  # the cell of the object on the wall
        y, x = np.divmod(np.arange(size * size), size)
        targets = [(y - 1, x), (y, x + 1), (y + 1, x), (y, x - 1)]
        # [cell, action] -> cell: walls stop the agent.
        self._moved = np.stack([t.clip(0, size - 1) * size + u.clip(0, size - 1) for t, u in targets], axis=1)
        self._state = np.zeros((9, len(rows)), np.int64)  # of which these are views
        self._trial, self._step, self._place, self._waited, *cells = self._state
        self._shown, self._other, self._agent, self._match, self._differs = cells
        self._delay = self._delays()

    def begin(self) -> np.ndarray:
        self._begin_episode(self._rows)
        return self._observe()

    def step(self, actions: np.ndarray) -> Outcome:
        """actions [N] -> what follows; in the corridor they have no effect."""
        on_way = self._place == WAY
        self._agent[:] = np.where(on_way, self._agent, self._moved[self._agent, actions])
        first, second = self._place == FIRST_ROOM, self._place == SECOND_ROOM
        leaves = first & (self._agent == self._match)  # in the first room, `_match` is the pad's cell
        takes_match, takes_other = second & (self._agent == self._match), second & (self._agent == self._differs)
        reward = PAD_REWARD * leaves + CHOICE_REWARD * takes_other - CHOICE_REWARD * takes_match
        self._waited[:] = np.where(leaves, 0, self._waited + on_way)
        self._place[:] = np.where(leaves, WAY, self._place)
        arrives = (self._place == WAY) & (self._waited >= self._delay)
        if arrives.any():
            self._enter_second_room(np.flatnonzero(arrives))
        chosen = takes_match | takes_other
        if chosen.any():
            self._begin_trial(np.flatnonzero(chosen))
        self._step += 1
        ended = self._step >= self.config.episode
        if ended.any():
            self._begin_episode(np.flatnonzero(ended))
        return Outcome(self._observe(), reward.astype(np.float32), ended, takes_other, chosen)

    def _draw(self, rows: np.ndarray, number: int, choices: int) -> np.ndarray:
        """A whole number below `choices` for each of `rows`: the trial's `number`-th draw."""
        counts = self._trial[rows] * _DRAWS_PER_TRIAL + number
        return (self._random.uniform(counts, rows) * choices).astype(np.int64)

    def _delays(self) -> np.ndarray:
        """The delay of each row's trial."""
        longest, shortest = self.config.delay, self.config.shortest_delay
        if shortest is None:
            return np.full(len(self._rows), longest)
        return shortest + (self._random_delays.uniform(self._trial) * (longest - shortest + 1)).astype(np.int64)

    def _begin_episode(self, rows: np.ndarray) -> None:
        self._step[rows] = 0
        self._begin_trial(rows)
        self._shown[rows] = self._draw(rows, 4, self.config.objects)

    def _begin_trial(self, rows: np.ndarray) -> None:
        self._trial[rows] += 1
        self._delay = self._delays()
        self._place[rows], self._waited[rows] = FIRST_ROOM, 0
        self._agent[rows] = self._centre
        cell = self._draw(rows, 0, self.config.room**2 - 1)
        self._match[rows] = cell + (cell >= self._centre)

    def _enter_second_room(self, rows: np.ndarray) -> None:
        config, shown = self.config, self._shown[rows]
        self._place[rows] = SECOND_ROOM
        self._agent[rows] = self._centre
        other = self._draw(rows, 1, config.objects - 1)
        self._other[rows] = other + (other >= shown)
        # Two different cells other than the centre.
        match, differs = self._draw(rows, 2, config.room**2 - 1), self._draw(rows, 3, config.room**2 - 2)
        differs += differs >= match
        self._match[rows] = match + (match >= self._centre)
        self._differs[rows] = differs + (differs >= self._centre)

    def _observe(self) -> np.ndarray:
        size, rows = self.config.room, self._rows
        first, second = self._place == FIRST_ROOM, self._place == SECOND_ROOM
        cells = np.full((len(rows), (size + 1) * size), FLOOR, np.uint8)
        cells[:, :size] = WALL
        cells[first, self._wall] = FIRST_OBJECT + self._shown[first]
        room = cells[:, size:]
        room[rows[first], self._match[first]] = PAD
        room[rows[second], self._match[second]] = FIRST_OBJECT + self._shown[second]
        room[rows[second], self._differs[second]] = FIRST_OBJECT + self._other[second]
        room[rows, self._agent] = AGENT
        cells[self._place == WAY] = DARK
        return cells

    def state(self) -> Sequence[np.ndarray]:
        """Nine counters and places, [N] each."""
        return tuple(self._state)

    def restore(self, state: Sequence[np.ndarray]) -> None:
        self._state[:] = state
        self._delay = self._delays()

    def picture(self) -> np.ndarray:
        """The first row, drawn: objects are coloured shapes, the pad is a ring, the agent a white disc."""
        size = self.config.room
        values = self._observe()[0].reshape(size + 1, size)
        return np.block([[[cell_picture(int(value), self.config.objects)] for value in line] for line in values])


def cell_picture(value: int, num_objects: int) -> np.ndarray:
    """One cell [pixels, pixels, 3]; value: as in an observation."""
    ground = {WALL: (90, 90, 96), DARK: (20, 20, 24)}.get(value, (206, 200, 188))
    picture = np.empty((_CELL_PIXELS, _CELL_PIXELS, 3), np.uint8)
    picture[:] = ground
    y, x = np.mgrid[:_CELL_PIXELS, :_CELL_PIXELS] / (_CELL_PIXELS - 1) * 2 - 1
    radius = np.hypot(x, y)
    if value == PAD:
        picture[(radius > 0.5) & (radius < 0.8)] = (48, 87, 143)
    elif value == AGENT:
        picture[radius < 0.6] = (40, 40, 44)
        picture[radius < 0.45] = (250, 250, 250)
    elif value >= FIRST_OBJECT:
        kind = value - FIRST_OBJECT
        shapes = (radius < 0.75, np.maximum(abs(x), abs(y)) < 0.65, abs(x) + abs(y) < 0.85, y > 2 * abs(x) - 0.75)
        colour = colorsys.hsv_to_rgb(kind / num_objects, 0.85, 0.8)
        picture[shapes[kind % len(shapes)] & (radius < 0.95)] = [round(255 * part) for part in colour]
        picture[0], picture[-1], picture[:, 0], picture[:, -1] = ground, ground, ground, ground
    return picture
