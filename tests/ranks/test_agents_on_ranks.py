"""Agents in two processes against one: law 8 (ranks), and a run resumed on another number of processes."""

from pathlib import Path

import pytest
import torch

from tests.ranks.run_ranks import run_ranks
from tests.recipes.reinforcement.small import small_learner, small_trainer
from waveform.ranks.distributed import World

pytestmark = pytest.mark.slow
_UPDATES = 4  # within which episodes end, and unrolls are short
Weights = dict[str, torch.Tensor]


def _trained(folder: Path, name: str, world: World | None = None) -> tuple[list[Weights], Weights]:
    """The gradients of some updates, in fp64, and the weights after them, which are saved."""
    trainer, learner = small_trainer(folder, name=name, world=world, dtype=torch.float64, max_steps=_UPDATES + 2)
    gradients: list[Weights] = []

    def note(*_: object) -> None:
        gradients.append({n: p.grad.clone() for n, p in learner.agent.named_parameters() if p.grad is not None})

    learner.optimiser.register_step_pre_hook(note)
    for _ in range(_UPDATES):
        learner.update()
    trainer.save()
    return gradients, {name: value.clone() for name, value in learner.agent.state_dict().items()}


def _work(world: World, folder: Path) -> None:
    for name in ("compressive_transformer", "lstm"):
        figures = _trained(folder / f"{name}-run", name, world)
        if world.is_first:
            torch.save(figures, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    run_ranks(_work, 2, folder)
    return folder


@pytest.mark.parametrize("name", ["compressive_transformer", "lstm"])
def test_law_8_two_ranks_give_the_gradients_of_one(name: str, two_ranks: Path, tmp_path: Path) -> None:
    gradients, weights = _trained(tmp_path / "run", name)
    there, weights_there = torch.load(two_ranks / f"{name}.pt")
    torch.testing.assert_close(gradients, there, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(weights, weights_there, rtol=0, atol=1e-7)


def test_one_process_continues_the_run_of_two(two_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows come along, so it continues as one process does that trained from the beginning."""
    options = {"name": "compressive_transformer", "dtype": torch.float64, "max_steps": _UPDATES + 2}
    whole = small_learner(**options)
    for _ in range(_UPDATES + 2):
        whole.update()
    _, resumed = small_trainer(two_ranks / "compressive_transformer-run", **options)
    assert resumed.step == _UPDATES and "processes was 2 and is 1: " in capsys.readouterr().err
    for _ in range(2):
        resumed.update()
    torch.testing.assert_close(resumed.agent.state_dict(), whole.agent.state_dict(), rtol=0, atol=1e-5)
