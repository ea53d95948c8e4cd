"""Sampling: the right distribution, its truncation, seeds and prompts."""

from functools import partial
from typing import Any

import pytest
import torch

from tests import laws
from tests.engine.training import small_model
from waveform.engine import sampler as sampler_module
from waveform.engine.drawing import choose, draw, weights
from waveform.engine.sampler import SamplingConfig, sample
from waveform.system.errors import UserError

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 1.0, 0.0]])


def probabilities(**config: Any) -> torch.Tensor:
    w = weights(LOGITS, SamplingConfig(**config)).double()
    return w / w.sum(dim=-1, keepdim=True)


def sampler(name: str) -> Any:
    return partial(sample, small_model(name)[0], vocab_size=laws.VOCAB_SIZE)


def test_draw_inverts_the_cumulative_distribution() -> None:
    w = torch.tensor([[0, 1, 2, 0, 1, 0]])
    chosen = draw(w.expand(1000, -1), (torch.arange(1000) + 0.5) / 1000)
    assert torch.bincount(chosen, minlength=6).tolist() == [0, 250, 500, 0, 250, 0]
    extreme = draw(w.expand(2, -1), torch.tensor([0.0, 1 - 2**-24]))
    assert extreme.tolist() == [1, 4]  # never an impossible class


def test_temperature_and_truncation() -> None:
    full = LOGITS.double().softmax(-1)
    assert torch.allclose(probabilities(), full, rtol=1e-10)
    assert torch.allclose(probabilities(temperature=0.5), (LOGITS.double() * 2).softmax(-1), rtol=1e-10)
    top2 = probabilities(top_k=2)
    assert (top2 > 0).tolist() == [[False, True, False, True, False]]
    assert torch.allclose(top2[0, 1] / top2[0, 3], full[0, 1] / full[0, 3])
    # Of classes that top-k leaves, the most probable one has 0.73; of all, 0.56.
    assert (probabilities(top_k=2, top_p=0.7) > 0).tolist() == [[False, True, False, False, False]]
    ordered = full[0].sort(descending=True).values
    for keep in range(1, 6):  # p just below what `keep` classes reach keeps exactly those
        assert int((probabilities(top_p=float(ordered[:keep].sum()) - 1e-4) > 0).sum()) == keep


def test_temperature_0_takes_the_first_of_the_most_probable_classes() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0], [1.0, 0.0, 0.0, 0.0]])
    assert choose(logits, torch.tensor([0.9, 0.9]), config=SamplingConfig(temperature=0)).tolist() == [1, 0]


def test_only_the_given_classes_are_drawn_and_in_their_proportion() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0, 1.0, 9.0]])
    uniform = torch.linspace(0, 0.999, 1000)
    drawn = choose(logits.expand(1000, -1), uniform, config=SamplingConfig(classes=(1, 3)))
    share = drawn.bincount(minlength=5) / 1000
    assert torch.allclose(share[1:4], logits[0, 1:4].softmax(dim=-1), atol=2e-3) and share[1:4].sum() == 1
    assert choose(logits, uniform[:1], config=SamplingConfig(classes=(1, 3), temperature=0)).item() == 1


def test_classes_as_probable_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    expected = [[True, True, True, False, True]]
    assert (weights(logits, SamplingConfig(top_k=2)) > 0).tolist() == expected
    assert (weights(logits, SamplingConfig(top_p=0.8)) > 0).tolist() == expected


def test_extreme_temperatures_stay_finite() -> None:
    assert probabilities(temperature=1e-300).tolist() == [[0, 1, 0, 0, 0]]
    assert torch.allclose(probabilities(temperature=1e300), torch.full((1, 5), 0.2).double())


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_k", 0), ("top_p", 0), ("top_p", 1.5), ("classes", (-1, 3)), ("classes", (4, 3))],
)
def test_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=field.replace("_", "-")):
        SamplingConfig(**{field: value})


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_streams_depend_on_seed_and_index_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(sampler(name), num_steps=40)
    three = run(num_streams=3, config=SamplingConfig(seed=5))
    assert torch.equal(three[:1], run(num_streams=1, config=SamplingConfig(seed=5)))
    assert torch.equal(three[1:], run(num_streams=2, config=SamplingConfig(seed=5, first_stream=1)))
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(three[:1], run(num_streams=1, config=SamplingConfig(seed=6)))
    # The distribution after a prompt equals that after the same tokens sampled. (Greedy, because a prompt uses up no
    # random numbers.)
    monkeypatch.setattr(sampler_module, "_PROMPT_STEPS", 8)  # it is read in three calls
    greedy = SamplingConfig(temperature=0)
    free = run(num_streams=1, config=greedy)
    prompted = run(num_streams=1, num_steps=21, config=greedy, prompt=free[0, :19])
    assert torch.equal(prompted[0], free[0, 19:])


@pytest.mark.parametrize(("num_streams", "num_steps"), [(10**12, 1), (10**30, 1), (1, 10**12), (1, 10**30)])
def test_more_than_the_machine_can_hold_is_refused(num_streams: int, num_steps: int) -> None:
    with pytest.raises(UserError, match=r"[0-9] (tokens|rows) would take"):
        sampler("wavenet")(num_streams=num_streams, num_steps=num_steps, config=SamplingConfig())


def test_blocks_arrive_in_order() -> None:
    blocks: list[torch.Tensor] = []
    run = partial(sampler("wavenet"), num_streams=2, num_steps=1030, config=SamplingConfig())
    made, kept = run(), run(on_block=blocks.append)
    assert len(blocks) == 2 and torch.equal(torch.cat(blocks, dim=1), made)
    assert kept.shape == (2, 0)  # what is handed on is not kept as well
