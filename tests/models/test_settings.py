"""The settings of models: what is refused, and the messages."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from waveform.models.registry import build
from waveform.system.errors import UserError


# Of each kind of rule one; docs/settings.md, which tests/test_docs.py makes again, has the bounds of all.
@pytest.mark.parametrize(
    ("model", "field", "low", "high", "more"),
    [
        ("transformer_xl", "window", 1, 2**24, ""),
        ("compressive_transformer", "memory", 0, 2**24, ", or a list with one for each layer"),
        ("wavenet", "end_channels", 1, 65536, ", or null"),
    ],
)
def test_sizes_are_bounded(model: str, field: str, low: int, high: int, more: str) -> None:
    with torch.device("meta"):
        build(model, vocab_size=8, **{field: np.int64(low)})  # numpy's whole numbers are whole, too
    for value in (low - 1, high + 1, 10**30, 2.0, True, *([] if "null" in more else [None])):
        message = f"model.{field} is {value!r}; it must be a whole number from {low} to {high}{more}"
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            build(model, vocab_size=8, **{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "layer"}, "model.norm is 'layer'; choose pre, post or both"),
        ({"attention": "flash"}, "model.attention is 'flash'; choose fused or reference"),
        ({"compression_loss": "mse"}, "model.compression_loss is 'mse'; choose attention, autoencode or none"),
        ({"compression_init": "zero"}, "model.compression_init is 'zero'; choose mean or random"),
        ({"num_position_features": 3}, "model.num_position_features is 3; it must be even, from 2 to 65536"),
        ({"dropout": 1.0}, "model.dropout is 1.0; it must be at least 0 and below 1"),
        ({"activation": "tanh"}, "model.activation is 'tanh'; choose gelu or relu"),
        ({"clamp_len": -1}, "model.clamp_len is -1; it must be a whole number from 0 to 16777216"),
        ({"attention_dropout": 1}, "model.attention_dropout is 1; it must be at least 0 and below 1"),
        ({"project_first": True}, "model.project_first is for model.head=adaptive, not softmax; leave it false"),
        (
            {"same_length": True},
            "model.same_length ends what a query sees with model.memory, but model.compressed is 768; set "
            "model.compressed=0 or model.same_length=false",
        ),
        (
            {"same_length": True, "memory": 0},
            "model.same_length lets queries see model.memory steps, but it is 0; give it a memory",
        ),
        (
            {"compression": "most_used", "compressed_position": "window", "compression_rate": 800},
            "model.compression=most_used looks at the attention that slots receive while in memory, so model.memory "
            "(768) must be at least model.window (768) and model.compression_rate (800)",
        ),
        ({"num_heads": 5}, "model.d_model 384 is not a multiple of model.num_heads 5"),
        (
            {"name": "transformer_xl", "vocab_size": 200, "head": "adaptive", "cutoffs": list(range(1, 102))},
            "model.cutoffs has 101 ids; give at most 100",
        ),
        ({"name": "wavenet", "vocab_size": 0}, "model.vocab_size is 0; it must be a whole number of at least 1"),
    ],
)
def test_values_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        build(**{"name": "compressive_transformer", "vocab_size": 8, **fields})
