"""The predictors: filters that follow from the past alone, the same by a kernel and by torch, and stable."""

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.conftest import write_utterances
from tests.laws import randomise
from waveform.engine.evaluator import Evaluation
from waveform.engine.interface import map_state, take_rows
from waveform.engine.metrics import unigram_nll
from waveform.engine.sound_classes import classes_of
from waveform.kernels.prediction import read_rows
from waveform.models import linear_prediction as lp
from waveform.models.heads import PredictionHead
from waveform.models.linear_prediction import LinearPrediction, Prediction, PredictionState
from waveform.models.predictors_alone import PredictorsAlone, predictors_alone_of
from waveform.models.registry import build
from waveform.runs.scoring import linear_prediction_nats

_CLASSES = classes_of({"kind": "audio", "quantiser": "mu-law"})
_V = len(_CLASSES.values)


def _predictors(widening: float = 0.994) -> LinearPrediction:
    return LinearPrediction(8, classes=_CLASSES, std=1.0, widening=widening).double()


def _vowel(num_steps: int, *, batch_size: int = 3, seed: int = 0) -> Tensor:
    """Tokens [B, T] of noise with two resonances, after a begin-of-utterance id."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((batch_size, num_steps)) * 0.01
    for pole in (0.97 * np.exp(0.2j), 0.95 * np.exp(0.9j)):
        for t in range(2, num_steps):
            x[:, t] += 2 * pole.real * x[:, t - 1] - abs(pole) ** 2 * x[:, t - 2]
    tokens = torch.from_numpy(np.searchsorted(_CLASSES.bounds, x.clip(-1, 1)))
    tokens[:, 0] = _V
    return tokens


def _by_torch(predictors: LinearPrediction, tokens: Tensor, cuts: Sequence[int]) -> tuple[Prediction, PredictionState]:
    (state,), parts = predictors.init_state(len(tokens), device="cpu"), []
    for part in tokens.split(list(cuts), dim=1):
        made, state = predictors.read(part, state)
        parts.append(made)
    return Prediction(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True))), state


def _by_kernel(predictors: LinearPrediction, tokens: Tensor) -> tuple[Prediction, PredictionState]:
    return read_rows(predictors, tokens, predictors.init_state(len(tokens), device="cpu")[0])


def test_kernel_equals_torch_however_the_stream_is_cut() -> None:
    predictors, tokens = _predictors(), _vowel(300)
    expected = _by_torch(predictors, tokens, [300])
    for cuts in ([300], [1, 30, 33, 64, 5, 167], [31, 1] * 9 + [12]):
        torch.testing.assert_close(_by_torch(predictors, tokens, cuts), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(_by_kernel(predictors, tokens), expected, atol=1e-9, rtol=0)


def test_resonances_are_widened() -> None:
    """Coefficient i of a filter is multiplied with the widening to the power of i, by torch and by the kernel."""
    tokens = _vowel(128)
    factors = 0.9 ** torch.arange(lp.ORDER, 0, -1, dtype=torch.float64)
    exact = _by_torch(_predictors(1.0), tokens, [128])[1].coefficients
    for _, state in (_by_torch(_predictors(0.9), tokens, [128]), _by_kernel(_predictors(0.9), tokens)):
        torch.testing.assert_close(state.coefficients, exact * factors, atol=1e-9, rtol=0)


def test_rows_at_different_places_in_their_blocks() -> None:
    predictors, tokens = _predictors(), _vowel(200)
    (state,) = predictors.init_state(3, device="cpu")
    states = [read_rows(predictors, tokens[:, :length], state)[1] for length in (7, 40, 64)]
    mixed = map_state(lambda *rows: torch.cat(rows), *(take_rows(each, [row]) for row, each in enumerate(states)))
    torch.testing.assert_close(predictors.read(tokens, mixed), read_rows(predictors, tokens, mixed), atol=1e-9, rtol=0)


def test_nothing_is_known_of_later_samples_or_of_other_rows() -> None:
    """To the bit: evaluation does not depend on what is scored side by side."""
    predictors, tokens = _predictors(), _vowel(200)
    changed = tokens.clone()
    changed[0, 150:] = 200 - changed[0, 150:].clamp(max=200)
    changed[1:] = _vowel(200, seed=5)[1:]
    expected, actual = _by_kernel(predictors, tokens)[0], _by_kernel(predictors, changed)[0]
    alone = _by_kernel(predictors, tokens[:1])[0]
    for before, after, single in zip(expected, actual, alone, strict=True):
        assert torch.equal(before[0, :150], after[0, :150]) and not torch.equal(before[0, 150:], after[0, 150:])
        assert torch.equal(before[:1], single)


def test_fit_is_burgs_on_weighted_samples() -> None:
    """The reflection coefficients from sums of products are those from the errors themselves."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(4 * lp.ORDER).cumsum() * 0.01
    decay = lp.FORGETTING[1]
    weights = decay ** np.arange(len(x) - 1, lp.ORDER - 1, -1)  # of the errors at times from ORDER on
    i = np.arange(lp.ORDER + 1)
    lagged = np.stack([x[lp.ORDER - lag : len(x) - lag] for lag in i])  # [P + 1, n]
    matrix = torch.from_numpy((lagged * weights) @ lagged.T)
    forward, backward, filter_ = lagged[0], lagged[1], np.eye(1, lp.ORDER + 1)[0]
    for order in range(1, lp.ORDER + 1):
        energy = (weights * (forward**2 + backward**2)).sum() + lp._NOISE
        reflection = 2 * (weights * forward * backward).sum() / energy
        assert abs(reflection) < 1
        filter_[: order + 1] -= reflection * filter_[: order + 1][::-1].copy()
        forward = filter_ @ lagged
        if order < lp.ORDER:  # the error of the same filter backwards, of the sample before
            backward = filter_[: order + 1][::-1] @ lagged[1 : order + 2]
    np.testing.assert_allclose(lp.lattice(matrix).numpy()[::-1], -filter_[1:], atol=1e-8)


def test_filters_are_stable() -> None:
    predictors = _predictors()
    loud = torch.randint(0, _V, (2, 400), generator=torch.Generator().manual_seed(1))
    square = torch.where(torch.arange(400) % 50 < 25, 5, 250).expand(2, -1)
    silent, sweep = torch.full((2, 400), _V // 2), (torch.arange(400) ** 2 % _V).expand(2, -1)
    for tokens in (loud, square, silent, sweep, _vowel(400, batch_size=2)):
        coefficients = _by_kernel(predictors, tokens)[1].coefficients.flatten(0, 1).numpy()
        assert np.isfinite(coefficients).all()
        for newest_last in coefficients:
            roots = np.roots([1, *-newest_last[::-1]])
            assert not len(roots) or np.abs(roots).max() < 1


def test_a_resonance_is_predicted() -> None:
    """After a tenth of a second the best filter's error is a small part of the signal."""
    predictors, tokens = _predictors(), _vowel(2400, batch_size=1)
    prediction, state = _by_kernel(predictors, tokens)
    x = torch.tensor(_CLASSES.values, dtype=torch.float64)[tokens[0, 1201:]]
    errors = x[:, None] - prediction.for_head[0, 1200:-1, : lp.NUM_PREDICTORS]
    assert (errors**2).mean(0).min() < 0.02 * (x**2).mean()
    assert state.steps.tolist() == [2400]


@pytest.mark.parametrize("quantiser", ["mu-law", "linear", "mu-law-floor", "linear-floor"])
def test_density_is_that_of_a_logistic_distribution(quantiser: str) -> None:
    """Logits of a new head, by scipy's formula; and their gradients by autograd's own graph."""
    from scipy.stats import logistic

    classes = classes_of({"kind": "audio", "quantiser": quantiser})
    assert list(classes.values) == sorted(classes.values)
    assert all(a < bound < b for a, bound, b in zip(classes.values, classes.bounds, classes.values[1:], strict=False))
    for end in (0, -1):  # it has its value in the middle
        assert classes.widths[end] == pytest.approx(2 * abs(classes.values[end] - classes.bounds[end]))
    head = PredictionHead(4, classes=classes).double()
    torch.nn.init.zeros_(head.projection.weight)
    expected, log_scale, log_width = [0.1, 0.1, 0.1], [-3.0, -3.0, -3.0], [-30.0]
    hidden = torch.tensor([[[0.0] * 4 + expected + log_scale + log_width]], dtype=torch.float64)
    scale = np.exp(-3.0 + float(head.projection.bias.detach()[-2]))
    density = logistic.logpdf(head.values.numpy(), loc=0.1, scale=scale) + np.log(classes.widths)
    np.testing.assert_allclose(head.logits(hidden)[0, 0].detach(), density, atol=1e-5)
    torch.nn.init.normal_(head.projection.weight, std=0.3)
    inputs = torch.randn(2, 3, 4 + lp.NUM_HEAD_INPUTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda hidden: head.logits(hidden)[..., ::40], inputs, atol=1e-6)


def test_other_tokens_have_no_classes() -> None:
    assert classes_of({"kind": "text"}) is None and classes_of({"kind": "audio", "quantiser": "cubic"}) is None


@pytest.mark.parametrize("surprise", [0, 6])  # how much smaller than the errors the scales are, in nats
def test_nll_by_the_kernel_is_that_by_torch(surprise: int) -> None:
    """In fp32 against fp64: the NLL, and the gradients of what a head reads and of its weights."""
    head = PredictionHead(8, classes=_CLASSES)
    torch.nn.init.normal_(head.projection.weight, std=0.2)
    exact = copy.deepcopy(head).double()
    prediction, _ = _by_kernel(_predictors(), _vowel(200))
    targets = _vowel(201)[:, 1:]
    hidden = torch.cat([torch.randn(3, 200, 8, dtype=torch.float64), prediction.for_head], dim=-1)
    hidden[..., -lp.NUM_PREDICTORS - 1 : -1] -= surprise
    grads = []
    for model, dtype in ((head, torch.float32), (exact, torch.float64)):
        inputs = hidden.to(dtype).requires_grad_()
        nll = model.nll(inputs, targets)
        (nll * torch.linspace(0.5, 1.5, 200, dtype=dtype)).sum().backward()
        grads.append((nll, inputs.grad[..., :8], model.projection.weight.grad, model.projection.bias.grad))
    torch.testing.assert_close(*grads, rtol=2e-3, atol=2e-3, check_dtype=False)


def test_a_loud_sample_after_silence_costs_no_thousands_of_nats() -> None:
    """As at the start of a piece that was cut out of speech, where a model of recordings expects silence."""
    head = PredictionHead(8, classes=_CLASSES)
    silence = [0.0] * 8 + [0.0] * lp.NUM_PREDICTORS + [-9.0] * lp.NUM_PREDICTORS + [float(head.log_widths.min())]
    nll = head.nll(torch.tensor(silence).expand(1, _V, -1), torch.arange(_V)[None])
    assert 0.9 * lp.FARTHEST < nll.max() < lp.FARTHEST + 5 and nll.min() < 3


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch 2.13
def test_no_slope_is_subnormal() -> None:
    """Far from what is expected a class has hardly any probability, and products with subnormal numbers are slow."""
    head = PredictionHead(8, classes=_CLASSES)
    seen: list[Tensor] = []
    head.projection.register_full_backward_pre_hook(lambda _module, slopes: seen.append(slopes[0]))
    expected = torch.tensor([0.02, 0.02, 0.02, -4.5, -4.5, -4.5, -6.0]).expand(3, 50, -1)
    head.nll(torch.cat([torch.randn(3, 50, 8), expected], dim=-1), _vowel(50) % _V).mean().backward()
    assert not ((seen[0] != 0) & (seen[0].abs() < torch.finfo(torch.float32).tiny)).any()


def test_the_predictors_alone_know_most_of_a_resonance(tmp_path: Path) -> None:
    """Without training, far below what the frequencies of classes tell; and more where state is kept, as a run's is."""
    tokens = write_utterances(tmp_path / "a.shard", [_vowel(2401, batch_size=1)[0, 1:].numpy()], vocab_size=_V)
    config = {"dataset": {"modality": {"kind": "audio"}}, "train": {"chunk": 200}}
    run = SimpleNamespace(config=config, window=40)
    results = {name: Evaluation(tokens.names, np.ones(1), np.ones(1), name) for name in ("utterance", "chunk")}
    by_protocol = {name: linear_prediction_nats(run, tokens, result) for name, result in results.items()}
    unigram = unigram_nll(tokens.counts, tokens.counts)
    assert by_protocol["utterance"] < by_protocol["chunk"] - 0.2 < unigram - 1.2
    two = write_utterances(
        tmp_path / "b.shard", [tokens.read(0, start=0, stop=2400), np.arange(99) * 41 % _V], vocab_size=_V
    )
    of_one = linear_prediction_nats(run, two, results["utterance"])  # the other was not scored
    assert of_one == pytest.approx(by_protocol["utterance"])
    text = {**config, "dataset": {"modality": {"kind": "text"}}}
    assert linear_prediction_nats(SimpleNamespace(config=text), tokens, results["chunk"]) is None


def test_a_model_draws_what_its_predictors_know_alone() -> None:
    fields = {"num_stacks": 1, "layers_per_stack": 1, "residual_channels": 8, "gate_channels": 8, "skip_channels": 8}
    model = randomise(build("wavenet", vocab_size=_V, prediction="linear", classes=_CLASSES, **fields), std=1.0).float()
    tokens, nll = _vowel(200), []
    for each in (model, predictors_alone_of(model), PredictorsAlone(_CLASSES)):
        step = each(tokens[:, :-1], each.init_state(len(tokens)))
        nll.append(each.head.nll(step.hidden, tokens[:, 1:]).detach())
    assert (nll[0] - nll[2]).abs().max() > 1
    torch.testing.assert_close(nll[1], nll[2])
