"""The Compressive Transformer against its naive reference (`tests.references.compressive_transformer`), at fp64."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import laws
from tests.baselines.test_transformer_xl import SIZES, assert_gradient_of_the_task, check_reach, implementations
from tests.references import compressive_transformer as reference
from waveform.engine import interface
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.system.errors import UserError

Config = CompressiveTransformer.Config

COMPRESSIONS = ("conv", "max", "mean", "most_used", "dilated")


def small(**fields: Any) -> Any:
    """A config with every size different, window and memory indivisible by the rate."""
    memories = {"window": 5, "memory": 7, "compressed": 4, "compression_rate": 2}
    return Config(**(SIZES | memories | fields))


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return laws.randomise(CompressiveTransformer(config))


def assert_equals_reference(config: Any, *, num_windows: int = 7) -> None:
    """Hidden vectors, logits and compression loss of ragged runs, in both ways of attention, equal the reference's."""
    model = build(config)
    # The last window stays open, so that it does not matter which call handles a boundary.
    num_steps = num_windows * config.window + 1
    tokens = laws.random_tokens(num_steps, batch_size=2)
    expected = reference.run(model, config, tokens)
    cuts, output = laws.ragged_cuts(num_steps, longest=2 * config.window + 1), model.head.projection
    for _ in implementations(model):
        actual, losses, _ = laws.run(model, tokens, laws.fresh_state(model, 2), cuts)
        laws.assert_same(actual, expected.hidden)
        laws.assert_same(model.head.logits(actual), expected.hidden @ output.weight.T + output.bias)
        if "compression" in losses:
            laws.assert_same(losses["compression"], expected.aux.sum(1))
        else:
            assert not expected.aux.any()


_ZEROS = {"window": 4, "memory": 6, "compressed": 5, "empty_memory": "zeros"}
_BY_LAYER = {"memory": [5, 9], "compressed": [4, 2], "compression_rate": [2, 5]}
VARIANTS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post"},
    "contiguous positions": {"compressed_position": "contiguous"},
    "ReLU and clamped distances": {"activation": "relu", "clamp_len": 9},
    "empty memory of zeros": _ZEROS,
    "zeros, post, contiguous": dict(_ZEROS, norm="post", compressed_position="contiguous"),
    "sizes by layer": _BY_LAYER,
    "by layer, post, zeros": dict(_BY_LAYER, norm="post", empty_memory="zeros"),
    "by layer, contiguous": dict(_BY_LAYER, compressed_position="contiguous"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_equals_reference(compression: str, variant: str) -> None:
    assert_equals_reference(small(compression=compression, **VARIANTS[variant]))


GEOMETRIES = {
    "all equal": {"window": 4, "memory": 4, "compressed": 4, "compression_rate": 2},
    "memory of several windows": {"window": 3, "memory": 9, "compressed": 2, "compression_rate": 3},
    "memory shorter than window": {"window": 6, "memory": 2, "compressed": 5, "compression_rate": 4},
    "rate of a whole window": {"window": 3, "memory": 4, "compressed": 3, "compression_rate": 3},
    "leftovers": {"window": 5, "memory": 10, "compressed": 4, "compression_rate": 3},
    "window evicts more groups than fit": {"window": 6, "memory": 6, "compressed": 1, "compression_rate": 2},
    "no memory": {"memory": 0},
    "no compressed memory": {"compressed": 0},
    "window alone": {"memory": 0, "compressed": 0},
    "memories by layer": {"memory": [7, 0], "compressed": [4, 2]},
    "rates by layer": {"num_layers": 3, "memory": [3, 12, 3], "compressed": [0, 4, 3], "compression_rate": [1, 5, 2]},
    "window of one": {"window": 1, "memory": 3, "compressed": 2, "compression_rate": 1},
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_reference_in_every_geometry(geometry: str) -> None:
    config = small(**GEOMETRIES[geometry])
    assert_equals_reference(config, num_windows=max(7, 14 // config.window))


def test_sizes_by_layer_are_checked() -> None:
    assert small(memory=[4, 4]).memory == 4  # one size, in every path that knows one
    for fields, message in (
        ({"memory": [4, 4, 4]}, "model.memory has 3 numbers, but model.num_layers is 2"),
        ({"memory": [4, -1]}, "a list with one for each layer"),
        ({"compression_rate": [2, 9]}, "no more than model.window=5 steps leave memory"),
        ({"memory": [5, 4], "compression": "most_used"}, r"most_used looks at .*model.memory \(4\) must be at least"),
    ):
        with pytest.raises(UserError, match=message):
            small(**fields)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_equals_reference_at_random(data: st.DataObject) -> None:
    draw = data.draw
    compression = draw(st.sampled_from(COMPRESSIONS))
    window = draw(st.integers(1, 6))
    config = small(
        num_layers=draw(st.integers(1, 2)), num_position_features=2 * draw(st.integers(1, 5)), window=window,
        memory=draw(st.integers(window if compression == "most_used" else 0, 9)), compressed=draw(st.integers(0, 5)),
        compression=compression, compression_rate=draw(st.integers(1, window)),
        compression_loss=draw(st.sampled_from(["attention", "autoencode", "none"])),
        norm=draw(st.sampled_from(["pre", "post"])),
        compressed_position=draw(st.sampled_from(["time", "contiguous"])),
    )  # fmt: skip
    assert_equals_reference(config, num_windows=max(4, 20 // window))


# Gradients


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("loss", ["attention", "autoencode"])
@pytest.mark.parametrize("compression", ["conv", "dilated"])
def test_compression_loss_equals_reference(compression: str, loss: str, norm: str) -> None:
    config = small(compression=compression, compression_loss=loss, norm=norm)
    model = build(config)
    tokens = laws.random_tokens(6 * config.window + 2, batch_size=2)
    expected = reference.run(model, config, tokens).aux
    assert (expected[:, 2:] > 1e-3).all()
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)  # a row's loss must be its own
    _, compressor = laws.split_parameters(model)
    for _ in implementations(model):
        for cuts in ([tokens.shape[1]], laws.ragged_cuts(tokens.shape[1], longest=7)):
            actual = laws.run(model, tokens, laws.fresh_state(model, 2), cuts)[1]["compression"]
            laws.assert_same(actual, expected.sum(1))
            laws.assert_same_gradients((weights * actual).sum(), (weights * expected.sum(1)).sum(), compressor)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("position", ["time", "contiguous"])
def test_gradient_of_the_task_equals_reference(position: str, norm: str) -> None:
    assert_gradient_of_the_task(build(small(norm=norm, compressed_position=position)), [5] * 6)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_gradient_through_time_equals_reference(compression: str) -> None:
    """The last compression's output is never attended to in this stream, yet earlier ones reach every parameter."""
    model = build(small(compression=compression, compression_loss="none"))
    assert_gradient_of_the_task(model, [27], laws.ragged_cuts(27, longest=8), through_time=True)


# Initial values


def test_a_convolution_starts_as_mean_pooling_or_as_torch_has_it() -> None:
    weights = []
    for init in ("mean", "random"):
        torch.manual_seed(0)
        layer = CompressiveTransformer(small(num_layers=1, compression_rate=4, compression_init=init)).layers[0]
        weights.append(layer.compressor.convolution.weight.detach())
    pooled, random = weights
    assert (pooled - torch.eye(12)[..., None].expand(12, 12, 4) / 4).abs().max() < 0.01
    bound = (12 * 4) ** -0.5  # uniform, by the number of inputs
    assert bound * 0.9 < random.abs().max() <= bound
    assert (random.diagonal().mean() - 1 / 4).abs() > 0.1


# Temporal range


def oldest_input(config: Any, position: int) -> int:
    """The oldest position whose token reaches the output at `position`.

    A query sees from the start of its window back over the memory and over `compressed` groups, of which each window
    before gives floor(W / c). The slot there reached as far back again, one layer below.
    """
    num_groups = config.window // config.compression_rate
    for _ in range(config.num_layers):
        position = position // config.window * config.window - config.memory
        if config.compressed:
            starts = [position - config.window * (i + 1) for i in range(config.compressed)]
            groups = sorted(start + config.compression_rate * i for start in starts for i in range(num_groups))
            position = groups[-config.compressed]
    return position


@pytest.mark.parametrize(
    "sizes",
    [
        {"window": 4, "memory": 4, "compressed": 2, "compression_rate": 2},
        {"window": 5, "memory": 3, "compressed": 2, "compression_rate": 3},
        {"window": 3, "memory": 6, "compressed": 3, "compression_rate": 2},
        {"window": 4, "memory": 0, "compressed": 1, "compression_rate": 3},
        *({"window": W, "memory": M, "compressed": 0} for W, M in ((4, 4), (5, 3), (3, 7))),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_temporal_range(num_layers: int, sizes: dict[str, int]) -> None:
    config = small(num_layers=num_layers, **sizes)
    model = build(config)
    span = config.window - 1 + config.reach
    last = (num_layers * span // config.window + 2) * config.window - 1  # the last position of its window
    edge = oldest_input(config, last)
    assert edge >= 1
    if config.reach % config.window == 0:
        assert last - edge == num_layers * config.reach + config.window - 1
        if config.window % config.compression_rate == 0:
            assert config.reach == config.memory + config.compression_rate * config.compressed
    for _ in implementations(model):
        check_reach(model, last=last, edge=edge)


@pytest.mark.parametrize("compressed", [1, 3, 4])
def test_the_most_used_slots_are_within_reach(compressed: int) -> None:
    """Of a window that is half forgotten, the slots that are left may be its first ones but for as many as are lost."""
    num_streams, num_steps = 400, 30
    memories = {"window": 5, "memory": 7, "compressed": compressed, "compression_rate": 2}
    model = build(Config(**(SIZES | memories | {"vocab_size": num_steps, "num_layers": 1, "compression": "most_used"})))
    tokens = torch.rand(num_streams, num_steps, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    _, state, _ = model(tokens, laws.fresh_state(model, num_streams))
    oldest = (model.embedding(tokens) - state.trunk.slots[:, 0, :1]).abs().sum(dim=2).argmin(dim=1)
    assert int(oldest.min()) == num_steps - model.config.reach


@pytest.mark.parametrize("starts", [(0, 3, 11), (0, 5, 10)], ids=["phases", "whole windows"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_rows_at_different_places_compress_apart(compression: str, starts: tuple[int, ...]) -> None:
    """Rows that compress in different calls, and different numbers of slots, equal the reference row by row.

    Rows that start a multiple of the window apart share a phase, but not how full their memories are.
    """
    config = small(compression=compression, compression_rate=3)
    model = build(config)
    tokens, state = laws.random_tokens(41), laws.fresh_state(model)
    hiddens, losses = [], torch.zeros(len(starts), dtype=torch.float64)
    for begin, end in itertools.pairwise((0, 3, 5, 10, 11, 12, 25, 26, 33, 41)):
        reset = torch.tensor([begin == start for start in starts])
        state = interface.reset_rows(state, laws.fresh_state(model), reset)
        hidden, state, aux = model(tokens[:, begin:end], state)
        hiddens.append(hidden)
        losses = torch.where(reset, 0, losses) + aux.get("compression", 0)
    for row, start in enumerate(starts):
        expected = reference.run(model, config, tokens[row : row + 1, start:])
        laws.assert_same(torch.cat(hiddens, 1)[row, start:], expected.hidden[0])
        laws.assert_same(losses[row], expected.aux[0].sum())
