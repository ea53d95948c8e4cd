"""Shaw's, absolute and learned encodings, and variational dropout, against the formulas written out."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baselines.position_encodings import EncodedAttention
from baselines.transformer_xl import TransformerXL, VariationalDropout
from tests import laws
from tests.analyses.conftest import QUIET, run_of
from tests.baselines import test_transformer_xl
from tests.engine.conftest import write_tokens
from tests.references import compressive_transformer as reference
from waveform.analyses.heads import attention_by_head
from waveform.engine.interface import decoder
from waveform.system.errors import UserError

SIZES = {**test_transformer_xl.SIZES, "window": 5, "norm": "post"}


def build(**fields: Any) -> Any:
    return test_transformer_xl.build(TransformerXL, **{**SIZES, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "shaw", "memory": 7, "max_distance": 6},
        {"position": "shaw", "memory": 0, "max_distance": 40},
        {"position": "absolute", "memory": 0},
        {"position": "absolute", "memory": 7},
        {"position": "learned", "memory": 0},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_equals_the_formula(fields: dict[str, Any]) -> None:
    model, tokens = build(**fields), laws.random_tokens(23)
    config = SimpleNamespace(**{**vars(model.config), **fields})
    with torch.no_grad():
        hidden = laws.run(model, tokens, laws.fresh_state(model), laws.ragged_cuts(23, longest=9))[0]
        laws.assert_same(hidden, reference.run(model, config, tokens).hidden)


def test_parameters_are_those_of_the_encoding_alone() -> None:
    def names(**fields: Any) -> set[str]:
        return {name.removeprefix("layers.0.attention.") for name, _ in build(**fields).named_parameters()}

    own = {"position.weight", "content_bias", "position_bias"}
    shaw, absolute = names(position="shaw", max_distance=9), names(position="absolute")
    learned = names(position="learned", memory=0)
    assert own <= names() and not own & (shaw | absolute | learned)
    assert learned == shaw
    assert shaw - names() == {"encoding.vectors", "layers.1.attention.encoding.vectors"}
    assert absolute < names()


def test_a_longer_memory_changes_no_parameter() -> None:
    short, long = (build(position="shaw", memory=memory) for memory in (5, 50))
    long.load_state_dict(short.state_dict())


def test_shaws_vectors_begin_as_large_as_keys() -> None:
    torch.manual_seed(0)
    attention: Any = TransformerXL(TransformerXL.Config(**SIZES | {"d_model": 96}, position="shaw")).layers[0].attention
    keys = attention.key(torch.randn(500, 96))  # of inputs that a norm has standardised
    assert attention.encoding.vectors.std().item() == pytest.approx(keys.std().item(), rel=0.1)


@pytest.mark.parametrize("norm", ["pre", "post", "both"])
def test_absolute_positions_begin_as_large_as_embeddings(norm: str) -> None:
    model = TransformerXL(TransformerXL.Config(**{**SIZES, "d_model": 96, "norm": norm}, position="absolute"))
    assert model._scale_of_positions == pytest.approx(model.embedding.weight.std().item(), rel=0.1)


def test_no_decoder_knows_other_encodings() -> None:
    model = build(position="shaw").float()
    state = model.init_state(1, device="cpu", dtype=torch.float32)
    assert type(decoder(model, state)).__name__ == "ForwardDecoder"
    with pytest.raises(UserError, match="position=relative only"):
        decoder(model, state, int8=True)
    with pytest.raises(UserError, match=r"model\.position"):
        build(position="rotary")


@pytest.mark.parametrize("position", ["shaw", "absolute", "learned"])
def test_only_relative_positions_are_clamped(position: str) -> None:
    with pytest.raises(UserError, match=f"clamp_len is for model.position=relative, not {position}"):
        build(position=position, memory=0, clamp_len=3)


def test_learned_positions_are_those_of_one_window() -> None:
    """More is refused: there are no vectors for memory, and a window is what it was in training."""
    with pytest.raises(UserError, match=r"model\.position=learned .* model\.memory is 5; set model\.memory=0"):
        build(position="learned", memory=5)
    model, tokens = build(position="learned", memory=0), laws.random_tokens(15)
    with torch.no_grad():
        whole, alone = (model(part, laws.fresh_state(model)).hidden for part in (tokens, tokens[:, 10:]))
    laws.assert_same(whole[:, 10:], alone)


@pytest.mark.parametrize("position", ["relative", "shaw", "absolute", "learned"])
def test_every_encodings_attention_weights_are_dropped(position: str) -> None:
    """With all but one in 65,536 weights dropped, in training only, nothing passes from one step to another."""
    model, tokens = build(position=position, memory=0, attention_dropout=1 - 2**-16), laws.random_tokens(5)
    others = tokens.clone()
    others[:, :-1] = (tokens[:, :-1] + 1) % laws.VOCAB_SIZE
    for training in (True, False):
        model.train(training)
        last = [model(part, laws.fresh_state(model)).hidden[:, -1] for part in (tokens, others)]
        assert torch.equal(*last) == training


def test_variational_dropout_draws_one_mask_a_row() -> None:
    torch.manual_seed(0)
    x = torch.ones(4, 30, 200)
    dropped = VariationalDropout(0.25)(x)
    assert torch.equal(dropped, dropped[:, :1].expand_as(x))  # the same for all steps
    assert not torch.equal(dropped[0], dropped[1])  # another for each row
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.05)
    assert torch.equal(VariationalDropout(0.25).eval()(x), x)
    modules = build(dropout=0.5, dropout_mask="window").modules()
    assert [type(m) for m in modules if isinstance(m, torch.nn.Dropout) and m.p] == [VariationalDropout] * 3
    assert VariationalDropout not in [type(m) for m in build(dropout=0.5).modules()]


def test_variational_dropout_in_the_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**SIZES, "d_model": 32, "num_heads": 2, "d_feedforward": 48, "window": 16, "norm": "pre"}
    torch.manual_seed(0)
    model = TransformerXL(TransformerXL.Config(**sizes, memory=16, dropout=0.5, dropout_mask="window"))
    tokens, hidden = torch.zeros(3, 16, dtype=torch.int64), []
    for takes_kernels in (True, False):
        monkeypatch.setattr(TransformerXL, "_takes_kernels", lambda *_, takes=takes_kernels: takes)
        torch.manual_seed(1)
        hidden.append(model(tokens, model.init_state(3)).hidden)
    torch.testing.assert_close(*hidden)
    steps = hidden[0].detach()  # equal inputs; only what attention mixes could differ, and it does not
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps), atol=1e-4, rtol=1e-4)


def test_terms_are_those_of_the_encoding(tmp_path: Any) -> None:
    """Shaw's scores have (a) and (b), absolute and learned ones (a) alone (Dai et al. 2019, section 3.3)."""
    tokens = write_tokens(tmp_path / "a.shard", [90])
    for position, memory, terms in (("shaw", 5, ["a", "b"]), ("absolute", 5, ["a"]), ("learned", 0, ["a"])):
        model = build(position=position, memory=memory)
        assert isinstance(model.layers[0].attention, EncodedAttention)
        figures = attention_by_head(run_of(model, window=model.config.window), tokens, max_tokens=90, **QUIET)
        assert list(figures["terms"]) == terms
        np.testing.assert_allclose(np.array(figures["weight"]).sum(-1), 1, rtol=1e-6)
