"""Against numbers that the authors' own code computed: DeepMind's Sonnet, cited by the paper's published version.

sonnet.npz has weights and tokens of ten small cases (dm-sonnet 1.36, TensorFlow 1.15.5, CPU), and parts of the states,
outputs, losses and gradients of the last of their six windows. B rows, W window, L layers; D width, d of a head.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import laws
from waveform.models.compression import FUNCTIONS, Convolution, autoencoding_loss
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.transformer_config import CompressiveTransformerConfig
from waveform.system.errors import UserError

_FILE = np.load(Path(__file__).with_name("sonnet.npz"))
INDEX: dict[str, Any] = json.loads(str(_FILE["index"]))  # array -> where it is: [dtype, first element, shape]
CASES = sorted({key.split("/")[0] for key in INDEX})
NORMS = {"input": "pre", "output": "post", "both": "both"}
_OWN = {**laws.SONNET, "compression_gradient": "as_run"}  # settings with which ours is theirs


def read(key: str) -> np.ndarray:
    """What is kept of an array: of weights and tokens all, of `out`, states and gradients every so many elements."""
    kind, first, shape = INDEX[key]
    return _FILE[kind][first : first + math.prod(shape)].reshape(shape)


def config_of(case: dict[str, Any], **changed: Any) -> CompressiveTransformerConfig:
    width = case["heads"] * case["d"]
    return CompressiveTransformerConfig(
        vocab_size=case["V"], num_layers=case["layers"], d_model=width, num_heads=case["heads"],
        d_feedforward=case["ff"], num_position_features=width, clamp_len=case["clamp"], norm=NORMS[case["norm"]],
        window=case["W"], memory=case["M"], compressed=case["C"],
        compression_rate=case["c"], compression_overlap=case["kernel_size"],
        compression={"conv": "conv", "AVG": "mean", "MAX": "max"}[case["compressor"]],
        compression_loss={"mha": "attention", "ae": "autoencode"}[case["loss"]],
        **{**_OWN, **changed},
    )  # fmt: skip


# Parameters of a layer by Sonnet's names, and by ours
_OF_LAYER = {
    **{
        f"residual_dropout_wrapper{wrapper}/layer_norm{place}/{theirs}": f"{part}_norm{after}.{ours}"
        for wrapper, part in (("", "attention"), ("_1", "feedforward"))
        for place, after in (("", ""), ("_1", "_after"))
        for theirs, ours in (("gamma", "weight"), ("beta", "bias"))
    },
    **{f"multihead_attention/{part}/linear/w": f"attention.{part}.weight" for part in ("query", "key", "value")},
    "multihead_attention/relative_keys/linear/w": "attention.position.weight",
    "multihead_attention/relative_keys_0/linear/w": "attention.compressed_position.weight",
    "multihead_attention/r_w_bias": "attention.content_bias",
    "multihead_attention/r_r_bias": "attention.position_bias",
    "multihead_attention/r_r_bias_0": "attention.compressed_position_bias",
    "multihead_attention/linear/w": "attention.output.weight",
    "multihead_attention/linear/b": "attention.output.bias",
    "mlp/linear_0/w": "feedforward_in.weight",
    "mlp/linear_0/b": "feedforward_in.bias",
    "mlp/linear_1/w": "feedforward_out.weight",
    "mlp/linear_1/b": "feedforward_out.bias",
}


def names_of(model: torch.nn.Module, *, num_layers: int) -> dict[str, str]:
    """Sonnet's names of the model's parameters -> ours."""
    names = {"mlp/linear_0/w": "embedding.weight", "mlp/linear_0/b": "embedding.bias"}
    for i in range(num_layers):
        names |= {f"transformer_tower/layer_{i}/{key}": f"layers.{i}.{value}" for key, value in _OF_LAYER.items()}
        names[f"conv_compressor{f'_{i}' if i else ''}/conv_1d/w"] = f"layers.{i}.compressor.convolution.weight"
    ours = dict(model.named_parameters())
    return {key: name for key, name in names.items() if name in ours}


def to_ours(name: str, x: Tensor, *, d: int) -> Tensor:
    """One of Sonnet's arrays in our shape and scale."""
    if name.endswith("conv_1d/w"):
        return x.permute(2, 1, 0)
    if "r_w_bias" in name or "r_r_bias" in name:
        return x.reshape(-1, d) * d**0.5
    if name == "mlp/linear_0/w":
        return torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.t() if x.dim() == 2 else x


def differences(name: str, *, dtype: torch.dtype = torch.float64, **changed: Any) -> dict[str, float]:
    """How far figures of the last window are from Sonnet's, at most: `out`, `state`, `loss`, `gradient`.

    changed: settings that are not theirs; parameters that they do not have are then left out.
    """
    case = json.loads(INDEX[f"{name}/config"])
    config = config_of(case, **changed)
    torch.manual_seed(0)
    model = CompressiveTransformer(config).to(dtype)
    names = names_of(model, num_layers=case["layers"])
    if not changed:
        assert set(names) == {key.removeprefix(f"{name}/w/") for key in INDEX if key.startswith(f"{name}/w/")}
    theirs = {key: torch.from_numpy(read(f"{name}/w/{key}")).to(dtype).requires_grad_() for key in names}
    ours = {names[key]: to_ours(key, value, d=case["d"]) for key, value in theirs.items()}
    tokens, state = torch.from_numpy(read(f"{name}/tokens")).long(), model.init_state(case["B"], dtype=dtype)
    aux = []
    for window in tokens.split(case["W"], dim=1):
        step = torch.func.functional_call(model, ours, (window, state))
        state = step.state
        aux.append(step.aux_losses["compression"].mean() if step.aux_losses else torch.zeros(()))
    compressed, memory = state.trunk.slots.transpose(0, 1).split([case["C"], case["M"]], dim=2)
    found = {"out": distance(step.hidden[None, :, ::3], f"{name}/out"), "loss": 0.0, "gradient": 0.0}
    found["state"] = distance(memory[None, :, :, ::3], f"{name}/memory")
    losses = {"gtask": (step.hidden * torch.from_numpy(read(f"{name}/cotangents")[-1])).sum()}
    if case["C"]:
        found["state"] = max(found["state"], distance(compressed[None, :, :, ::3], f"{name}/compressed"))
        losses["gaux"] = aux[-1]
        found["loss"] = distance(torch.stack(aux), f"{name}/loss")
    for kind, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(theirs.values()), retain_graph=True, materialize_grads=True)
        for key, gradient in zip(theirs, gradients, strict=True):
            far = gradient.abs().max().item()
            if f"{name}/{kind}/{key}" in INDEX:
                far = distance(gradient.flatten()[::11], f"{name}/{kind}/{key}")
            found["gradient"] = max(found["gradient"], far)
    return found


def distance(ours: Tensor, key: str) -> float:
    """The largest absolute difference to an array of Sonnet's; 0 for empty ones."""
    far = (ours.detach().double() - torch.from_numpy(read(key).astype(np.float64))).abs()
    return far.max().item() if far.numel() else 0.0


@pytest.mark.parametrize("name", CASES)
def test_equal_to_sonnet(name: str) -> None:
    exact, rounded = differences(name), differences(name, dtype=torch.float32)
    assert max(exact["out"], exact["state"], exact["loss"]) < 1e-12 and exact["gradient"] < 1e-11
    assert max(rounded["out"], rounded["state"], rounded["loss"]) < 1e-5


# Each of the differences by itself, and the first figure in which it shows.
DIFFERENCES = {
    "positions of compressed slots": ("ct_pre", {"compressed_position": "time"}, "out"),
    "their own projection and bias": ("ct_pre", {"compressed_projection": "shared"}, "out"),
    "memory holds what is normed": ("ct_pre", {"memory_norm": "read"}, "state"),
    "no final norm": ("ct_pre", {"final_norm": True}, "out"),
    "empty slots are attended to": ("ct_pre", {"empty_memory": "mask"}, "loss"),
    "bias of the output": ("ct_pre", {"output_bias": False}, "out"),
    "gradients that do not stop": ("ct_pre", {"compression_gradient": "intended"}, "gradient"),
    "what is lost counts": ("ct_pre_rate3", {"compression_gradient": "intended"}, "loss"),
    "queries after what left": ("ct_pre_m4", {"compression_gradient": "intended"}, "loss"),
    "ReLU of inputs": ("ct_pre", {"input_activation": "none"}, "out"),
    "ReLU of the feed-forward network": ("ct_pre", {"activation": "gelu"}, "out"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_difference_shows(difference: str) -> None:
    name, changed, where = DIFFERENCES[difference]
    assert differences(name, **changed)[where] > 1e-4


# What the ten cases do not have, by its formulae written out: weights as theirs, [kernel, in, out], slots [n, D].


def small(**fields: Any) -> CompressiveTransformerConfig:
    sizes = {"vocab_size": 5, "num_layers": 1, "d_model": 6, "num_heads": 2, "d_feedforward": 8}
    memories = {"window": 4, "memory": 4, "compressed": 4}
    return CompressiveTransformerConfig(**{**sizes, **memories, **_OWN, "num_position_features": 6, **fields})


def convolved(slots: np.ndarray, convolution: torch.nn.Module, *, stride: int = 1, dilation: int = 1) -> np.ndarray:
    """A convolution without padding or bias."""
    weight = np.asarray(convolution.weight.detach().permute(2, 1, 0))
    places = range(0, len(slots) - (len(weight) - 1) * dilation, stride)
    return np.array([sum(slots[t + i * dilation] @ weight[i] for i in range(len(weight))) for t in places])


@pytest.mark.parametrize(("dilations", "rate", "overlap"), [([1, 2], 2, 0), ([1], 3, 0), ([2, 1], 2, 1)])
def test_dilated_convolutions_lose_steps(dilations: list[int], rate: int, overlap: int) -> None:
    own = {"compression_dilations": dilations, "compression_padding": False, "compression_overlap": overlap}
    config = small(compression="dilated", compression_rate=rate, window=8, memory=8, **own)
    model = CompressiveTransformer(config).double()
    compressor = model.layers[0].compressor
    slots = torch.randn(8, 6, dtype=torch.float64)
    expected = slots.numpy()
    for dilation, convolution in zip(dilations, compressor.convolutions, strict=True):
        expected = np.maximum(convolved(expected, convolution, dilation=dilation), 0)
    expected = convolved(expected, compressor.convolution, stride=rate)
    assert len(expected) == config.groups
    ours = compressor(slots[None, : config.num_consumed], None)[0].detach().numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-12)
    step = model(torch.randint(5, (2, 24)), model.init_state(2, dtype=torch.float64))  # all runs, and leaves a loss
    assert step.aux_losses["compression"].isfinite().all()
    with pytest.raises(UserError, match="loses 9 steps"):
        dataclasses.replace(config, compression_dilations=[9])
    with pytest.raises(UserError, match="autoencode needs all steps"):
        dataclasses.replace(config, compression_loss="autoencode")


def test_without_memory_no_query_comes_after_what_left() -> None:
    model = CompressiveTransformer(small(memory=0, compression_rate=2))
    with pytest.raises(UserError, match=r"^model.compression_gradient=as_run .* with model.memory=0 there are none; "):
        model(torch.randint(5, (2, 8)), model.init_state(2))
    with torch.no_grad():
        assert model(torch.randint(5, (2, 8)), model.init_state(2)).hidden.isfinite().all()


@pytest.mark.parametrize(("rate", "overlap"), [(2, 0), (3, 0), (2, 1)])
def test_auto_encoding_has_no_bias_and_counts_what_is_lost(rate: int, overlap: int) -> None:
    compressor = Convolution(6, rate=rate, overlap=overlap, bias=False)
    compressor.add_decoder(6, bias=False)
    compressor.double()
    slots = torch.randn(1, 8, 6, dtype=torch.float64)
    groups = convolved(slots[0].numpy(), compressor.convolution, stride=rate)
    weight = np.asarray(compressor.decoder.weight.detach().permute(2, 0, 1))  # [kernel, in, out]
    made = np.zeros((8, 6))
    for group, value in enumerate(groups):
        for i in range(rate + overlap):
            made[group * rate + i] += value @ weight[i]
    ours = autoencoding_loss(compressor, torch.from_numpy(groups)[None], slots).item()
    assert ours == pytest.approx(((made - slots[0].numpy()) ** 2).mean(), rel=1e-6)


@pytest.mark.parametrize("name", ["mean", "max"])
def test_pooling_overlaps_and_has_no_loss(name: str) -> None:
    pooling = FUNCTIONS[name](3, rate=2, overlap=1)
    slots = torch.randn(1, 7, 3)
    parts = [slots[0, t : t + 3] for t in (0, 2, 4)]
    expected = torch.stack([part.mean(dim=0) if name == "mean" else part.amax(dim=0) for part in parts])
    torch.testing.assert_close(pooling(slots, None)[0], expected)
    model = CompressiveTransformer(small(compression=name, compression_rate=2))
    assert not model(torch.randint(5, (2, 16)), model.init_state(2)).aux_losses


def test_initial_values_have_its_variances() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 63, "num_layers": 4, "d_model": 128, "num_heads": 4, "d_feedforward": 256, "window": 8}
    model = CompressiveTransformer(small(**sizes, memory=8, compression_rate=2, num_position_features=128))
    layer = model.layers[1]
    attention = layer.attention
    cut = 0.7737  # variance of a standard normal distribution cut at 2, which default initialisers leave as it is
    variances = {
        model.embedding.weight: 2 / 64,  # of one-hot vectors
        **{p.weight: 2 / (2 * 128) for p in (attention.query, attention.key, attention.value, attention.position)},
        attention.compressed_position.weight: 2 / (2 * 128),
        layer.feedforward_in.weight: 2 / (2 * 128),
        layer.feedforward_out.weight: 2 / (2 * 256),
        attention.output.weight: cut / 128,
        layer.compressor.convolution.weight: cut / (2 * 128),
        # Glorot's of [1, H, 1, d], times d
        torch.cat([each.attention.content_bias for each in model.layers]): 32 * 2 / (4 + 128),
    }
    for weight, variance in variances.items():
        assert weight.var().item() == pytest.approx(variance, rel=0.15)
