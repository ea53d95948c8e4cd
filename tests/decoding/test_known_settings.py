"""A setting that decoders have never heard of: they leave the model alone, and `forward` samples it."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.wavenet import WaveNetConfig
from baselines.wavenet_cached import WaveNetWithDecoders
from tests import laws
from waveform.decoding.compressive_transformer import CompressiveTransformerWithDecoders
from waveform.engine import interface
from waveform.engine.drawing import DrawConfig
from waveform.engine.interface import ForwardDecoder
from waveform.engine.known_settings import KnownSettings
from waveform.models.transformer_config import CompressiveTransformerConfig
from waveform.system.errors import UserError


@dataclass
class _SquashingConfig(CompressiveTransformerConfig):
    squash: bool = False  # what a layer reads


class _SquashingTransformer(CompressiveTransformerWithDecoders):
    """The mathematics of a layer changed by someone who knows nothing of decoders."""

    def __init__(self, config: _SquashingConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, inputs: (_squashed(inputs[0], config.squash), *inputs[1:]))


@dataclass
class _SquashingWaveNetConfig(WaveNetConfig):
    squash: bool = False  # the sum of skips


class _SquashingWaveNet(WaveNetWithDecoders):
    def __init__(self, config: _SquashingWaveNetConfig) -> None:
        super().__init__(config)
        self.skip.register_forward_hook(lambda skip, inputs, output: _squashed(output, config.squash))


def _squashed(x: Tensor, squash: bool) -> Tensor:
    return x.tanh() if squash else x


MODELS = {
    "compressive_transformer": (_SquashingTransformer, _SquashingConfig, "conv-ragged"),
    "wavenet": (_SquashingWaveNet, _SquashingWaveNetConfig, "classic"),
}


def build(name: str, *, squash: bool) -> Any:
    model, config, variant = MODELS[name]
    return model(config(vocab_size=laws.VOCAB_SIZE, **laws.CONFIGS[name][variant], squash=squash))


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@torch.no_grad()
def test_an_unknown_field_is_left_to_forward(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = laws.randomise(build(name, squash=True)).to(dtype)
    state, tokens = laws.fresh_state(model, 2), laws.random_tokens(30, batch_size=2)
    plain = build(name, squash=False).to(dtype)
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(tokens, state).hidden, model(tokens, state).hidden, atol=1e-2)
    atol = 1e-4 if dtype == torch.float32 else 1e-10
    laws.assert_steps_equal_forward(model, tokens, [state], kind=ForwardDecoder, atol=atol)
    uniform = torch.rand(20, 2)
    drawn = interface.decoder(model, laws.clone(state)).draw(tokens[:, 0], uniform, DrawConfig(temperature=0))
    inputs = torch.cat([tokens[:, :1], drawn.t()], dim=1)
    assert torch.equal(model.head.logits(model(inputs, state).hidden).argmax(-1)[:, :-1], drawn.t())
    why = r"does not support model\.squash=True" if dtype == torch.float32 else "is for fp32 models on a CPU"
    with pytest.raises(UserError, match=rf"^int8 sampling {why}; sample without int8$"):
        interface.decoder(model, state, int8=True)


def test_training_leaves_an_unknown_field_to_torch() -> None:
    """At widths of kernels: the output and the gradient are those of fp64, which has none."""
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_feedforward": 32, "num_position_features": 8}
    fields = {"vocab_size": laws.VOCAB_SIZE, "window": 8, "memory": 8, "compressed": 4, "compression_rate": 2, **sizes}
    torch.manual_seed(0)
    model: Any = _SquashingTransformer(_SquashingConfig(**fields, squash=True))
    assert CompressiveTransformerWithDecoders(CompressiveTransformerConfig(**fields)).has_own_threads
    exact, tokens = copy.deepcopy(model).double(), laws.random_tokens(40, batch_size=2)
    for each, dtype in ((model, torch.float32), (exact, torch.float64)):
        step = each(tokens, each.init_state(2, device="cpu", dtype=dtype))
        (step.hidden.square().sum() + step.aux_losses["compression"].sum()).backward()
    found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (model, exact))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3, check_dtype=False)


def test_settings_are_known_by_name_and_value() -> None:
    fields = set(CompressiveTransformerConfig.__dataclass_fields__)
    known = KnownSettings(fields - {"norm"}, {"norm": ()})
    config = CompressiveTransformerConfig(vocab_size=5)
    assert known.supports(config) and known.unknown(config) is None
    assert known.unknown(replace(config, norm="post")) == "model.norm=post"
    assert known.unknown(_SquashingConfig(vocab_size=5)) == "model.squash=False"
    assert not known.supports(_SquashingConfig(vocab_size=5))
