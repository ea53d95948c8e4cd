"""Several processes against one: law 8 (ranks), evaluation, sharding, resuming on other numbers of ranks."""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import laws
from tests.benchmarks.communication import bytes_sent
from tests.engine.conftest import write_tokens
from tests.engine.test_trainer import assert_bitwise_equal, everything
from tests.engine.training import small_trainer
from tests.ranks.run_ranks import run_ranks
from waveform.engine import checkpoint
from waveform.engine.dynamic import DynamicConfig, evaluate_dynamically
from waveform.engine.evaluator import EvaluateConfig, Evaluation, evaluate
from waveform.engine.interface import optional_parts
from waveform.engine.token_learner import TokenLearner
from waveform.engine.trainer import Trainer
from waveform.ranks import fsdp
from waveform.ranks.distributed import World

# Slow, and all in one worker of pytest-xdist: they share the jobs.
pytestmark = pytest.mark.slow
LENGTHS = [60, 45, 33, 80, 21, 52, 70]
ALL = [(name, case) for name, cases in laws.CONFIGS.items() for case in cases]
FEW = [
    ("compressive_transformer", "conv-ragged"),
    ("compressive_transformer", "conv-no-loss"),  # BPTT
    ("transformer_xl", "pre"),
    ("wavenet", next(iter(laws.CONFIGS["wavenet"]))),
    ("compressive_transformer", "dilated-autoencode-post"),
    ("compressive_transformer", "most-used"),
    ("compressive_transformer", "adaptive-tied"),
    ("transformer_xl", "labelled"),
]
# Number of ranks, sharding, whether activations are computed again.
JOBS = {2: [("none", False), ("fsdp", False), ("fsdp", True)], 3: [("none", False), ("fsdp", False)]}
SETTINGS = [(size, *how) for size, hows in JOBS.items() for how in hows]


def _cases(size: int, kind: str, again: bool) -> list[tuple[str, str]]:
    """All cases once, with two ranks; beyond, what each setting could break."""
    if (size, kind) == (2, "none"):
        return ALL
    if again:
        return FEW[:3]
    return FEW if size == 2 else FEW[:4]


def _trainer(name: str, case: str, folder: Path, world: World | None = None, **train: Any) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = write_tokens(Path(tempfile.mkdtemp(dir=folder)) / "tokens", LENGTHS)  # one for each process
    fields = laws.CONFIGS[name][case]
    if "num_labels" in fields:
        tokens.labels = ["a", "b", None, "b", "a", "b", "a"]
        tokens = tokens.numbered(["a", "b"])
    train |= {"dtype": torch.float64, "batch_size": 6, "unroll": 2 if case == "conv-no-loss" else 1}
    return small_trainer(name, tokens, folder / "run", world=world, fields=fields, **train)


def _figures(learner: TokenLearner, *, dynamic: bool) -> dict[str, Any]:
    """Losses and gradients of three steps, the weights after an update, and an evaluation, all unsharded."""
    losses, gradients = [], []
    for _ in range(3):
        losses.append(learner.world.sum_(learner.accumulate_gradients([learner.stream.next_chunk()])))
        learner.reduce_gradients()
        found = {n: p.grad for n, p in learner.module.named_parameters() if p.grad is not None}
        gradients.append({n: fsdp.whole(grad).clone() for n, grad in found.items()})
        learner.optimiser.zero_grad()
    norms = dict(learner.update()[1])
    weights = {n: fsdp.whole(value.detach()).clone() for n, value in learner.module.state_dict().items()}
    evaluation = _evaluation(learner)
    if dynamic:  # of two rows: one of three ranks never has any
        given = (learner.model, learner.stream.tokens, EvaluateConfig(window=learner.window))
        learning = DynamicConfig("adam", lr=1e-2, rows=2)
        result = evaluate_dynamically(*given, learning, world=learner.world, classes=_CLASSES)
        evaluation |= {f"dynamic {what}": value for what, value in _sums(result).items()}
    return {"losses": losses, "gradients": gradients, "norms": norms, "weights": weights, "evaluation": evaluation}


_CLASSES = torch.arange(laws.VOCAB_SIZE) % 3


def _evaluation(learner: TokenLearner) -> dict[str, torch.Tensor]:
    config = EvaluateConfig(window=learner.window)
    learner.module.eval()
    with fsdp.gathered(learner._scored):
        return _sums(evaluate(learner.model, learner.stream.tokens, config, world=learner.world, classes=_CLASSES))


def _sums(result: Evaluation) -> dict[str, torch.Tensor]:
    sums = {"nats": result.nats, "counts": result.counts, "class": result.class_nats, "of": result.class_counts}
    return {key: torch.from_numpy(value).clone() for key, value in sums.items() if value is not None}


def _saved(trainer: Trainer) -> dict[str, Any]:
    """What a resumed trainer restored, and an evaluation of it, before any step, as of one that a stop interrupted."""
    return {**everything(trainer), "evaluation": _evaluation(trainer.learner)}


class _Sent(TorchDispatchMode):
    """Bytes that this rank sends in collectives of more than a few numbers, if they are rings."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.num_bytes = size, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")):
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.dtype == torch.float64]
            sizes = [t.numel() * t.element_size() for t in tensors]
            share = (self.size - 1) / self.size
            if "allgather" in name or "reduce_scatter" in name:
                self.num_bytes += share * max(sizes)
            elif "allreduce" in name and sum(sizes) > 64:
                self.num_bytes += 2 * share * sum(sizes)
        return func(*args, **(kwargs or {}))


def _count_sent(name: str, case: str, where: Path, world: World, *, kind: str) -> dict[str, float]:
    """Bytes sent in one late update, in which every parameter has a gradient, as seen and as computed before."""
    learner = _trainer(name, case, where, world, sharding=kind, max_steps=20).learner
    for _ in range(3):
        learner.update()
    model = _trainer(name, case, where / "whole").learner.module  # weights not sharded
    units = optional_parts(model).sharding_units(learner.window)
    windows = {"num_windows": learner.config.chunk // learner.window, "unroll": learner.config.unroll}
    computed = bytes_sent(model, num_ranks=world.size, sharding=kind, units=units, **windows)
    with _Sent(world.size) as sent:
        learner.update()
    return {"seen": sent.num_bytes, "computed": computed}


RESUMED = ("compressive_transformer", "labelled")


def _work(world: World, folder: Path) -> None:
    size, rank = world.size, world.rank
    for kind, again in JOBS[size]:
        for name, case in _cases(size, kind, again):
            where = folder / f"{name}-{case}-{kind}-{again}-{rank}"
            train = {"sharding": kind, "checkpoint_activations": again}
            dynamic = kind == "none" and (name, case) in FEW[:4]
            figures = _figures(_trainer(name, case, where, world, **train).learner, dynamic=dynamic)
            if world.is_first:
                torch.save(figures, where / "figures.pt")
    by_clock = _trainer(*RESUMED, folder / "by_clock", world, max_steps=None, max_seconds=2.2)
    by_clock.learner.seconds = 2.0 + rank * 0.05  # no two processes measure the same
    by_clock.run()
    torch.save(dict(by_clock.learner.module.state_dict()), folder / f"by_clock_{rank}.pt")
    for kind in ("none", "fsdp"):
        for name, case in FEW[:4]:
            counts = _count_sent(name, case, folder / f"sent-{name}-{case}-{kind}-{rank}", world, kind=kind)
            torch.save(counts, folder / f"sent-{name}-{case}-{kind}-{rank}.pt")
        for start in sorted(folder.parent.glob("start_*")):  # runs of other numbers of ranks
            resumed = _trainer(*RESUMED, start, world, sharding=kind, max_steps=5)
            torch.save(_saved(resumed), folder / f"resumed-{start.name}-{kind}-{rank}.pt")
            for _ in range(2):
                resumed.learner.update()
            weights = {n: fsdp.whole(value.detach()) for n, value in resumed.learner.module.state_dict().items()}
            torch.save(weights, folder / f"continued-{start.name}-{kind}-{rank}.pt")
        _trainer(*RESUMED, folder / f"end_{kind}", world, sharding=kind, max_steps=3).run()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of a job of two ranks and one of three: each resumes runs of another number of ranks."""
    folder = tmp_path_factory.mktemp("jobs")
    _trainer(*RESUMED, folder / "start_1", max_steps=3).run()
    for size in (2, 3):
        (folder / str(size)).mkdir()
        run_ranks(_work, size, folder / str(size))
        for kind in ("none", "fsdp"):
            shutil.copytree(folder / str(size) / f"end_{kind}", folder / f"start_{size}_{kind}")
    return folder


@functools.cache
def _alone(name: str, case: str, folder: Path) -> dict[str, Any]:
    return _figures(_trainer(name, case, folder / f"{name}-{case}-alone").learner, dynamic=(name, case) in FEW[:4])


@pytest.mark.parametrize(("size", "kind", "again"), SETTINGS)
def test_law_8_ranks_give_what_one_process_gives(size: int, kind: str, again: bool, jobs: Path) -> None:
    for name, case in _cases(size, kind, again):
        together = torch.load(jobs / str(size) / f"{name}-{case}-{kind}-{again}-0" / "figures.pt", weights_only=True)
        alone = _alone(name, case, jobs)
        assert [g.keys() for g in together["gradients"]] == [g.keys() for g in alone["gradients"]], (name, case)
        # NLL itself is computed in fp32 by some heads; sums differ by their order alone.
        for what, rtol, atol in (("losses", 1e-6, 0), ("gradients", 1e-6, 1e-9), ("norms", 1e-5, 0)):
            torch.testing.assert_close(together[what], alone[what], rtol=rtol, atol=atol, msg=f"{name} {case} {what}")
        torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
        expected = {what: alone["evaluation"][what] for what in together["evaluation"]}
        torch.testing.assert_close(together["evaluation"], expected, rtol=1e-6, atol=0)
        assert together["evaluation"]["counts"].tolist() == LENGTHS
        assert ("dynamic nats" in together["evaluation"]) == (kind == "none" and (name, case) in FEW[:4])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_one_learning_rate_if_it_follows_the_clock(size: int, jobs: Path) -> None:
    first, *others = (torch.load(jobs / str(size) / f"by_clock_{rank}.pt") for rank in range(size))
    assert_bitwise_equal(others, [first] * len(others))


@pytest.mark.parametrize("kind", ["none", "fsdp"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_is_what_was_counted(size: int, kind: str, jobs: Path) -> None:
    for name, case in FEW[:4]:
        for rank in range(size):
            sent = torch.load(jobs / str(size) / f"sent-{name}-{case}-{kind}-{rank}.pt", weights_only=True)
            assert sent["seen"] == pytest.approx(sent["computed"], abs=1), (name, case)


@pytest.mark.parametrize("kind", ["none", "fsdp"])
@pytest.mark.parametrize(("size", "start"), [(2, "start_1"), (3, "start_1"), (3, "start_2_none"), (3, "start_2_fsdp")])
def test_a_run_resumes_on_another_number_of_ranks(size: int, start: str, kind: str, jobs: Path) -> None:
    """Weights and optimiser bit by bit; each rank has its rows' memories; two more steps go the same way."""
    alone = _trainer(*RESUMED, jobs / start, max_steps=5)
    expected, each = _saved(alone), 6 // size
    for rank in range(size):
        found = torch.load(jobs / str(size) / f"resumed-{start}-{kind}-{rank}.pt", weights_only=True)
        for what in ("weights", "optimiser", "step"):
            assert_bitwise_equal(found[what], expected[what])
        torch.testing.assert_close(found["evaluation"], expected["evaluation"], rtol=1e-6, atol=0)
        assert_bitwise_equal(found["state"], [whole[each * rank : each * rank + each] for whole in expected["state"]])
    for _ in range(2):
        alone.learner.update()
    continued = torch.load(jobs / str(size) / f"continued-{start}-{kind}-0.pt", weights_only=True)
    torch.testing.assert_close(continued, dict(alone.learner.module.state_dict()), rtol=1e-4, atol=1e-6)
    said = (jobs / str(size) / "said_0").read_text()
    before = 1 if start == "start_1" else 2
    assert f"note: the number of processes was {before} and is {size}: " in said and "rows are divided anew" in said


@pytest.mark.parametrize("kind", ["none", "fsdp"])
def test_one_process_opens_a_checkpoint_of_two(kind: str, jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole weights, of plain names and shapes, whatever the sharding; the sharded run is the unsharded one."""
    found = checkpoint.newest(jobs / "2" / f"end_{kind}" / "run")
    assert found.step == 3
    reference = _trainer(*RESUMED, jobs / "start_1", max_steps=5)
    assert capsys.readouterr().err == ""
    weights = found.model_weights()
    assert weights.keys() == reference.learner.module.state_dict().keys()
    torch.testing.assert_close(weights, dict(reference.learner.module.state_dict()), rtol=1e-4, atol=1e-6)
    _trainer(*RESUMED, jobs / f"start_2_{kind}", max_steps=5)
    assert "note: the number of processes was 2 and is 1: " in capsys.readouterr().err
