"""How heads start: local in the lower layers, as sharply for any width of positions, and blind above."""

import math

import pytest
import torch

from waveform.models.attention import RelativeAttention, encode_times
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.transformer_config import CompressiveTransformerConfig


def position_logits(attention: RelativeAttention, distances: torch.Tensor) -> torch.Tensor:
    """Logits [heads, distances] of a query of zeros, by position alone."""
    encoding = encode_times(distances, num_position_features=attention.num_position_features, dtype=torch.float64)
    d_head = attention.position_bias.shape[1]
    queries = torch.zeros(1, attention.num_heads, 1, d_head, dtype=torch.float64)
    return attention.position_queries(queries)[0][0, :, 0] @ encoding.t() / d_head**0.5


@pytest.mark.parametrize("num_position_features", [24, 64, 128])
def test_a_local_head_prefers_its_distance_and_falls_off_by_the_fourth_power(num_position_features: int) -> None:
    torch.manual_seed(0)
    fields = {"d_model": 32, "num_heads": 4, "num_position_features": num_position_features}
    attention = RelativeAttention(CompressiveTransformerConfig(256, **fields)).double()
    attention.look_back()
    logits = position_logits(attention, torch.arange(1300.0))
    preferred = logits.argmax(dim=1).tolist()
    assert preferred == [0, 1, 2, 4]
    for head, at in zip(logits, preferred, strict=True):
        # Means over neighbours, because a sum of a few sinusoids is uneven.
        near, far = (head[at + away : at + away + away // 2].mean() for away in (8, 800))
        assert (near - far).item() / math.log(100) == pytest.approx(4, abs=0.8)


@pytest.mark.parametrize(
    ("num_layers", "share", "local"), [(4, 0.5, 2), (3, 0.5, 1), (1, 0.5, 0), (4, 1.0, 4), (4, 0.0, 0)]
)
def test_the_lower_layers_start_local(num_layers: int, share: float, local: int) -> None:
    config = CompressiveTransformerConfig(
        vocab_size=8, num_layers=num_layers, d_model=16, num_heads=2, d_feedforward=16, local_layers=share
    )
    layers = CompressiveTransformer(config).layers
    assert [bool(layer.attention.position_bias.any()) for layer in layers] == [i < local for i in range(num_layers)]
