"""The loop: law 7 (exact resume), divergence, signals, separate clipping, update period, BPTT."""

import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from tests import laws
from tests.calling import before
from tests.engine.training import MakeTokens, small_learner, small_trainer
from waveform.engine import learner as learner_module
from waveform.engine import token_learner
from waveform.engine.evaluator import EvaluateConfig, evaluate
from waveform.engine.interface import state_tensors
from waveform.engine.metrics import read_metrics
from waveform.engine.nonfinite import Diverged, Update
from waveform.engine.token_learner import TokenLearner
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import Trainer
from waveform.kernels import layers_op
from waveform.ranks import fsdp
from waveform.system.errors import UserError
from waveform.system.signals import StopRequest
from waveform.system.threads import kernel_threads

LENGTHS = [60, 45, 33, 80, 21, 52, 70]
IN_KERNELS = {
    "num_layers": 2, "d_model": 32, "num_heads": 2, "d_feedforward": 32, "num_position_features": 16,
    "window": 8, "memory": 8, "compressed": 4, "compression_rate": 4,
}  # fmt: skip


def everything(trainer: Trainer) -> dict[str, Any]:
    """Everything that decides how training continues, unsharded; of the state only this rank's rows."""
    learner = trainer.learner
    optimiser = learner.optimiser.state_dict()["state"]
    return {
        "weights": {n: fsdp.whole(value.detach()).clone() for n, value in learner.module.state_dict().items()},
        "optimiser": {f"{i}/{n}": fsdp.whole(v).clone() for i, of in optimiser.items() for n, v in of.items()},
        "state": [tensor.clone() for tensor in state_tensors(learner.state)],
        "cursor": {**learner.stream.cursor(), "mode": None},  # assert_close takes no text
        "random": torch.get_rng_state(),
        "step": (learner.step, learner.tokens_seen),
    }


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Of tensors and numbers in dicts and lists."""
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def gradients(learner: TokenLearner) -> dict[str, torch.Tensor]:
    """Those that there are; none is left for the next backward pass to add to."""
    found = {name: p.grad for name, p in learner.module.named_parameters() if p.grad is not None}
    learner.optimiser.zero_grad(set_to_none=True)
    return found


def assert_exact_resume(name: str, tokens: TokenSet, folder: Path, **options: Any) -> tuple[Trainer, Trainer]:
    """Law 7. Returns a run without a stop, and one as it was when it stopped after three steps."""
    whole = small_trainer(name, tokens, folder / "whole", **options)
    whole.run()
    expected = everything(whole)
    first = small_trainer(name, tokens, folder / "parts", **options, max_steps=3)
    first.run()
    torch.manual_seed(99)
    second = small_trainer(name, tokens, folder / "parts", **options)
    assert second.learner.step == 3
    second.run()
    assert_bitwise_equal(everything(second), expected)
    return whole, first


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in laws.CONFIGS for mode in ("utterance", "carry")])
def test_law_7_exact_resume(name: str, mode: str, tokens: TokenSet, tmp_path: Path) -> None:
    dropout = {} if name == "wavenet" else {"dropout": 0.1}  # so that random numbers matter
    fields = laws.first_fields(name) | dropout
    assert_exact_resume(name, tokens, tmp_path, state=mode, fields=fields, decay_steps=8)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_law_7_exact_resume_in_compiled_kernels(
    dropout: float, tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """A small model, whose layers run in kernels, with two threads."""
    threads: list[int] = []
    before(monkeypatch, layers_op, "layers_in_kernels", lambda *_, **__: threads.append(kernel_threads()))
    fields, num_threads = {**IN_KERNELS, "dropout": dropout}, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_exact_resume("compressive_transformer", tokens, tmp_path, fields=fields, chunk=16)
    finally:
        torch.set_num_threads(num_threads)
    assert set(threads) == {2}


@pytest.mark.parametrize("option", [{"checkpoint_activations": True}, {"unroll": 2}])
def test_layers_that_run_by_torch_have_its_threads(
    option: dict[str, Any], tokens: TokenSet, monkeypatch: MonkeyPatch
) -> None:
    """Of a model for which there are kernels, with settings that leave all or most of its windows to torch."""
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    learner = small_learner("compressive_transformer", tokens, fields=IN_KERNELS, chunk=16, **option)
    learner.update()
    assert not threads
    with learner.evaluated(tokens, StopRequest()):
        pass
    assert 1 in threads


def test_law_7_exact_resume_with_a_limit_on_seconds(tokens: TokenSet, tmp_path: Path) -> None:
    """The learning rate follows steps, so it does not matter how long the interrupted half took."""
    whole, first = (small_trainer("wavenet", tokens, tmp_path / run, max_seconds=1000.0) for run in ("whole", "parts"))
    whole.run()
    for _ in range(3):
        first.learner.update()
    first.learner.seconds = 900.0
    first.save()
    second = small_trainer("wavenet", tokens, tmp_path / "parts", max_seconds=1000.0)
    assert (second.learner.step, second.learner.seconds) == (3, 900.0)
    second.run()
    assert_bitwise_equal(everything(second), everything(whole))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_training_learns(name: str, tokens: TokenSet, tmp_path: Path) -> None:
    trainer = small_trainer(name, tokens, tmp_path, max_steps=120, evaluate_every=120, clip_norm=1.0, log_every=10)
    trainer.run()
    records = read_metrics(tmp_path)
    nll = [record["nll_nats"] for record in records if record["kind"] == "train"]
    assert nll[0] > 2.0 and nll[-1] < 1.4  # uniform is ln 11 = 2.40
    (evaluation,) = (record for record in records if record["kind"] == "evaluate")
    assert evaluation["nll_nats"] < 1.4 and evaluation["nll_bits"] == evaluation["nll_nats"] / math.log(2)
    assert evaluation["tokens_seen"] == trainer.learner.tokens_seen


def test_bad_weights_are_not_evaluated(tokens: TokenSet, tmp_path: Path) -> None:
    """On a GPU a loss is looked at late, which is still before anything comes of it."""
    trainer = small_trainer("transformer_xl", tokens, tmp_path, log_every=10, evaluate_every=4)
    learner = trainer.learner
    learner.finite.looks_at_once = lambda: False
    nll = learner.model.head.nll

    def bad_at_step_2(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nll(hidden, targets) * (math.inf if learner.step == 2 and learner.module.training else 1)

    learner.model.head.nll = bad_at_step_2
    with pytest.raises(Diverged, match="not finite at step 2"):
        trainer.run()
    assert learner.step == 4 and read_metrics(tmp_path) == []


def test_a_state_may_be_a_number_for_each_row(tokens: TokenSet) -> None:
    """As that of another package's model may be: the row that went bad starts afresh if its step is skipped."""
    finite = small_learner("wavenet", tokens, on_nonfinite="skip").finite
    bad = Update(0, [], 1, torch.tensor([math.nan]), torch.zeros(1, 2))
    state = finite.skip(bad, parameters=[], state=torch.tensor([1.0, math.nan]), fresh=torch.zeros(2))
    assert state.tolist() == [1, 0]


def test_steps_skipped_one_by_one_neither_end_training_nor_spoil_its_log(tokens: TokenSet, tmp_path: Path) -> None:
    options = {"on_nonfinite": "skip", "max_skipped": 1, "evaluate_tokens": 0}
    trainer = small_trainer("wavenet", tokens, tmp_path, **options)
    learner, nll = trainer.learner, trainer.learner.model.head.nll
    learner.model.head.nll = lambda *arguments: nll(*arguments) * (math.nan if learner.step % 2 else 1)
    trainer.run()
    assert learner.skipped == 4
    records = read_metrics(tmp_path)
    assert len(records) == 4 and all(1 < record["nll_nats"] < 3 for record in records)


def test_trunk_and_compressor_are_clipped_separately(tokens: TokenSet) -> None:
    learner = small_learner("compressive_transformer", tokens, clip_norm=1e-3)
    norms: dict[str, float] = {}

    def look(*_: Any) -> None:
        for name, group in learner.groups.items():
            norms[name] = float(torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))

    learner.optimiser.register_step_pre_hook(look)
    for _ in range(4):
        learner.update()
    assert norms == pytest.approx({"trunk": 1e-3, "compressor": 1e-3}, rel=1e-3)


@pytest.mark.parametrize("model", ["wavenet", "compressive_transformer"])
def test_update_period_accumulates_the_mean_over_tokens(model: str, tokens: TokenSet) -> None:
    """And the compressor's over windows of rows without padding."""
    slow = small_learner(model, tokens, update_period=5, update_period_from=0, dtype=torch.float64)
    alone = small_learner(model, tokens, dtype=torch.float64)
    chunks = [alone.stream.next_chunk() for _ in range(5)]
    total, whole = sum(chunk.num_scored for chunk in chunks), sum(chunk.num_whole for chunk in chunks)
    expected = {name: torch.zeros_like(parameter) for name, parameter in alone.module.named_parameters()}
    for chunk in chunks:
        alone.accumulate_gradients([chunk])
        for name, gradient in gradients(alone).items():
            of_compressor = ".compressor." in name
            expected[name] += gradient * (chunk.num_whole / whole if of_compressor else chunk.num_scored / total)
    assert all(gradient.any() for gradient in expected.values())
    slow.accumulate_gradients([slow.stream.next_chunk() for _ in range(5)])
    torch.testing.assert_close(gradients(slow), expected, rtol=1e-6, atol=1e-9)
    slow.update()
    assert slow.step == 5


# The model's windows are of 4 tokens.
@pytest.mark.parametrize(("mode", "window"), [("utterance", 4), ("chunk", 8), ("chunk", 2), ("carry", 8)])
def test_padding_takes_part_in_no_loss(mode: str, window: int, tokens: TokenSet) -> None:
    """Whatever stands in it, NLL, auxiliary loss and all gradients are the same to the last bit."""
    found = []
    for junk in (False, True):
        learner = small_learner("compressive_transformer", tokens, state=mode, window=window, chunk=32)
        chunks = [learner.stream.next_chunk() for _ in range(4)]
        padded = [part for chunk in chunks for part in chunk.windows if not part.scored.all()]
        assert bool(padded) == (mode != "carry")  # which is an endless text
        for part in padded if junk else ():
            part.inputs[~part.scored], part.targets[~part.scored] = 3, 5
        sums = learner.accumulate_gradients(chunks)
        assert sums[2] > 0
        found.append([sums, *(parameter.grad for parameter in learner.module.parameters())])
    assert_bitwise_equal(*found)


def test_bptt_reaches_the_window_before(tokens: TokenSet) -> None:
    fields = laws.CONFIGS["compressive_transformer"]["conv-no-loss"]
    with pytest.raises(UserError, match=r"train\.unroll"):
        small_learner("compressive_transformer", tokens, fields=fields)
    learner = small_learner("compressive_transformer", tokens, fields=fields, unroll=4, chunk=16)
    for _ in range(3):
        learner.accumulate_gradients([learner.stream.next_chunk()])
    assert all(p.grad is not None for p in learner.module.layers[0].compressor.parameters())
    assert not any(t.requires_grad for t in state_tensors(learner.state))


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_bf16_products_train_too(name: str, tokens: TokenSet) -> None:
    """What CUDA uses by default, tried on the CPU: close to fp32, parameters and state still fp32."""
    sums = {}
    for precision in ("fp32", "bf16"):
        learner = small_learner(name, tokens, precision=precision)
        sums[precision] = [learner.update()[0][0].item() for _ in range(6)]
        assert all(p.dtype == torch.float32 for p in learner.module.parameters())
        assert all(t.dtype in (torch.float32, torch.int64) for t in state_tensors(learner.state))
    assert sums["bf16"] == pytest.approx(sums["fp32"], rel=0.05) and sums["bf16"] != sums["fp32"]


def test_half_loss_learns_from_the_last_half_of_each_window(token_set: MakeTokens) -> None:
    """The gradient of the mean over those tokens; the others are read all the same (Dai et al. 2019, Table 6)."""
    fields = laws.first_fields("transformer_xl") | {"window": 6}
    options = {"fields": fields, "dtype": torch.float64, "chunk": 6}
    learner = small_learner("transformer_xl", token_set([60]), loss_share=0.5, state="carry", **options)
    chunk = learner.stream.next_chunk()
    (window,) = chunk.windows
    assert chunk.num_scored == 4 * 3
    learner.accumulate_gradients([chunk])
    found = gradients(learner)
    hidden = learner.model.forward(window.inputs, learner.model.init_state(4, device="cpu", dtype=torch.float64)).hidden
    learner.model.head.nll(hidden, window.targets)[:, 3:].mean().backward()
    torch.testing.assert_close(found, gradients(learner))


def test_what_a_step_waited_is_logged_after_a_stop(tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Half a second each; records come every two steps."""
    waited = itertools.count()
    monkeypatch.setattr(learner_module, "waited_s", lambda: next(waited) / 2)
    stopped = small_trainer("wavenet", tokens, tmp_path)
    for _ in range(3):
        stopped.learner.update()
    stopped.save()
    small_trainer("wavenet", tokens, tmp_path).run()
    assert sum(record["waited_s"] for record in read_metrics(tmp_path) if record["kind"] == "train") == 4.0


def test_a_record_is_of_the_steps_since_the_last_one(tokens: TokenSet, tmp_path: Path) -> None:
    """Also if training was stopped in between, and once each if it was stopped right after one."""

    def nats(log_every: int, *stops: int) -> list[float]:
        run_dir = tmp_path / f"{log_every} {stops}"
        for step in (*stops, 8):
            options = {"log_every": log_every, "max_steps": step, "decay_steps": 8, "evaluate_tokens": 0}
            small_trainer("wavenet", tokens, run_dir, **options).run()
        records = read_metrics(run_dir)
        num_tokens = np.diff([record["tokens_seen"] for record in records], prepend=0)
        return [record["nll_nats"] * num for record, num in zip(records, num_tokens.tolist(), strict=True)]

    each, pairs = nats(1), nats(2)
    assert pairs == pytest.approx([a + b for a, b in zip(each[::2], each[1::2], strict=True)])
    assert nats(1, 3) == each and nats(2, 3) == pairs


@pytest.mark.parametrize("mode", ["utterance", "chunk", "carry"])
def test_validation_resets_as_training_does_and_drops_nothing(mode: str, tokens: TokenSet) -> None:
    fields = laws.first_fields("transformer_xl") | {"dropout": 0.5}
    learner = small_learner("transformer_xl", tokens, fields=fields, state=mode, evaluate_tokens=200)
    learner.update()
    with learner.evaluated(tokens, StopRequest()) as found:
        pass
    protocol = "chunk" if mode == "chunk" else "utterance"
    config = EvaluateConfig(window=4, protocol=protocol, chunk=8, max_tokens=200)
    expected = evaluate(learner.model.eval(), tokens, config)
    assert found.nats.tolist() == expected.nats.tolist() and 0 in found.counts
    learner.update()
    assert learner.module.training


def by_the_clock(tokens: TokenSet, run_dir: Path, **train: Any) -> Trainer:
    """A trainer that evaluates every 2.5 seconds of training; a step takes a second here."""
    trainer = small_trainer("transformer_xl", tokens, run_dir, evaluate_every_seconds=2.5, **train)
    update = trainer.learner.update

    def in_a_second() -> Any:
        result = update()
        trainer.learner.seconds = float(trainer.learner.step)
        return result

    trainer.learner.update = in_a_second
    return trainer


def evaluated_steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir) if record["kind"] == "evaluate"]


@pytest.mark.parametrize("checkpoint_every", [1, 1000])
@pytest.mark.parametrize("during", ["evaluate", "score_window"])
def test_an_evaluation_by_the_clock_that_a_stop_interrupts_is_not_lost(
    during: str, checkpoint_every: int, tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Whether the signal comes in it or in the step before, and whether that step is saved already."""
    stopped = by_the_clock(tokens, tmp_path, checkpoint_every=checkpoint_every)
    due = {"evaluate": [5], "score_window": [4]}[during]

    def interrupt(*_: Any, **__: Any) -> None:
        if due == [stopped.learner.step]:
            due.clear()  # a second signal would end the process
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        before(patch, token_learner, during, interrupt)
        assert stopped.run().step == 5
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert evaluated_steps(tmp_path) == [3]
    by_the_clock(tokens, tmp_path).run()
    assert evaluated_steps(tmp_path) == [3, 5, 8]
