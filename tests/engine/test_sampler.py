"""Sampling: the right distribution, its truncation, seeds and prompts."""

import pytest
import torch

from tests import laws
from waveform.engine.sampler import SamplingConfig, draw, probabilities, sample
from waveform.models.registry import build
from waveform.system.errors import UserError

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 1.0, 0.0]])


def test_draw_inverts_the_cumulative_distribution() -> None:
    p = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]])
    uniform = (torch.arange(1000) + 0.5) / 1000
    chosen = draw(p.expand(1000, -1), uniform)
    assert torch.bincount(chosen, minlength=6).tolist() == [0, 250, 500, 0, 250, 0]
    extreme = draw(p.expand(2, -1), torch.tensor([0.0, 1 - 2**-24]))
    assert extreme.tolist() == [1, 4]  # never an impossible class


def test_temperature_and_truncation() -> None:
    full = LOGITS.softmax(-1)
    assert torch.allclose(probabilities(LOGITS, SamplingConfig()), full)
    cold = probabilities(LOGITS, SamplingConfig(temperature=0.5))
    assert torch.allclose(cold, (LOGITS * 2).softmax(-1))
    assert probabilities(LOGITS, SamplingConfig(temperature=0)).tolist() == [[0, 1, 0, 0, 0]]
    top2 = probabilities(LOGITS, SamplingConfig(top_k=2))
    assert (top2 > 0).tolist() == [[False, True, False, True, False]]
    assert torch.allclose(top2[0, 1] / top2[0, 3], full[0, 1] / full[0, 3])
    ordered = full[0].sort(descending=True).values
    for keep in range(1, 6):  # p just below what `keep` classes reach keeps exactly those
        nucleus = probabilities(LOGITS, SamplingConfig(top_p=float(ordered[:keep].sum()) - 1e-4))
        assert int((nucleus > 0).sum()) == keep


@pytest.mark.parametrize(
    ("options", "says"),
    [({"temperature": -1}, "temperature"), ({"top_k": 0}, "top-k"), ({"top_p": 0}, "top-p"), ({"top_p": 1.5}, "top-p")],
)
def test_settings_out_of_range_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        SamplingConfig(**options)


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_streams_depend_on_seed_and_index_alone(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, vocab_size=laws.VOCAB_SIZE, **next(iter(laws.CONFIGS[name].values())))
    model.double()

    def run(num_streams: int, seed: int, prompt: torch.Tensor | None = None) -> torch.Tensor:
        return sample(
            model,
            vocab_size=laws.VOCAB_SIZE,
            num_streams=num_streams,
            num_steps=40,
            config=SamplingConfig(seed=seed),
            prompt=prompt,
        )

    three = run(3, seed=5)
    assert torch.equal(three[:1], run(1, seed=5))
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(three[:1], run(1, seed=6))
    # The distribution after a prompt equals that after the same tokens sampled. (Greedy, because a prompt uses up no
    # random numbers.)
    greedy = SamplingConfig(temperature=0)
    free = sample(model, vocab_size=laws.VOCAB_SIZE, num_streams=1, num_steps=40, config=greedy)
    prompted = sample(
        model, vocab_size=laws.VOCAB_SIZE, num_streams=1, num_steps=21, config=greedy, prompt=free[0, :19]
    )
    assert torch.equal(prompted[0], free[0, 19:])


def test_blocks_arrive_in_order() -> None:
    model = build("wavenet", vocab_size=laws.VOCAB_SIZE, **laws.CONFIGS["wavenet"]["classic"])
    blocks: list[torch.Tensor] = []
    options = {"vocab_size": laws.VOCAB_SIZE, "num_streams": 2, "num_steps": 1030, "config": SamplingConfig()}
    made = sample(model, **options)
    kept = sample(model, **options, on_block=blocks.append)
    assert len(blocks) == 2 and torch.equal(torch.cat(blocks, dim=1), made)
    assert kept.shape == (2, 0)  # what is handed on is not kept as well
