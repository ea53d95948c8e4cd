"""The laws that every registered model obeys, and the small models that they are tested on.

A law is a function of one case. To test a model of your own, add small configurations of it to `CONFIGS`:
`tests/test_laws.py` fails for a registered model that has none.

Shape letters: B rows, T steps, D model width.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from waveform.engine import interface
from waveform.engine.interface import State
from waveform.engine.sound_classes import SoundClasses
from waveform.models import registry
from waveform.models.embeddings import AdaptiveEmbedding

VOCAB_SIZE = 11  # ids 0..10, and 11 begins an utterance
_BATCH = 3

_ATTENTION = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_feedforward": 24, "num_position_features": 8}
_COMPRESSIVE = {**_ATTENTION, "window": 4, "memory": 4, "compressed": 4, "compression_rate": 2}
_ADAPTIVE = {"head": "adaptive", "cutoffs": [3, 7], "div_value": 2}
_LABELLED = {"num_labels": 3}
_VALUES = [i / 5 - 1 for i in range(VOCAB_SIZE)]
_PREDICTING = {  # with a window of 8, rows pass the end of a block of their predictors
    **{"prediction": "linear", "prediction_widening": 0.9},
    "classes": SoundClasses(tuple(_VALUES), tuple(value + 0.1 for value in _VALUES[:-1])),
}
_PUBLISHED = {  # what published Transformer-XLs have
    **{"norm": "post", "empty_memory": "zeros", "tie_embeddings": True, "project_first": True},
    **{"activation": "relu", "same_length": True, "clamp_len": 5},
}
_SHORT_WAVENET = {
    **{"num_stacks": 1, "layers_per_stack": 3, "kernel_size": 2},
    **{"residual_channels": 12, "gate_channels": 10, "skip_channels": 8},
}
_RAGGED = {**_ATTENTION, "window": 5, "memory": 7, "compressed": 3, "compression_rate": 3}
SONNET = {  # study=sonnet, but for its auxiliary loss, which breaks a law (tests/models/test_sonnet.py)
    **{"activation": "relu", "input_activation": "relu", "output_bias": True, "initial_values": "sonnet"},
    **{"empty_memory": "zeros", "memory_norm": "stored", "final_norm": False, "compression_bias": False},
    **{"compressed_position": "window", "compressed_projection": "own"},
}

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "compressive_transformer": {
        "conv": _COMPRESSIVE,
        "conv-ragged": _RAGGED,
        "conv-post-reference": dict(_RAGGED, norm="post", attention="reference"),
        "conv-autoencode-contiguous": dict(_RAGGED, compression_loss="autoencode", compressed_position="contiguous"),
        "conv-zeros-reference": dict(_COMPRESSIVE, empty_memory="zeros", attention="reference"),
        "sonnet": dict(_RAGGED, **SONNET),
        "sonnet-both-overlap": dict(_RAGGED, **SONNET, norm="both", compression_overlap=1, attention="reference"),
        "sonnet-dilated": dict(
            _RAGGED, **SONNET, compression="dilated", compression_dilations=[1], compression_padding=False
        ),
        "by-layer": dict(
            _RAGGED, num_layers=4, memory=[2, 7, 2, 5], compressed=[0, 3, 0, 5], compression_rate=[1, 2, 1, 3]
        ),
        "by-layer-most-used-post": dict(
            _COMPRESSIVE, memory=[8, 4], compressed=[2, 4], compression="most_used", norm="post"
        ),
        "conv-no-loss": dict(_COMPRESSIVE, compression_loss="none"),
        "conv-no-memory": dict(_RAGGED, memory=0),
        "conv-short-memory": dict(_RAGGED, memory=2, norm="post"),
        "max-tied": dict(_RAGGED, compression="max", tie_embeddings=True),
        "mean": dict(_RAGGED, compression="mean"),
        "mean-zeros-post": dict(_COMPRESSIVE, compression="mean", empty_memory="zeros", norm="post"),
        "most-used": dict(_RAGGED, compression="most_used"),
        "dilated": dict(_RAGGED, compression="dilated"),
        "dilated-autoencode-post": dict(_RAGGED, compression="dilated", compression_loss="autoencode", norm="post"),
        "no-compressed": dict(_RAGGED, compressed=0),
        "adaptive-tied": dict(_RAGGED, **_ADAPTIVE, tie_embeddings=True),
        "adaptive-post": dict(_COMPRESSIVE, **_ADAPTIVE, norm="post"),
        "relu-clamped": dict(_RAGGED, activation="relu", clamp_len=4, compression="mean"),
        "clamped-post-zeros": dict(_COMPRESSIVE, norm="post", empty_memory="zeros", clamp_len=6),
        "most-used-clamped-post": dict(_COMPRESSIVE, compression="most_used", clamp_len=3, norm="post"),
        "labelled": dict(_RAGGED, **_LABELLED),
        "predicting": dict(_RAGGED, **_PREDICTING, window=8),
        "predicting-labelled-post": dict(_COMPRESSIVE, **_PREDICTING, **_LABELLED, window=8, norm="post"),
        "labelled-adaptive-tied-post": dict(_COMPRESSIVE, **_ADAPTIVE, **_LABELLED, tie_embeddings=True, norm="post"),
    },
    "lstm": {
        "labelled": {"num_layers": 2, "d_model": 24, **_LABELLED},
        "plain": {"num_layers": 2, "d_model": 24},
        "predicting": {"num_layers": 1, "d_model": 12, **_PREDICTING},
        "adaptive-tied-one-layer": dict(_ADAPTIVE, num_layers=1, d_model=8, tie_embeddings=True),
    },
    "transformer_xl": {
        "pre": dict(_ATTENTION, window=4, memory=6),
        "post-reference": dict(_ATTENTION, window=5, memory=3, norm="post", attention="reference"),
        "predicting": dict(_ATTENTION, **_PREDICTING, window=8, memory=6),
        "zeros": dict(_ATTENTION, window=4, memory=8, empty_memory="zeros"),
        "by-layer": dict(_ATTENTION, window=4, memory=[0, 6]),
        "no-memory": dict(_ATTENTION, window=5, memory=0),
        "labelled": dict(_ATTENTION, **_LABELLED, window=4, memory=6, d_model=15, num_heads=1),
        "labelled-absolute": dict(_ATTENTION, **_LABELLED, window=4, memory=6, position="absolute"),
        "adaptive": dict(_ATTENTION, **_ADAPTIVE, window=4, memory=6),
        "shaw": dict(_ATTENTION, window=4, memory=6, position="shaw", max_distance=7),
        "absolute": dict(_ATTENTION, window=5, memory=0, norm="post", position="absolute"),
        "learned": dict(_ATTENTION, window=5, memory=0, position="learned"),
        "learned-post": dict(_ATTENTION, window=4, memory=0, position="learned", norm="post"),
        "adaptive-tied-post": dict(_ATTENTION, **_ADAPTIVE, window=5, memory=3, norm="post", tie_embeddings=True),
        "published": dict(_ATTENTION, **_ADAPTIVE, **_PUBLISHED, window=4, memory=6),
        "same-length": dict(_ATTENTION, window=4, memory=6, same_length=True),
        "same-length-short": dict(_ATTENTION, window=5, memory=3, same_length=True, attention="reference"),
        "adaptive-projected": dict(_ATTENTION, **_ADAPTIVE, window=4, memory=6, project_first=True),
    },
    "wavenet": {
        "strong": dict(_SHORT_WAVENET, num_stacks=2, kernel_size=3, gate_channels=12),
        "classic": dict(_SHORT_WAVENET, end_channels=20),
        "kernel-of-4": dict(_SHORT_WAVENET, num_stacks=2, layers_per_stack=1, kernel_size=4),
        "labelled": dict(_SHORT_WAVENET, **_LABELLED),
        "predicting": dict(_SHORT_WAVENET, **_PREDICTING),
    },
}


def first_fields(model: str) -> dict[str, Any]:
    """Those of a model's first configuration."""
    return dict(next(iter(CONFIGS[model].values())))


@dataclass(frozen=True)
class Case:
    """One small configuration of a registered model."""

    model: str
    variant: str

    @property
    def fields(self) -> dict[str, Any]:
        return CONFIGS[self.model][self.variant]

    @property
    def window(self) -> int:
        """The model's window; for a model without one, just a length."""
        return self.fields.get("window", 5)

    def build(self) -> Any:
        """The model at fp64, with parameters far enough from their initial values for each of them to matter."""
        torch.manual_seed(0)
        return randomise(registry.build(self.model, vocab_size=VOCAB_SIZE, **self.fields))

    @property
    def num_labels(self) -> int:
        """Labels of utterances, unknown included; 0: the model has none."""
        return self.fields.get("num_labels", 0)

    def tokens(self, num_steps: int, *, batch_size: int = _BATCH, seed: int = 1) -> Tensor:
        """`random_tokens` that the model reads: with each of its labels."""
        return random_tokens(num_steps, batch_size=batch_size, seed=seed, num_labels=self.num_labels)

    def __str__(self) -> str:
        return f"{self.model}-{self.variant}"


CASES = [Case(model, variant) for model, variants in CONFIGS.items() for variant in variants]
# LSTMs have none; of Transformer-XL's encodings of positions, decoders know its own; of study=sonnet they know
# nothing.
WITH_DECODER = [
    case
    for case in CASES
    if case.model != "lstm"
    and case.fields.get("position", "relative") == "relative"
    and "memory_norm" not in case.fields
]
# What nobody samples at speed steps with torch: the published form, embeddings of words, compressions of ablations.
_BY_TORCH = {"norm", "head", "tie_embeddings", "activation", "same_length", "clamp_len"}
IN_KERNELS = [
    case
    for case in WITH_DECODER
    if not _BY_TORCH & set(case.fields) and case.fields.get("compression", "conv") in ("conv", "mean")
]
# `pytest -m "not slow"` tries these; together they take every branch of the models.
_QUICK = {
    *("conv-ragged", "sonnet", "by-layer", "most-used", "dilated-autoencode-post", "adaptive-tied"),
    *("zeros", "post-reference", "published", "shaw", "absolute", "learned"),  # Transformer-XLs
    *("strong", "plain", "labelled", "predicting"),
}


def params(cases: Iterable[Case] = CASES) -> list[Any]:
    """Parameters of a test, the slower half of them marked as slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(case, marks=marks[case.variant in _QUICK], id=str(case)) for case in cases]


def randomise(model: Any, *, std: float = 0.3) -> Any:
    """Add noise to every parameter, so that no bias is zero and no two layers are alike; returns it at fp64."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=std)
    return model


def random_tokens(num_steps: int, *, batch_size: int = _BATCH, seed: int = 1, num_labels: int = 0) -> Tensor:
    """Input ids [B, num_steps], the begin-of-utterance id, or that of each label, among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE + max(1, num_labels), (batch_size, num_steps), generator=generator)


def fresh_state(model: Any, batch_size: int = _BATCH) -> State:
    return model.init_state(batch_size, device="cpu", dtype=next(model.parameters()).dtype)


def states_in_step(model: Any, case: Case, *, batch_size: int = _BATCH) -> list[State]:
    """A fresh state, and states within the first window, at the start of a window, and just before an end."""
    fresh, lengths = fresh_state(model, batch_size), (2, 4 * case.window, 5 * case.window - 1)
    return [fresh] + [model(case.tokens(n, batch_size=batch_size, seed=9), fresh).state for n in lengths]


def ragged_cuts(num_steps: int, *, longest: int, seed: int = 2) -> list[int]:
    """Random lengths from 1 to `longest` that add up to `num_steps`."""
    generator = torch.Generator().manual_seed(seed)
    cuts: list[int] = []
    while (left := num_steps - sum(cuts)) > 0:
        cuts.append(min(left, int(torch.randint(1, longest + 1, (), generator=generator))))
    return cuts


def even_cuts(num_steps: int, length: int) -> list[int]:
    return [min(length, num_steps - start) for start in range(0, num_steps, length)]


def run(model: Any, tokens: Tensor, state: State, cuts: Sequence[int]) -> tuple[Tensor, dict[str, Tensor], State]:
    """Feed `tokens` in calls of the lengths `cuts`; returns all hidden vectors, summed losses and the last state."""
    assert sum(cuts) == tokens.shape[1]
    hiddens: list[Tensor] = []
    losses: dict[str, Tensor] = {}
    for part in tokens.split(list(cuts), dim=1):
        hidden, state, aux = model(part, state)
        hiddens.append(hidden)
        for name, value in aux.items():
            losses[name] = losses[name] + value if name in losses else value
    return torch.cat(hiddens, 1), losses, state


_mid_stream: dict[tuple[type, Case, str], State] = {}


def mid_stream_state(model: Any, case: Case) -> State:
    """A state of three rows with different histories, at different places within their windows.

    model: as `case.build` made it, for the state is computed once for all laws of a case.
    """
    key = (type(model), case, repr(case.fields))
    if key in _mid_stream:
        return clone(_mid_stream[key])
    state, window = fresh_state(model), case.window
    with torch.no_grad():
        for num_steps, row in ((4 * window + 1, 1), (2 * window + 2, 2), (window - 1, None)):
            state = model(case.tokens(num_steps, seed=num_steps), state).state
            if row is not None:
                state = interface.reset_rows(state, fresh_state(model), torch.arange(_BATCH) == row)
    _mid_stream[key] = state
    return clone(state)


@contextmanager
def traced_embeddings(model: nn.Module) -> Iterator[list[Tensor]]:
    """The embedding's outputs [B, T, C] or [T, B, C] within the `with` block, in order; their gradients are kept."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    kinds = (nn.Embedding, AdaptiveEmbedding)
    handles = [module.register_forward_hook(keep) for module in model.modules() if isinstance(module, kinds)]
    assert handles, "the laws find a model's inputs by its nn.Embedding or AdaptiveEmbedding"
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def clone(state: State) -> State:
    return interface.map_state(torch.clone, state)


def assert_same(actual: Any, expected: Any, *, atol: float = 1e-10) -> None:
    """Of tensors, and of lists and dicts of them."""
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def assert_same_gradients(actual: Tensor, expected: Tensor, parameters: dict[str, Tensor]) -> None:
    """Both numbers have the same gradient, with respect to each of the parameters."""
    gradients = [torch.autograd.grad(x, list(parameters.values()), retain_graph=True) for x in (actual, expected)]
    found, wanted = (dict(zip(parameters, each, strict=True)) for each in gradients)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


# Law 1 (causality)


def check_causality(case: Case) -> None:
    """The gradient of the output at t with respect to the inputs after t is exactly zero.

    For all t at once: the rows are repeated T times, and of the copies of number t, only the output at t counts.
    """
    model = case.build()
    model.carry_gradient = True  # as many paths as possible
    tokens = case.tokens(2 * case.window + 3)
    num_steps = tokens.shape[1]
    own = torch.arange(num_steps).repeat(_BATCH)  # [B * T] the t of each copy
    copies = torch.arange(len(own))
    later = torch.arange(num_steps) > own[:, None]
    for state in (fresh_state(model), mid_stream_state(model, case)):
        repeated = interface.map_state(lambda tensor: tensor.repeat_interleave(num_steps, 0), state)
        with traced_embeddings(model) as embeddings:
            outputs = model(tokens.repeat_interleave(num_steps, 0), repeated).hidden[copies, own]
        found = torch.autograd.grad((outputs * torch.randn_like(outputs)).sum(), embeddings)
        gradient = torch.cat([part if len(part) == len(own) else part.transpose(0, 1) for part in found], 1)
        assert gradient.shape[:2] == later.shape
        assert not gradient[later].any(), "an output depends on a later input"
        assert gradient[copies, own].any(-1).all(), "an output does not depend on its own input"


# Law 2 (chunks)


def check_chunks(case: Case) -> None:
    """However a stream is cut, its outputs are the same."""
    model, window = case.build(), case.window
    num_steps = 6 * window + window // 2 + 1
    tokens = case.tokens(num_steps)
    ragged = ragged_cuts(num_steps, longest=2 * window + 1)
    cuts = {"ragged": ragged, "windows": even_cuts(num_steps, window), "all but one": [1, num_steps - 1]}
    with torch.no_grad():
        for start, short in (
            (fresh_state(model), [1] * num_steps),
            (mid_stream_state(model, case), ragged_cuts(num_steps, longest=3)),
        ):
            expected, _, _ = run(model, tokens, clone(start), [num_steps])
            assert expected.shape[:2] == tokens.shape
            found = {n: run(model, tokens, clone(start), each)[0] for n, each in {**cuts, "short": short}.items()}
            assert_same(found, dict.fromkeys(found, expected))


def check_decoder(case: Case) -> None:
    """Stepping the model's own decoder equals teacher forcing, from fresh and from mid-window states."""
    model = case.build()
    with torch.no_grad():  # with all rows in step a model may have a faster decoder
        starts = [mid_stream_state(model, case), *states_in_step(model, case)]
        assert_steps_equal_forward(model, case.tokens(4 * case.window + 2), starts)


def steps(decoder: interface.Decoder, tokens: Tensor) -> Tensor:
    """The logits [B, T, V] of a decoder that reads tokens [B, T] one by one."""
    return torch.stack([decoder.step(tokens[:, t]).clone() for t in range(tokens.shape[1])], dim=1)


def assert_steps_equal_forward(
    model: Any, tokens: Tensor, starts: Iterable[State], *, kind: Any = interface.Decoder, atol: float = 1e-10
) -> None:
    """From each of these states, by a decoder of this kind."""
    for start in starts:
        expected = model.head.logits(model(tokens, clone(start)).hidden)
        decoder = interface.decoder(model, clone(start))
        assert isinstance(decoder, kind)
        assert_same(steps(decoder, tokens), expected, atol=atol)


# Law 3 (state)


def check_state(case: Case) -> None:
    """State keeps its shapes and dtypes whatever T is, and a call does not change the state that it was given."""
    model, window = case.build(), case.window
    state = fresh_state(model)
    described = [(tensor.shape, tensor.dtype) for tensor in interface.state_tensors(state)]
    assert all(shape[0] == _BATCH for shape, _ in described), "state is batch first"
    with torch.no_grad():
        for num_steps in (1, 2, window - 1, window, window + 1, 5 * window + 2, 1):
            before = clone(state)
            new = model(case.tokens(num_steps, seed=num_steps), state).state
            assert type(new) is type(state)
            assert [(tensor.shape, tensor.dtype) for tensor in interface.state_tensors(new)] == described
            assert_same(interface.state_tensors(state), interface.state_tensors(before), atol=0)  # it was not changed
            state = new


def check_state_dtype(case: Case) -> None:
    """State keeps its dtype even if it differs from the model's."""
    model = case.build().float()
    state = model.init_state(_BATCH, device="cpu", dtype=torch.bfloat16)
    dtypes = [tensor.dtype for tensor in interface.state_tensors(state)]
    assert torch.bfloat16 in dtypes
    with torch.no_grad():
        for num_steps in (1, case.window, 2 * case.window + 1, 3 * case.window):
            hidden, state, _ = model(case.tokens(num_steps), state)
            assert hidden.dtype == torch.float32
            assert [tensor.dtype for tensor in interface.state_tensors(state)] == dtypes


# Law 4 (gradient in state)


def check_gradient_in_state(case: Case) -> None:
    """Returned state carries gradient if, and only if, BPTT is asked for."""
    model, window = case.build(), case.window
    assert model.carry_gradient is False
    for carry in (False, True):
        model.carry_gradient = carry
        # The first call ends inside a window, so that there is something to remember even without a memory.
        for num_steps in (window - 1, 3 * window + 2):
            with traced_embeddings(model) as embeddings:
                first = model(case.tokens(num_steps), fresh_state(model))
                num_first = len(embeddings)
                second = model(case.tokens(window + 1, seed=5), first.state)
            assert any(tensor.requires_grad for tensor in interface.state_tensors(first.state)) == carry
            (second.hidden * torch.randn_like(second.hidden)).sum().backward()
            reached = [part.grad is not None and bool(part.grad.any()) for part in embeddings]
            assert any(reached[:num_first]) == carry
            assert all(reached[num_first:])


# Law 5 (rows)


def check_rows_are_independent(case: Case) -> None:
    """A row does not depend on what other rows hold."""
    model, window = case.build(), case.window
    first, second = case.tokens(5 * window + 2), case.tokens(5 * window + 2, seed=7)
    second[1] = first[1]
    with torch.no_grad():
        cuts = ragged_cuts(first.shape[1], longest=2 * window)
        expected, losses, _ = run(model, first, mid_stream_state(model, case), cuts)
        actual, other_losses, _ = run(model, second, mid_stream_state(model, case), cuts)
    assert not torch.equal(actual[0], expected[0])
    assert_same(actual[1], expected[1], atol=1e-12)
    for name, value in losses.items():
        assert_same(other_losses[name][1], value[1], atol=1e-12)


def check_reset_rows(case: Case) -> None:
    """Rows that are reset at different times equal fresh rows, wherever in their windows the others are."""
    model, window = case.build(), case.window
    tokens = case.tokens(12 * window)
    cuts = ragged_cuts(tokens.shape[1], longest=2 * window, seed=3)
    starts = [0, *itertools.accumulate(cuts)]
    # Never two rows in one call, and once right after another reset.
    resets = {2: [0], 4: [1], 5: [1], 6: [2], 8: [0]}
    assert len(cuts) > max(resets)
    begins: dict[int, list[int]] = {row: [0] for row in range(_BATCH)}
    state, hiddens, losses = fresh_state(model), [], []
    with torch.no_grad():
        for call, part in enumerate(tokens.split(cuts, dim=1)):
            if call in resets:
                rows = torch.zeros(_BATCH, dtype=torch.bool)
                rows[resets[call]] = True
                state = interface.reset_rows(state, fresh_state(model), rows)
                for row in resets[call]:
                    begins[row].append(starts[call])
            hidden, state, aux = model(part, state)
            hiddens.append(hidden)
            losses.append(aux)
        actual = torch.cat(hiddens, 1)
        assert len({(tokens.shape[1] - begins[row][-1]) % window for row in begins}) > 1, "all rows in one phase"
        for row, marks in begins.items():
            for begin, end in itertools.pairwise([*marks, tokens.shape[1]]):
                expected, aux, _ = run(model, tokens[row : row + 1, begin:end], fresh_state(model, 1), [end - begin])
                assert_same(actual[row, begin:end], expected[0])
                for name, value in aux.items():
                    calls = range(starts.index(begin), starts.index(end))
                    assert_same(torch.stack([losses[call][name][row] for call in calls]).sum(), value[0])


# Law 6 (gradients of parameters)


def split_parameters(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The named parameters of the trunk (head included), and those of the compressor."""
    ids = {id(parameter) for parameter in interface.optional_parts(model).compressor_parameters()}
    named = dict(model.named_parameters())
    assert ids <= {id(parameter) for parameter in named.values()}
    trunk = {name: parameter for name, parameter in named.items() if id(parameter) not in ids}
    return trunk, {name: parameter for name, parameter in named.items() if id(parameter) in ids}


def _reached(parameters: dict[str, Tensor]) -> set[str]:
    """Those that got a gradient which is not all zeros."""
    return {name for name, parameter in parameters.items() if parameter.grad is not None and parameter.grad.any()}


def trains_without_bptt(case: Case) -> bool:
    """False for a compressor that has parameters but no loss of its own: only BPTT can train it."""
    return case.fields.get("compression_loss") != "none"


def check_gradients_of_parameters(case: Case, *, carry_gradient: bool) -> None:
    """The task loss reaches exactly the trunk, the compression loss exactly the compressor, and both keep doing so."""
    model, window = case.build(), case.window
    model.carry_gradient = carry_gradient
    trunk, compressor = split_parameters(model)
    state = fresh_state(model)
    num_compressions = 0
    for call, num_windows in enumerate((1, 1, 1, 1, 1, 1, 3)):
        tokens = case.tokens(num_windows * window, seed=call)
        tokens[0, :4] = torch.tensor([VOCAB_SIZE, 0, 5, 9])  # each part of an embedding: `begin`, and every cluster
        step = model(tokens, state)
        state = step.state
        model.zero_grad()
        _task_loss(model, step.hidden).backward(retain_graph=True)
        assert _reached(trunk) == trunk.keys() and not _reached(compressor), "by the task loss"
        for name, loss in step.aux_losses.items():
            assert loss.shape == (_BATCH,)
            model.zero_grad()
            loss.mean().backward(retain_graph=True)
            if call > 2:  # earlier ones may have only zeros to compress (`empty_memory=zeros`)
                assert _reached(compressor) == compressor.keys(), f"by the {name} loss"
            assert not _reached(trunk), f"by the {name} loss"
            num_compressions += num_windows
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert num_compressions > 3 if compressor else num_compressions == 0


def check_task_loss_alone(case: Case) -> None:
    """With BPTT and no compression loss, the task loss trains the compressor too."""
    model, window = case.build(), case.window
    model.carry_gradient = True
    tokens = case.tokens(6 * window)
    for cuts in (even_cuts(6 * window, window), [6 * window]):
        model.zero_grad()
        hidden, losses, _ = run(model, tokens, fresh_state(model), cuts)
        assert not losses
        _task_loss(model, hidden).backward()
        parameters = dict(model.named_parameters())
        assert _reached(parameters) == parameters.keys()


def _task_loss(model: Any, hidden: Tensor) -> Tensor:
    targets = random_tokens(hidden.shape[1], seed=11).clamp(max=VOCAB_SIZE - 1)
    return model.head.nll(hidden, targets).mean()


# Labels


def check_labels(case: Case) -> None:
    """The label that began a row is added to all of its outputs until the next one, and to no other row's."""
    model, window = case.build(), case.window
    num_steps, switch = 4 * window + 3, 2 * window + 1
    tokens = random_tokens(num_steps).clamp(max=VOCAB_SIZE - 1)
    tokens[:, 0] = VOCAB_SIZE + torch.tensor([0, 1, 2])
    tokens[1, switch] = VOCAB_SIZE + 2
    others = tokens.clone()
    others[0, 0] = VOCAB_SIZE + 1
    with torch.no_grad():
        expected, _, state = run(model, tokens, fresh_state(model), even_cuts(num_steps, window))
        actual, _, _ = run(model, others, fresh_state(model), even_cuts(num_steps, window))
        assert state.labels[0].tolist() == [0, 2, 2]
        assert (actual[0] != expected[0]).any(-1).all(), "an output does not depend on its row's label"
        assert_same(actual[1:], expected[1:], atol=1e-12)
        model.label_embedding.table.zero_()
        plain = registry.build(case.model, vocab_size=VOCAB_SIZE, **{**case.fields, "num_labels": 0}).double()
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("label_embedding.")})
        expected = plain(tokens.clamp(max=VOCAB_SIZE), fresh_state(plain)).hidden
        assert torch.equal(model(tokens, fresh_state(model)).hidden, expected), "labels that add nothing change bits"
        assert len(interface.state_tensors(fresh_state(model))) == len(interface.state_tensors(fresh_state(plain))) + 1


def check_labels_begin_at_zero(case: Case) -> None:
    """A model with labels begins with the weights, and draws the random numbers, of the one without."""
    begun = []
    for num_labels in (0, case.num_labels):
        torch.manual_seed(0)
        model = registry.build(case.model, vocab_size=VOCAB_SIZE, **{**case.fields, "num_labels": num_labels})
        begun.append({**model.state_dict(), "drawn next": torch.rand(1)})
    assert not begun[1].pop("label_embedding.table").any()
    assert_same(begun[1], begun[0], atol=0)
