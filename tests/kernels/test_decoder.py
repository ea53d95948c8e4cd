"""The compiled decoders: equal to `forward`, the same for every batch size, and int8 close to fp32."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.wavenet_kernels import KernelWaveNetDecoder
from tests import laws
from waveform.decoding.cached import CachedDecoder
from waveform.engine import interface
from waveform.engine.sampler import SamplingConfig, sample
from waveform.kernels.decoder import KernelTransformerDecoder
from waveform.kernels.dense import quantise
from waveform.models.registry import build
from waveform.system.errors import UserError

every_case = pytest.mark.parametrize("case", laws.IN_KERNELS, ids=str)

# Logits of these models are about 5, and layer norms over 16 features magnify rounding: `CachedDecoder` is up to 5e-5
# away from `forward`; a wrong slot, weight or position is 0.1.
_TOLERANCE = 2e-4
_OF_PREDICTING = 1e-3  # logits of classes many scales away from what is expected are large
COMPILED = (KernelTransformerDecoder, KernelWaveNetDecoder)


@pytest.fixture(autouse=True)
def no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


def assert_steps_equal_forward(case: laws.Case, *, kind: Any) -> None:
    """Of the model in fp32."""
    model = case.build().float()
    atol = _OF_PREDICTING if "prediction" in case.fields else _TOLERANCE
    tokens, starts = case.tokens(6 * case.window + 2), laws.states_in_step(model, case)
    laws.assert_steps_equal_forward(model, tokens, starts, kind=kind, atol=atol)


@every_case
def test_steps_equal_teacher_forcing(case: laws.Case) -> None:
    assert_steps_equal_forward(case, kind=COMPILED)


@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": 24, "num_heads": 3, "d_feedforward": 20},  # padded vectors everywhere
        {"d_model": 160, "num_heads": 2, "window": 40, "memory": 90, "compressed": 70},  # 80 features a head, 4 blocks
        {"window": 300, "memory": 310, "compressed": 30},  # two parts
        {"window": 300, "memory": 310, "compressed": 30, "compression": "mean", "compression_rate": 4},
        {"window": 40, "memory": [30, 90], "compressed": [70, 9], "compression": "mean", "compression_rate": [4, 10]},
    ],
    ids=["padding", "wide", "parts", "parts-mean", "by-layer-mean"],
)
def test_other_sizes(fields: dict[str, Any]) -> None:
    base = laws.CONFIGS["compressive_transformer"]["conv-ragged"]
    torch.manual_seed(0)
    model = build("compressive_transformer", vocab_size=laws.VOCAB_SIZE, **{**base, **fields})
    model = laws.randomise(model, std=0.1).float()
    window = model.config.window
    before, tokens = (laws.random_tokens(n, batch_size=2, seed=n) for n in (5 * window - 3, window + 7))
    start = model(before, laws.fresh_state(model, 2)).state
    laws.assert_steps_equal_forward(model, tokens, [start], kind=COMPILED, atol=_TOLERANCE)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_a_row_is_bitwise_the_same_in_every_batch(case: laws.Case, int8: bool) -> None:
    model = case.build().float()
    tokens = case.tokens(6 * case.window + 2, batch_size=8)
    start = laws.states_in_step(model, case, batch_size=1)[3]

    def logits(rows: list[int]) -> Tensor:
        decoder = interface.decoder(model, interface.take_rows(start, [0] * len(rows)), int8=int8)
        return laws.steps(decoder, tokens[rows])

    expected = logits(list(range(8)))
    for rows in ([0], [6], [0, 1], [5, 3, 7]):
        assert torch.equal(logits(rows), expected[rows])


@pytest.mark.slow
def test_threads_change_no_bit() -> None:
    """Through the window's end at which memory is full, and steps are compressed."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "d_model": 128, "num_heads": 4, "d_feedforward": 256}
    model = build("compressive_transformer", vocab_size=256, **sizes, window=80, memory=700, compressed=30)
    tokens = torch.randint(256, (5, 890))
    one, three = (KernelTransformerDecoder(model, laws.fresh_state(model, 5)) for _ in range(2))
    three._plan["num_threads"] = 3  # whatever the number of processors
    assert torch.equal(laws.steps(one, tokens), laws.steps(three, tokens))


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
@pytest.mark.parametrize("prompted", [False, True], ids=["empty", "prompt"])
def test_a_sampled_stream_is_the_same_in_every_batch(name: str, prompted: bool) -> None:
    torch.manual_seed(0)
    model = build(name, vocab_size=laws.VOCAB_SIZE, **laws.first_fields(name))
    prompt = laws.random_tokens(21, batch_size=1)[0].clamp(max=laws.VOCAB_SIZE - 1) if prompted else None
    config = SamplingConfig(seed=5, top_p=0.95, temperature=0.9)
    streams = partial(sample, model, vocab_size=laws.VOCAB_SIZE, num_steps=60, config=config, prompt=prompt)
    eight = streams(num_streams=8)
    assert len({tuple(row) for row in eight.tolist()}) == 8
    for num_streams in (1, 2, 3):
        assert torch.equal(streams(num_streams=num_streams), eight[:num_streams])


@every_case
def test_int8_is_close(case: laws.Case) -> None:
    """Random weights with 12 to 24 inputs are the worst case: their rounding errors hardly cancel.

    Log-probabilities differ by 0.01 to 0.03 nats on average; by 0.2 to 0.7 if any one array of scales is ignored.
    """
    model = case.build().float()
    tokens, start = case.tokens(6 * case.window + 2), laws.states_in_step(model, case)[2]
    decoders = [interface.decoder(model, laws.clone(start), int8=int8) for int8 in (False, True)]
    fp32, int8 = (laws.steps(decoder, tokens).log_softmax(-1) for decoder in decoders)
    assert not torch.equal(fp32, int8)
    difference, most = (fp32 - int8).abs(), 0.06
    if "prediction" in case.fields:  # as probable as they are: classes far from what is expected differ by nats
        difference, most = (fp32.exp() * difference).sum(-1), 0.12
    assert difference.mean() < most


def test_int8_weights_are_within_half_a_step() -> None:
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    rounded, scales = quantise(weight)
    assert rounded.dtype == torch.int8
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded * scales[:, None] - weight).abs() <= step / 2 + 1e-7).all()


NOT_COMPILED: list[dict[str, Any]] = [
    {"norm": "post"},
    *({"compression": name} for name in ("max", "most_used", "dilated")),
    *({"compressed": 0, "activation": "relu"}, {"compressed": 0, "same_length": True}, {"clamp_len": 3}),
]


@pytest.mark.parametrize("fields", NOT_COMPILED, ids=str)
def test_what_kernels_do_not_know_steps_with_torch(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    variants = laws.CONFIGS["compressive_transformer"]
    monkeypatch.setitem(variants, "unknown", {**variants["conv-ragged"], **fields})
    case = laws.Case("compressive_transformer", "unknown")
    assert_steps_equal_forward(case, kind=CachedDecoder)
    model, name = case.build().float(), list(fields)[-1]
    with pytest.raises(UserError, match=rf"^int8 sampling does not support model\.{name}=.*; sample without int8$"):
        interface.decoder(model, laws.fresh_state(model), int8=True)


def test_a_model_without_the_optional_parts_is_not_asked_for_int8() -> None:
    class Exact:
        def decoder(self, state: Any) -> Any:
            raise AssertionError("not to be asked")

    with pytest.raises(UserError, match=r"^this model has no int8 decoder; sample without int8$"):
        interface.decoder(Exact(), None, int8=True)
