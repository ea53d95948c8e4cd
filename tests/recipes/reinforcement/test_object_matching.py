"""Object matching: the rules of the original, one by one, and rows that do not depend on who has them."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from recipes.reinforcement.object_matching import AGENT, DARK, FIRST_OBJECT, PAD, ObjectMatching, ObjectMatchingConfig
from recipes.reinforcement.play import save_gif, save_steps
from tests.recipes.reinforcement.small import check_restored
from waveform.system.errors import UserError

UP, RIGHT, DOWN, LEFT = range(4)


def towards(observation: np.ndarray, cell: int, *, size: int = 3) -> int:
    """The action that brings the agent nearer to a cell of what it sees."""
    (agent,) = np.flatnonzero(observation == AGENT)
    (y, x), (to_y, to_x) = divmod(int(agent), size), divmod(cell, size)
    if x != to_x and observation[y * size + x + np.sign(to_x - x)] < FIRST_OBJECT:
        return RIGHT if to_x > x else LEFT
    if y != to_y and observation[(y + np.sign(to_y - y)) * size + x] < FIRST_OBJECT:
        return DOWN if to_y > y else UP
    return int((RIGHT if to_x > x else LEFT) if x != to_x else (DOWN if to_y > y else UP))


class Player:
    """Plays one row by the rules, and remembers what was on the wall."""

    def __init__(self, env: ObjectMatching, *, wants: str) -> None:
        self.env, self.wants, self.shown = env, wants, 0
        self.now = env.begin()[0]

    def step(self) -> tuple[float, bool]:
        """One step towards the pad, or towards the object that is wanted."""
        if self.now[1] >= FIRST_OBJECT:  # on the wall
            self.shown = int(self.now[1])
        objects = [cell for cell in np.flatnonzero(self.now >= FIRST_OBJECT) if cell > 2]
        if objects:
            match = self.wants == "match"
            (cell,) = [cell for cell in objects if (self.now[cell] == self.shown) == match]
        else:
            pads = np.flatnonzero(self.now == PAD)
            cell = pads[0] if len(pads) else None
        action = UP if cell is None else towards(self.now, int(cell))
        outcome = self.env.step(np.array([action]))
        self.now = outcome.observation[0]
        return float(outcome.reward[0]), bool(outcome.ended[0])


def one(seed: int = 0, **settings: int) -> ObjectMatching:
    return ObjectMatching(ObjectMatchingConfig(**settings), seed=seed, rows=np.array([3]))


@pytest.mark.parametrize("wants, reward", [("other", 10.0), ("match", -10.0)])
def test_rewards_are_those_of_the_original(wants: str, reward: float) -> None:
    player = Player(one(delay=5, episode=200), wants=wants)
    rewards = [player.step()[0] for _ in range(200)]
    paid = [r for r in rewards if r]
    assert paid[::2] == [1.0] * len(paid[::2])  # the pad, in each trial
    assert paid[1::2] == [reward] * len(paid[1::2]) and len(paid) > 20


@pytest.mark.parametrize("delay", [0, 1, 7])
def test_nothing_is_seen_for_exactly_the_delay(delay: int) -> None:
    assert set(_delays_seen(one(delay=delay, episode=100), num_steps=100)) == {delay}


def test_delays_are_drawn_from_the_shortest_to_the_longest() -> None:
    lengths = _delays_seen(one(delay=5, shortest_delay=2, episode=2000), num_steps=2000)
    counts = [lengths.count(delay) for delay in range(8)]
    assert sum(counts) == len(lengths) > 150
    assert [count > 0.15 * len(lengths) for count in counts] == [2 <= delay <= 5 for delay in range(8)]


def _delays_seen(env: ObjectMatching, *, num_steps: int) -> list[int]:
    """Dark steps before each right choice."""
    player = Player(env, wants="other")
    dark, lengths = 0, []
    for _ in range(num_steps):
        reward, _ = player.step()
        if (player.now == DARK).all():
            dark += 1
        elif reward == 10.0:
            lengths.append(dark)
            dark = 0
    return lengths


def test_the_shown_object_stays_for_the_episode_and_all_else_is_drawn_anew() -> None:
    player = Player(one(delay=0, episode=300), wants="other")
    shown: list[set[int]] = [set()]
    pads, others = set(), set()
    for _ in range(3000):
        wall = int(player.now[1])
        if wall >= FIRST_OBJECT:
            shown[-1].add(wall)
            pads |= set(np.flatnonzero(player.now == PAD).tolist())
        others |= {int(v) for v in player.now[3:] if v >= FIRST_OBJECT}
        if player.step()[1]:
            shown.append(set())
    assert all(len(objects) == 1 for objects in shown[:-1])
    assert len(set.union(*shown)) > 3  # of 10 episodes
    assert pads == {3, 4, 5, 6, 8, 9, 10, 11}  # every cell but the centre
    assert others == set(range(FIRST_OBJECT, FIRST_OBJECT + 8))


def test_the_pair_and_its_places_say_nothing_of_which_was_shown() -> None:
    """In second rooms, each pair of objects is as often shown first as second, and so is each cell."""
    env = ObjectMatching(ObjectMatchingConfig(objects=3, delay=0, episode=40), seed=1, rows=np.arange(4096))
    env.begin()
    random, pairs, cells = np.random.default_rng(0), np.zeros((3, 3)), np.zeros((2, 9))
    for _ in range(200):
        outcome = env.step(random.integers(0, 4, 4096))
        second = (outcome.reward == 1.0) & ~outcome.ended  # on arrival, as there is no way
        np.add.at(pairs, (env._shown[second], env._other[second]), 1)
        np.add.at(cells[0], env._match[second], 1)
        np.add.at(cells[1], env._differs[second], 1)
    assert (np.diag(pairs) == 0).all() and (cells[:, 4] == 0).all()
    off = pairs[~np.eye(3, dtype=bool)]
    assert off.max() / off.min() < 1.15
    sides = np.delete(cells, 4, axis=1)
    assert (abs(sides[0] / sides[1] - 1) < 0.1).all()


@pytest.mark.parametrize("shortest", [None, 0])
def test_restoring_continues_exactly(shortest: int | None) -> None:
    config = ObjectMatchingConfig(episode=33, delay=3, shortest_delay=shortest)
    make = partial(ObjectMatching, config, seed=2, rows=np.arange(8))
    assert check_restored(make, num_rows=8, num_steps=120, kept=50).num_actions == 4


def test_bad_settings_are_named() -> None:
    with pytest.raises(UserError, match=r"task\.room is 4; it must be odd"):
        ObjectMatchingConfig(room=4)
    with pytest.raises(UserError, match=r"task\.shortest_delay is 9; it must be at most task\.delay, 8"):
        ObjectMatchingConfig(delay=8, shortest_delay=9)


def test_an_episode_can_be_drawn(tmp_path: Path) -> None:
    from PIL import Image

    player = Player(one(delay=2), wants="other")
    frames = [player.env.picture()]
    for _ in range(14):
        player.step()
        frames.append(player.env.picture())
    save_gif(tmp_path / "a" / "episode.gif", frames)
    save_steps(tmp_path / "episode.png", frames, [str(i) for i in range(15)])
    with Image.open(tmp_path / "a" / "episode.gif") as image:
        assert getattr(image, "n_frames", 1) > 5
    assert (tmp_path / "episode.png").stat().st_size > 1000
    assert len(np.unique(frames[0].reshape(-1, 3), axis=0)) >= 5  # wall, floor, pad, agent, object
