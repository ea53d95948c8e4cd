"""WaveNet against a naive one, and the sizes that the comparison uses (its laws are in tests/test_laws.py)."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from baselines.wavenet import WaveNet
from tests import laws
from waveform.runs.configured_model import model_from, num_parameters
from waveform.speech.config import compose_config
from waveform.system.errors import UserError

_SIZES = [
    WaveNet.Config(11, num_stacks=2, layers_per_stack=3, kernel_size=2, residual_channels=5, gate_channels=4),
    WaveNet.Config(7, num_stacks=1, layers_per_stack=3, kernel_size=3, residual_channels=4, gate_channels=6),
    WaveNet.Config(5, num_stacks=2, layers_per_stack=1, kernel_size=4, residual_channels=3, gate_channels=3),
]


@pytest.fixture(params=_SIZES, ids=["paper kernel", "kernel 3", "kernel 4"])
def model(request: pytest.FixtureRequest) -> WaveNet:
    """A small WaveNet in fp64, with every parameter moved off its initial value (biases start at zero)."""
    torch.manual_seed(0)
    return laws.randomise(WaveNet(dataclasses.replace(request.param, skip_channels=6, end_channels=7)))


def _tokens(model: WaveNet, *, num_rows: int, num_steps: int) -> Tensor:
    """Random inputs, begin-of-utterance among them."""
    torch.manual_seed(1)
    return torch.randint(0, model.config.vocab_size + 1, (num_rows, num_steps))


def _logits(model: WaveNet, tokens: Tensor) -> Tensor:
    return model.head.logits(model(tokens, laws.fresh_state(model, len(tokens))).hidden)


@torch.no_grad()
def _naive_logits(model: WaveNet, tokens: list[int]) -> Tensor:
    """One utterance, sample by sample, layer by layer, tap by tap, as the paper's figures 3 and 4 draw it."""
    config = model.config
    c, g, num_layers = config.residual_channels, config.gate_channels, config.num_stacks * config.layers_per_stack
    inputs: list[list[Tensor]] = [[] for _ in range(num_layers)]  # layer, then time
    logits = []
    for t, token in enumerate(tokens):
        x, skips = model.embedding.weight[token], model.skip.bias.clone()
        for layer in range(num_layers):
            inputs[layer].append(x)
            kernel, z = model.convolutions[layer].weight, model.convolutions[layer].bias.clone()
            for tap in range(config.kernel_size):  # tap 0 is the newest here
                source = t - tap * 2 ** (layer % config.layers_per_stack)
                if source >= 0:
                    first = (config.kernel_size - 1 - tap) * c
                    z += kernel[:, first : first + c] @ inputs[layer][source]
            gate = torch.tanh(z[:g]) * torch.sigmoid(z[g:])
            skips += model.skip.weight[:, layer * g : (layer + 1) * g] @ gate
            if layer < num_layers - 1:
                x = x + model.residuals[layer].weight @ gate
        head = model.head
        mixed = head.mix.weight @ skips.clamp(min=0) + head.mix.bias
        logits.append(head.softmax.projection.weight @ mixed.clamp(min=0) + head.softmax.projection.bias)
    return torch.stack(logits)


def test_equals_the_naive_wavenet(model: WaveNet) -> None:
    tokens = _tokens(model, num_rows=2, num_steps=3 * model.receptive_field)
    expected = torch.stack([_naive_logits(model, row) for row in tokens.tolist()])
    assert expected.std() > 0.1  # else agreement would mean little
    torch.testing.assert_close(_logits(model, tokens), expected, rtol=0, atol=1e-10)


def test_nll_is_that_of_the_logits(model: WaveNet) -> None:
    tokens = _tokens(model, num_rows=2, num_steps=9)
    targets = tokens % model.config.vocab_size
    hidden = model(tokens, laws.fresh_state(model, 2)).hidden
    expected = -model.head.logits(hidden).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(model.head.nll(hidden, targets), expected, rtol=0, atol=1e-10)
    assert model.head.nll(hidden, targets).dtype == torch.float64
    half = model.bfloat16()
    assert half.head.nll(hidden.bfloat16(), targets).dtype == torch.float32


def test_receptive_field_is_exact(model: WaveNet) -> None:
    field = model.receptive_field
    tokens = _tokens(model, num_rows=1, num_steps=field + 1)
    for changed, reaches in [(0, False), (1, True)]:  # field and field - 1 steps before the last
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % model.config.vocab_size
        outputs = [model(ids, laws.fresh_state(model, 1)).hidden[0, -1] for ids in (tokens, other)]
        assert torch.equal(*outputs) != reaches


def test_initial_nll_is_near_that_of_guessing() -> None:
    torch.manual_seed(0)
    for num_stacks in (1, 3):
        config = WaveNet.Config(256, num_stacks, residual_channels=32, gate_channels=32, skip_channels=64)
        model = WaveNet(config)
        tokens = torch.randint(0, 256, (2, 200))
        hidden = model(tokens, model.init_state(2, device="cpu", dtype=torch.float32)).hidden
        assert 0.5 < hidden.std() < 2
        assert model.head.nll(hidden, tokens).mean().item() == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize(
    ("fields", "num_parameters", "receptive_field"),
    [({}, 39_627_296, 6139), ({"kernel_size": 2, "residual_channels": 512, "gate_channels": 512}, 43_285_760, 3070)],
    ids=["strong", "classic"],
)
def test_sizes_of_the_comparison(fields: dict[str, int], num_parameters: int, receptive_field: int) -> None:
    with torch.device("meta"):
        model = WaveNet(WaveNet.Config(256, **fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert model.receptive_field == receptive_field
    if not fields:
        assert num_parameters == pytest.approx(40e6, rel=0.01)


def test_the_wavenet_of_the_published_tables() -> None:
    """Goel et al. 2022 print 4.2M, of 4,244,480; docs/your-data.md says what ours has instead."""
    fields = dict(compose_config(["preset=clips_4m", "model=wavenet"])["model"])
    assert fields.pop("name") == "wavenet"
    with torch.device("meta"):
        model = WaveNet(WaveNet.Config(256, **fields))
    ours = sum(parameter.numel() for parameter in model.parameters())
    assert (ours, model.receptive_field) == (4_115_264, 4093)
    beside = {**compose_config(["preset=clips_4m", "model=compressive_transformer"]), "dataset": {"vocab_size": 256}}
    with torch.device("meta"):
        assert num_parameters(model_from(beside)) == pytest.approx(ours, rel=0.01)


def test_config_bounds_the_number_of_layers() -> None:
    assert len(WaveNet.Config(256, num_stacks=100, layers_per_stack=10).dilations) == 1000
    with pytest.raises(UserError, match=r"^model.num_stacks=101 and model.layers_per_stack=10 make 1010 layers; make"):
        WaveNet.Config(256, num_stacks=101, layers_per_stack=10)
