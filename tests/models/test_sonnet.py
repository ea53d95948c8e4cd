"""Against numbers that the authors' own code computed: DeepMind's Sonnet, cited by the paper's published version.

sonnet.npz has weights and tokens of ten small cases (dm-sonnet 1.36, TensorFlow 1.15.5, CPU), and parts of the states,
outputs, losses and gradients of the last of their six windows. B rows, W window, L layers; D width, d of a head.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.transformer_config import CompressiveTransformerConfig

_FILE = np.load(Path(__file__).with_name("sonnet.npz"))
INDEX: dict[str, Any] = json.loads(str(_FILE["index"]))  # array -> where it is: [dtype, first element, shape]
CASES = sorted({key.split("/")[0] for key in INDEX})
NORMS = {"input": "pre", "output": "post", "both": "both"}
_OWN = {  # settings with which ours is theirs
    "activation": "relu",
    "empty_memory": "zeros",
    "memory_norm": "stored",
    "final_norm": False,
    "output_bias": True,
    "input_activation": "relu",
    "compressed_position": "window",
    "compressed_projection": "own",
    "compression_bias": False,
    "compression_gradient": "as_run",
}


def read(key: str) -> np.ndarray:
    """What is kept of an array: of weights and tokens all, of `out`, states and gradients every so many elements."""
    kind, first, shape = INDEX[key]
    return _FILE[kind][first : first + math.prod(shape)].reshape(shape)


def config_of(case: dict[str, Any], **changed: Any) -> CompressiveTransformerConfig:
    return CompressiveTransformerConfig(
        vocab_size=case["V"],
        num_layers=case["layers"],
        d_model=case["heads"] * case["d"],
        num_heads=case["heads"],
        d_feedforward=case["ff"],
        num_position_features=case["heads"] * case["d"],
        window=case["W"],
        memory=case["M"],
        compressed=case["C"],
        compression_rate=case["c"],
        compression={"conv": "conv", "AVG": "mean", "MAX": "max"}[case["compressor"]],
        compression_loss={"mha": "attention", "ae": "autoencode"}[case["loss"]],
        clamp_len=case["clamp"],
        norm=NORMS[case["norm"]],
        compression_overlap=case["kernel_size"],
        **{**_OWN, **changed},
    )


def names_of(model: Any, config: CompressiveTransformerConfig) -> dict[str, Any]:
    """Sonnet's names of parameters -> ours."""
    named = {"mlp/linear_0/w": model.embedding.weight, "mlp/linear_0/b": getattr(model.embedding, "bias", None)}
    for i, layer in enumerate(model.layers):
        here = f"transformer_tower/layer_{i}/"
        attention, heads = layer.attention, here + "multihead_attention/"
        named |= {
            f"{here}residual_dropout_wrapper/layer_norm/gamma": layer.attention_norm.weight,
            f"{here}residual_dropout_wrapper/layer_norm/beta": layer.attention_norm.bias,
            f"{here}residual_dropout_wrapper_1/layer_norm/gamma": layer.feedforward_norm.weight,
            f"{here}residual_dropout_wrapper_1/layer_norm/beta": layer.feedforward_norm.bias,
            f"{heads}query/linear/w": attention.query.weight,
            f"{heads}key/linear/w": attention.key.weight,
            f"{heads}value/linear/w": attention.value.weight,
            f"{heads}relative_keys/linear/w": attention.position.weight,
            f"{heads}r_w_bias": attention.content_bias,
            f"{heads}r_r_bias": attention.position_bias,
            f"{heads}linear/w": attention.output.weight,
            f"{heads}linear/b": attention.output.bias,
            f"{here}mlp/linear_0/w": layer.feedforward_in.weight,
            f"{here}mlp/linear_0/b": layer.feedforward_in.bias,
            f"{here}mlp/linear_1/w": layer.feedforward_out.weight,
            f"{here}mlp/linear_1/b": layer.feedforward_out.bias,
        }
        if config.norm == "both":
            named |= {
                f"{here}residual_dropout_wrapper/layer_norm_1/gamma": layer.attention_norm_after.weight,
                f"{here}residual_dropout_wrapper/layer_norm_1/beta": layer.attention_norm_after.bias,
                f"{here}residual_dropout_wrapper_1/layer_norm_1/gamma": layer.feedforward_norm_after.weight,
                f"{here}residual_dropout_wrapper_1/layer_norm_1/beta": layer.feedforward_norm_after.bias,
            }
        if config.compressed:
            if attention.compressed_apart:
                named[f"{heads}relative_keys_0/linear/w"] = attention.compressed_position.weight
                named[f"{heads}r_r_bias_0"] = attention.compressed_position_bias
            named[f"conv_compressor{f'_{i}' if i else ''}/conv_1d/w"] = layer.compressor.convolution.weight
    return named


def to_ours(name: str, value: np.ndarray, like: Tensor, *, d: int) -> Tensor:
    """One of Sonnet's arrays in our shape and scale; `like`: the parameter."""
    x = torch.from_numpy(value).to(like.dtype)
    if name.endswith("conv_1d/w"):
        return x.permute(2, 1, 0)
    if "r_w_bias" in name or "r_r_bias" in name:
        return x.reshape(like.shape) * d**0.5
    if name == "mlp/linear_0/w":
        return torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.t() if x.dim() == 2 else x


def to_theirs(name: str, gradient: Tensor, *, d: int) -> Tensor:
    """The gradient of one of ours as that of Sonnet's array."""
    if name.endswith("conv_1d/w"):
        return gradient.permute(2, 1, 0)
    if "r_w_bias" in name or "r_r_bias" in name:
        return gradient * d**0.5
    if name == "mlp/linear_0/w":
        return gradient[:-1]
    return gradient.t() if gradient.dim() == 2 else gradient


def differences(name: str, *, dtype: torch.dtype = torch.float64, **changed: Any) -> dict[str, float]:
    """How far figures of the last window are from Sonnet's, at most: `out`, `state`, `loss`, `gradient`.

    changed: settings that are not theirs; parameters that they do not have are then left out.
    """
    case = json.loads(INDEX[f"{name}/config"])
    config = config_of(case, **changed)
    torch.manual_seed(0)
    model = CompressiveTransformer(config).to(dtype)
    ours = {key: value for key, value in names_of(model, config).items() if value is not None}
    if not changed:
        assert set(ours) == {key.removeprefix(f"{name}/w/") for key in INDEX if key.startswith(f"{name}/w/")}
    with torch.no_grad():
        for key, parameter in ours.items():
            parameter.copy_(to_ours(key, read(f"{name}/w/{key}"), parameter, d=case["d"]))
    tokens, state = torch.from_numpy(read(f"{name}/tokens")).long(), model.init_state(case["B"], dtype=dtype)
    aux = []
    for window in tokens.split(case["W"], dim=1):
        step = model(window, state)
        state = step.state
        aux.append(step.aux_losses["compression"].mean() if step.aux_losses else torch.zeros(()))
    compressed, memory = state.slots.transpose(0, 1).split([case["C"], case["M"]], dim=2)
    found = {"out": distance(step.hidden[None, :, ::3], f"{name}/out"), "state": 0.0, "loss": 0.0, "gradient": 0.0}
    found["state"] = distance(memory[None, :, :, ::3], f"{name}/memory")
    losses = {"gtask": (step.hidden * torch.from_numpy(read(f"{name}/cotangents")[-1])).sum()}
    if case["C"]:
        found["state"] = max(found["state"], distance(compressed[None, :, :, ::3], f"{name}/compressed"))
        losses["gaux"] = aux[-1]
        found["loss"] = distance(torch.stack(aux), f"{name}/loss")
    for kind, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(ours.values()), retain_graph=True, allow_unused=True)
        for (key, parameter), gradient in zip(ours.items(), gradients, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            theirs = to_theirs(key, gradient, d=case["d"])
            far = theirs.abs().max().item()
            if f"{name}/{kind}/{key}" in INDEX:
                far = distance(theirs.flatten()[::11], f"{name}/{kind}/{key}")
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
