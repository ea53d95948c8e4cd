"""Every registered model on a simulated GPU: neither training nor sampling waits, and layers share what is copied."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import laws
from tests.engine.conftest import write_tokens
from tests.engine.training import small_learner
from tests.laws import CONFIGS, Case, first_fields
from tests.simulated_gpu import launches
from tests.simulated_gpu.device import SimulatedGpu, without_gpu
from waveform.engine import interface
from waveform.engine.drawing import DrawConfig
from waveform.engine.token_learner import TokenLearner
from waveform.ranks.distributed import World

pytestmark = without_gpu
_LENGTHS = [60, 45, 33, 80, 21, 52, 70, 12]  # tokens of utterances: rows begin and end theirs at different times

Make = Callable[..., TokenLearner]


@pytest.fixture(name="steady")
def make_steady(gpu: SimulatedGpu, tmp_path: Path) -> Make:
    """steady(model, fields, **train): a TokenLearner before its first update that is like all later ones.

    The optimiser has its moments and memories are full; in the second window of the update, a row is reset.
    """
    tokens = write_tokens(tmp_path / "tokens.shard", _LENGTHS)

    def make(model: str, fields: dict[str, Any], **train: Any) -> TokenLearner:
        world = World(device=torch.device("cuda:0"))
        options = {"device": "cuda", "chunk": 2 * fields.get("window", 4), **train}
        learner = small_learner(model, tokens, world=world, fields=fields, **options)
        learner.update()
        with torch.no_grad():
            tokens_BT = torch.zeros(4, 4 * learner.window, dtype=torch.int64, device="cuda")
            learner.state = learner.model(tokens_BT, learner.state).state
        gpu.forget()
        return learner

    return make


def allowed_waits(case: Case) -> set[str]:
    """An adaptive head asks how many targets each of its clusters has.

    Reference attention, the oracle of the tests and what takes limited distances, asks how many distances there are.
    """
    head = {"waveform/models/heads.py:nll: nonzero"} if case.fields.get("head") == "adaptive" else set()
    by_reference = case.fields.get("attention") == "reference" or case.fields.get("clamp_len", 0) > 0
    return head | ({"waveform/models/attention.py:position_logits: unique"} if by_reference else set())


@pytest.mark.parametrize("case", laws.params())
def test_a_step_never_waits(case: Case, gpu: SimulatedGpu, steady: Make) -> None:
    """Neither do calls of any length, with rows at the same place and at different places, across the ends of windows.

    unroll: 2 for what only BPTT trains.
    """
    unroll = 2 if case.fields.get("compression_loss") == "none" else 1
    learner = steady(case.model, case.fields, unroll=unroll)
    sums, norms = learner.update()
    assert set(gpu.waits) == allowed_waits(case), gpu.waits
    assert gpu.operations and all(figure.is_cuda for figure in (sums, *norms.values()))
    model, state = learner.model, learner.fresh
    for length in (1, case.window, 2 * case.window + 1):
        if length > case.window:
            state = interface.reset_rows(state, learner.fresh, torch.arange(4) == 1)  # within its window
        tokens = interface.to_device(case.tokens(length, batch_size=4), learner.world.device)
        hidden, state, aux = model(tokens, interface.detach(state))
        (model.head.nll(hidden, tokens).sum() + sum(loss.sum() for loss in aux.values())).backward()
    assert set(gpu.waits) == allowed_waits(case), gpu.waits


_RAGGED = CONFIGS["compressive_transformer"]["conv-ragged"]


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(
    "train", [{"unroll": 2}, {"checkpoint_activations": True}, {"precision": "fp32"}, {"compile": True}], ids=str
)
def test_a_step_never_waits_in_other_ways_of_training(
    model: str, train: dict[str, Any], gpu: SimulatedGpu, steady: Make
) -> None:
    fields = first_fields(model)
    if model in ("lstm", "wavenet"):
        train = {name: value for name, value in train.items() if name not in ("checkpoint_activations", "compile")}
    else:
        fields["dropout"] = 0.1
    learner = steady(model, fields, **train)
    learner.update()
    assert not gpu.waits


def test_rows_at_different_places_share_copies_and_masks_between_layers(gpu: SimulatedGpu, steady: Make) -> None:
    copies = []
    for num_layers in (1, 2):
        fields = {**_RAGGED, "num_layers": num_layers}
        learner = steady("compressive_transformer", fields, window=3, chunk=6)
        learner.state = interface.reset_rows(learner.state, learner.fresh, torch.arange(4) == 1)
        resets = 0
        for _ in range(2):  # in these, rows are reset, and windows of some rows end while those of others do not
            before = learner.state.trunk.steps
            assert len((before % _RAGGED["window"]).unique()) > 1
            learner.update()
            resets += int((learner.state.trunk.steps < before).sum())
        assert resets
        copies.append(sorted(gpu.copies))
        masks = [call.mask for call in gpu.attention if call.mask is not None]
        assert masks and all(mask.dtype == torch.bfloat16 for mask in masks)
        assert len({mask.like.untyped_storage()._cdata for mask in masks}) == len(masks) // num_layers
    assert copies[0] == copies[1]


def test_a_layer_launches_few_operations() -> None:
    """174 in each window of an update at the shape of the paper's runs on speech (docs/performance.md)."""
    layer, _ = launches.at_paper_shape()
    assert 100 < sum(layer) / launches.WINDOWS <= 200


@pytest.mark.parametrize("case", laws.params(laws.WITH_DECODER))
def test_steps_and_draws_of_decoders_never_wait(case: laws.Case, gpu: SimulatedGpu) -> None:
    model = case.build().eval().to("cuda")
    tokens = torch.zeros(2, dtype=torch.int64, device="cuda")
    with torch.inference_mode():
        decoder = interface.decoder(model, model.init_state(2, device="cuda", dtype=torch.float64))
        gpu.waits.clear()
        for _ in range(6 * case.window + 2):
            decoder.step(tokens)
        for config in (DrawConfig(), DrawConfig(temperature=0.9, top_k=20, top_p=0.95), DrawConfig(temperature=0)):
            decoder.draw(tokens, torch.rand(1, 2, device="cuda"), config)  # too few to capture a graph
    assert gpu.operations and not gpu.waits, gpu.waits
