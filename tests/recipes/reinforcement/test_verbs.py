"""Agents by the command line: train, resume, evaluate, compare, play, and what is refused in one line."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from recipes.cli import main
from recipes.reinforcement import evaluation
from recipes.reinforcement.environment import Outcome
from recipes.reinforcement.evaluation import Playing, open_agent, play
from recipes.reinforcement.gymnasium_environments import GymnasiumEnvironments
from recipes.reinforcement.settings import make_environments
from tests.faults.hostile_runs import edit_config
from tests.recipes.calling import Capsys, figures_of, mistake, printed, run
from tests.recipes.reinforcement.small import check_restored
from tests.test_cli import words
from waveform.system.errors import UserError

SMOKE, MEMORY = "preset=smoke", "MiniGrid-MemoryS7-v0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run("train", "object_matching", folder / "ct", SMOKE)
    run("train", "object_matching", folder / "lstm", SMOKE, "model=lstm")
    return folder


def test_a_run_is_evaluated_compared_and_drawn(runs: Path, tmp_path: Path) -> None:
    figures = figures_of(tmp_path / "ct.json", "evaluate", runs / "ct", "--episodes", 5)
    assert figures["episodes"] == 5 and figures["step"] == 6 and figures["train_tokens_seen"] == 6 * 8 * 8
    assert (figures["schema"], figures["kind"], figures["unit"]) == (1, "environment", "step")
    assert figures_of(tmp_path / "again.json", "evaluate", runs / "ct", "--episodes", 5) == figures
    namesake = shutil.copytree(runs / "ct", tmp_path / "ct")
    every = [runs / "ct", namesake, runs / "lstm"]
    table = printed("compare", *every, "--episodes", 5, "--plot", tmp_path / "curves.png", "--delays", 0, 5)
    assert table.count(str(runs / "ct")) == table.count(str(namesake)) == 2
    assert "to the first [95% interval]" in table and "successes at a delay of" in table
    said = printed("play", runs / "ct", "--gif", tmp_path / "e.gif", "--plot", tmp_path / "e.png", "--steps", 9)
    assert "9 steps of" in said
    assert all((tmp_path / name).stat().st_size > 500 for name in ("curves.png", "e.gif", "e.png"))


def test_a_difference_has_students_interval(runs: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "play", lambda *given: {**play(*given), "return_standard_error": 1.0})
    lstm = figures_of(tmp_path / "c.json", "compare", runs / "ct", runs / "lstm", "--episodes", 3)[1]
    half, difference = 2.7764451 * 2**0.5, lstm["difference_return"]  # of four degrees of freedom
    assert lstm["interval_95"] == pytest.approx([difference - half, difference + half])


def test_rows_share_the_episodes_that_are_asked_for(runs: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_ROWS", 4)
    assert play(open_agent(runs / "ct"), Playing(episodes=6))["episodes"] == 6  # by three rows, not by four


def test_an_agent_is_evaluated_by_delay(tmp_path: Path) -> None:
    """Every way has the length that was asked for, whatever those of training were: longer ones leave fewer choices."""
    ways = ["task.delay=9", "task.shortest_delay=0"]
    run("train", "object_matching", tmp_path / "ways", SMOKE, "train.max_steps=1", *ways)
    figures = figures_of(tmp_path / "by.json", "evaluate", tmp_path / "ways", "--episodes", 64, "--delays", 0, 9, 30)
    assert [at["delay"] for at in figures["by_delay"]] == [0, 9, 30]
    none, nine, thirty = (at["chances"] for at in figures["by_delay"])
    assert none > 1.2 * figures["chances"] > 1.5 * nine > 0
    assert thirty == 0 and figures["by_delay"][2]["success"] is None  # an episode has 24 steps


class QuickSuccesses:
    """Half of the episodes pay 1 at their only step, the others nothing in 40; what an agent sees never changes."""

    num_actions = 4

    def __init__(self, config: dict[str, Any], *, rows: np.ndarray) -> None:
        self.observation = make_environments(config, rows=rows).observation
        self._seen = np.zeros((len(rows), *self.observation.shape), np.uint8)
        self._random, self._step = np.random.default_rng(0), np.zeros(len(rows))
        self._length = self._random.choice([1, 40], len(rows))

    def begin(self) -> np.ndarray:
        return self._seen

    def step(self, actions: np.ndarray) -> Outcome:
        self._step += 1
        ended = self._step == self._length
        succeeded = ended & (self._length == 1)
        self._length[ended], self._step[ended] = self._random.choice([1, 40], ended.sum()), 0
        return Outcome(self._seen, succeeded.astype(np.float32), ended, succeeded, ended)

    def state(self) -> tuple[np.ndarray, ...]:
        return ()


def test_successes_are_of_the_episodes_whose_returns_count(runs: Path, monkeypatch: MonkeyPatch) -> None:
    """A return of 1 is a success here; quick ones must not count more because others are still being played."""
    monkeypatch.setattr(evaluation, "make_environments", QuickSuccesses)
    figures = play(open_agent(runs / "lstm"), Playing(delays=[3]))
    for one in (figures, *figures["by_delay"]):
        assert one["success"] == one["return_mean"] and one["chances"] == 256
        assert abs(one["success"] - 0.5) < 0.1


MISTAKES = [  # commands, as of tests/test_cli, and what is said of them
    ("train object_matching a b", "'b' is not a key=value setting"),
    ("tune object_matching a", "object_matching has no data to score models on"),
    ("train object_matching a train.batch_size=1000000000000", "the tokens of an update would take"),
    ("train object_matching a task.delay=-1", "task.delay is -1; it must be a whole number"),
    ("train object_matching a model=wavenet", "model=wavenet cannot be an agent's trunk; choose"),
    ("train object_matching a train.sharding=fsdp", "unknown setting 'train.sharding'"),
    ("train object_matching a train.chunk=20", "train.chunk=20 is not a multiple of the window, 8"),
    ("train object_matching a learner.discount=2", "learner.discount is 2.0; it must be from 0 to 1"),
    ("train object_matching a env=CartPole-v1", "env is a setting of the recipe rl; leave it out"),
    ("train rl a", "the recipe rl needs an environment, for example env=MiniGrid"),
    ("train rl a env=x env_options=3", "Expected `object | null`, got `int` - at `env_options`"),
    ("train rl a env=x env_actions=1", "Expected `int` >= 2 - at `env_actions`"),
    ("train rl a env=x task.delay=2", "task.delay is a setting of the recipe object_matching"),
    ("sample P/ct", "is one of the runs of agents, which sample does not take"),
    ("evaluate P/ct --rows 4", "--rows is not for runs of agents"),
    ("evaluate P/ct --delays 3 -1", "task.delay is -1"),
    ("evaluate P/ct --envs CartPole-v1", "was not trained in a Gymnasium environment; leave out --envs"),
    ("evaluate P/ct --episodes 0", "--episodes is 0"),
    ("play P/ct", "nothing would be drawn"),
    ("play P/ct --gif e.gif --steps 0", "--steps is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("command", "says"), MISTAKES)
def test_a_mistake_is_one_line(command: str, says: str, runs: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in mistake(words(command, runs, tmp_path))
    assert not any(tmp_path.iterdir())


def test_verbs_of_other_runs_refuse_agents(runs: Path, capsys: Capsys) -> None:
    others = "only evaluate, compare and `python -m recipes play` take"
    for says, verb, *more in (
        ("report does not take", "report", "--out", runs / "page.html"),
        (others, "analyse"),
        (others, "export", runs / "x.zip"),
    ):
        assert main([verb, *map(str, [runs / "ct", *more])]) == 2
        said = capsys.readouterr()
        assert f"is one of the runs of agents, which {says}\n" in said.err
        assert said.out == ""  # it has not played


@pytest.mark.parametrize("verb", ["evaluate", "compare"])
def test_a_file_that_cannot_be_written_is_refused_before_it_plays(
    verb: str, runs: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.reinforcement.evaluation.play", lambda *_, **__: pytest.fail("it played"))
    assert "is a folder" in mistake([verb, runs / "ct", "--json", runs])


@pytest.mark.parametrize("room, rows", [(100, 1), (10_000, 20)])
def test_memories_beyond_this_machine_are_refused_before_they_are_made(
    room: int, rows: int, runs: Path, monkeypatch: MonkeyPatch
) -> None:
    def require(num_bytes: int, *, what: str, remedy: str) -> None:
        if num_bytes > room:
            raise UserError(f"{what} would take too much; {remedy}")

    monkeypatch.setattr("waveform.engine.state_ram.require_ram", require)  # the machine's own limit is needed elsewhere
    assert f"the model's memories of {rows} rows would take" in mistake(["evaluate", runs / "ct", "--episodes", 10])


def test_gymnasium_missing_is_one_line(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.reinforcement.gymnasium_environments.find_spec", lambda name: None)
    line = mistake(["train", "rl", tmp_path / "a", "env=CartPole-v1"])
    assert line.endswith('needs gymnasium, which is not installed; install it with pip install "waveform[rl]"')


class TestGymnasium:
    """With Gymnasium and MiniGrid, which are an optional part."""

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("gymnasium")
        pytest.importorskip("minigrid")

    def test_an_agent_trains_in_minigrid(self, tmp_path: Path) -> None:
        run("train", "rl", tmp_path / "m", SMOKE, f"env={MEMORY}", "train.max_steps=2")
        assert figures_of(tmp_path / "m.json", "evaluate", tmp_path / "m", "--episodes", 2)["chances"] >= 2
        with pytest.raises(UserError, match=r"was not trained on object matching; leave out --delays"):
            open_agent(tmp_path / "m").at_delay(3)
        others = ["MiniGrid-MemoryS9-v0", MEMORY]
        figures = figures_of(tmp_path / "by.json", "evaluate", tmp_path / "m", "--episodes", 2, "--envs", *others)
        assert [at["env"] for at in figures["by_env"]] == others
        ninth, own = (at["return_mean"] for at in figures["by_env"])
        assert own == figures["return_mean"] != ninth
        line = mistake(["evaluate", tmp_path / "m", "--envs", "CartPole-v1"])
        assert line.endswith(f"shows other observations, or takes other actions, than env={MEMORY}")
        run("play", tmp_path / "m", "--gif", tmp_path / "m.gif", "--steps", 3)

    @pytest.mark.parametrize("env, kind", [("CartPole-v1", "vector"), ("FrozenLake-v1", "grid"), (MEMORY, "grid")])
    def test_replaying_restores_an_environment(self, env: str, kind: str) -> None:
        make = partial(GymnasiumEnvironments, env, seed=3, rows=np.arange(3))
        assert check_restored(make, num_rows=3, num_steps=60, kept=40).observation.kind == kind

    def test_an_environment_is_made_with_options(self, tmp_path: Path) -> None:
        train = ["train", "rl", tmp_path / "m", SMOKE, f"env={MEMORY}", "train.max_steps=1"]
        line = mistake([*train, "env_options={view:3}"])
        assert "unexpected keyword argument 'view'" in line and line.endswith("check its name, package and options")
        assert "cannot make it (AssertionError); check its name" in mistake([*train, "env_options={agent_view_size:2}"])
        run(*train, "env_options={agent_view_size:3}")
        opened = open_agent(tmp_path / "m", env=f'{MEMORY} {{"agent_view_size": 3}}')
        assert opened.actors(2).environments.observation.shape == (3 * 3 * 3,)

    def test_agents_may_have_the_first_actions_only(self, tmp_path: Path) -> None:
        train = ["train", "rl", tmp_path / "m", SMOKE, f"env={MEMORY}", "train.max_steps=1"]
        assert mistake([*train, "env_actions=9"]).endswith(f"env_actions is 9, but env={MEMORY} has 7 actions")
        run(*train, "env_actions=3")
        actors = open_agent(tmp_path / "m").actors(4)
        actors.collect(40)
        assert actors.agent.num_actions == 3 and set(actors.environments.state()[2].flatten().tolist()) == {0, 1, 2}

    def test_a_package_of_ones_own_is_imported(self, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
        """`env=PACKAGE:NAME`, as for a wrapper of DMLab: the environment is known only once its package is imported."""
        maker = "gymnasium.envs.classic_control:CartPoleEnv"
        code = f"import gymnasium\ngymnasium.register('Own-v0', entry_point='{maker}')"
        (tmp_path / "own_levels.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        environments = GymnasiumEnvironments("own_levels:Own-v0", seed=0, rows=np.arange(2))
        assert environments.observation.kind == "vector" and environments.begin().shape == (2, 4)

    @pytest.mark.parametrize(
        "space, shown, seen",
        [
            ({"n": 500}, 499, 499),
            ({"n": 5, "start": -2}, -2, 0),
            ({"low": 0, "high": 100, "shape": (1,), "dtype": np.uint8}, [100], 100),
            ({"low": 0, "high": 255, "shape": (1,), "dtype": np.uint8}, [255], 255),  # a byte of memory, as Atari's
        ],
    )
    def test_no_two_observations_are_seen_as_one(self, space: dict[str, Any], shown: Any, seen: int) -> None:
        import gymnasium

        class Shows(gymnasium.Env[Any, Any]):
            action_space = gymnasium.spaces.Discrete(2)
            observation_space: Any = (gymnasium.spaces.Discrete if "n" in space else gymnasium.spaces.Box)(**space)

            def reset(self, **_: Any) -> Any:
                return np.array(shown), {}

        gymnasium.registry.pop("Shows-v0", None)
        gymnasium.register("Shows-v0", Shows, disable_env_checker=True)
        environments = GymnasiumEnvironments("Shows-v0", seed=0, rows=np.arange(1))
        assert environments.begin().tolist() == [[seen]] and environments.observation.num_values > seen

    def test_a_table_of_numbers_is_seen_as_one_vector(self, tmp_path: Path) -> None:
        import gymnasium
        from gymnasium.wrappers import FrameStackObservation

        gymnasium.register("Stacked-v0", lambda: FrameStackObservation(gymnasium.make("CartPole-v1"), 2))
        run("train", "rl", tmp_path / "run", SMOKE, "env=Stacked-v0", "train.max_steps=1")

    def test_a_run_has_nothing_imported_or_made_with_options_that_the_user_does_not_name(
        self, tmp_path: Path, monkeypatch: MonkeyPatch
    ) -> None:
        (tmp_path / "agent").mkdir()
        (tmp_path / "agent" / "payload.py").write_text("import pathlib\npathlib.Path('RAN').touch()")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        run("train", "rl", "agent/run", SMOKE, "env=CartPole-v1", "train.max_steps=1")

        def edited(**changes: Any) -> None:
            edit_config(tmp_path / "agent" / "run", lambda config: config.update(changes))

        evaluate, compare = ([verb, "agent/run", "--episodes", 1] for verb in ("evaluate", "compare"))
        edited(env="agent.payload:CartPole-v1")
        for command in (evaluate, compare, ["play", "agent/run", "--gif", "it.gif"]):
            assert mistake(command).endswith("if you trust them, add --env agent.payload:CartPole-v1")
        assert not Path("RAN").exists()
        run(*evaluate, "--env", "agent.payload:CartPole-v1")
        assert Path("RAN").exists()
        edited(env="CartPole-v1", env_options={"sutton_barto_reward": True})
        named = 'CartPole-v1 {"sutton_barto_reward": true}'
        assert mistake(evaluate).endswith(f"add --env '{named}'")
        run(*evaluate, "--env", named)
        line = mistake([*evaluate, "--env", "CartPole-v0"])
        assert line.endswith(f"was trained in {named}; leave it out, or give --envs CartPole-v0")

    @pytest.mark.parametrize(
        "env, line",
        [
            ("Nope-v0", "env=Nope-v0: Gymnasium cannot make it"),
            ("nopackage:Nope-v0", "env=nopackage:Nope-v0: Gymnasium cannot make it (No module named 'nopackage')"),
            ("Pendulum-v1", "has actions of the kind Box"),
            ("Blackjack-v1", "shows observations of the kind Tuple; agents see images, small grids and real numbers"),
        ],
    )
    def test_unfit_environments_are_one_line(self, env: str, line: str, tmp_path: Path) -> None:
        assert line in mistake(["train", "rl", tmp_path / "a", SMOKE, f"env={env}"])
        assert not (tmp_path / "a").exists()
