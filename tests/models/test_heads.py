"""Heads and embeddings of large vocabularies, against torch's own adaptive softmax and plain loops, at fp64."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import laws
from waveform.models.embeddings import AdaptiveEmbedding
from waveform.models.heads import AdaptiveSoftmaxHead
from waveform.models.model_config import LargeVocabularyConfig
from waveform.models.registry import build
from waveform.system.errors import UserError

V, D, CUTOFFS, DIV = 50, 16, [8, 20, 35], 2


def config(cutoffs: list[int], *, vocab_size: int = V) -> LargeVocabularyConfig:
    head = "adaptive" if cutoffs else "softmax"
    return LargeVocabularyConfig(vocab_size, head=head, cutoffs=cutoffs, div_value=DIV)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    targets = torch.randint(0, V, (4, 25))
    targets[0, :4] = torch.tensor([0, 8, 20, 49])  # every cluster
    return torch.randn(4, 25, D, dtype=torch.float64), targets


def as_torch(head: AdaptiveSoftmaxHead) -> nn.AdaptiveLogSoftmaxWithLoss:
    """torch's module with the weights of `head`, whose tails must have no bias."""
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, V, CUTOFFS, div_value=DIV, head_bias=True).double()
    tables, projections = head._tables()
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat([tables[0], head.cluster_weight]))
        theirs.head.bias.copy_(torch.cat([head.biases[0], head.cluster_bias]))
        for i in range(len(CUTOFFS)):
            theirs.tail[i][0].weight.copy_(projections[i].t())
            theirs.tail[i][1].weight.copy_(tables[i + 1])
    return theirs


@pytest.mark.parametrize("tied", [False, True])
def test_adaptive_head_equals_torchs(tied: bool) -> None:
    embedding = laws.randomise(AdaptiveEmbedding(D, config(CUTOFFS))) if tied else None
    head = laws.randomise(AdaptiveSoftmaxHead(D, config(CUTOFFS), tied_to=embedding))
    with torch.no_grad():
        for bias in list(head.biases)[1:]:
            bias.zero_()
    theirs = as_torch(head)
    hidden, targets = batch()
    expected = -theirs(hidden.flatten(0, 1), targets.flatten()).output.view(targets.shape)
    torch.testing.assert_close(head.nll(hidden, targets), expected, atol=1e-12, rtol=0)
    log_p = theirs.log_prob(hidden.flatten(0, 1)).view(4, 25, V)
    torch.testing.assert_close(head.logits(hidden), log_p, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cutoffs", [CUTOFFS, []])
@pytest.mark.parametrize("project_first", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_nll_are_those_of_the_formula(tied: bool, project_first: bool, cutoffs: list[int]) -> None:
    """With biases in every cluster, which torch's has not, and gradients."""
    embedding = laws.randomise(AdaptiveEmbedding(D, config(cutoffs), project_first=project_first))
    tied_to = embedding if tied else None
    head = laws.randomise(AdaptiveSoftmaxHead(D, config(cutoffs), project_first=project_first, tied_to=tied_to))
    tables, projections = head._tables()
    assert (tables is embedding.tables) == tied
    hidden, targets = batch()
    parameters = [hidden.requires_grad_(), *head.parameters()]
    table, bias = tables[0], head.biases[0]
    if cutoffs:
        table, bias = torch.cat([table, head.cluster_weight]), torch.cat([bias, head.cluster_bias])
    first = ((hidden @ head.first_projection if project_first else hidden) @ table.T + bias).log_softmax(-1)
    parts = [first[..., : cutoffs[0] if cutoffs else V]]
    for i, projection in enumerate(projections):
        within = (hidden @ projection) @ tables[i + 1].T + head.biases[i + 1]
        parts.append(within.log_softmax(-1) + first[..., cutoffs[0] + i, None])
    expected = torch.cat(parts, -1)
    torch.testing.assert_close(head.logits(hidden), expected, atol=1e-12, rtol=0)
    nll, weight = -expected.gather(-1, targets[..., None])[..., 0], torch.randn(targets.shape)
    torch.testing.assert_close(head.nll(hidden, targets), nll, atol=1e-12, rtol=0)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), parameters) for x in (head.nll(hidden, targets), nll))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


class LargestResult(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_dense_logits_in_nll() -> None:
    """Neither forward nor backward makes a tensor with a place for every token and class."""
    num_tokens, vocab_size = 120, 1000
    head = AdaptiveSoftmaxHead(D, config([4, 30], vocab_size=vocab_size))
    targets = torch.full((3, num_tokens // 3), 2)
    targets[0, 0] = 400
    with LargestResult() as largest:
        head.nll(torch.randn(3, num_tokens // 3, D), targets).sum().backward()
    assert 0 < largest.numel < num_tokens * vocab_size / 4


def test_cluster_begins_with_its_share() -> None:
    """At hidden = 0 a cluster is as likely as Zipf's law says, so rare words do not start as nearly impossible."""
    head = AdaptiveSoftmaxHead(D, config([100], vocab_size=1000))
    p = head.logits(torch.zeros(1, 1, D)).exp()[0, 0]
    assert p.sum().item() == pytest.approx(1, abs=1e-4)
    harmonic = 1 / torch.arange(1, 1001, dtype=torch.float64)
    assert p[100:].sum().item() == pytest.approx((harmonic[100:].sum() / harmonic.sum()).item(), abs=0.03)


@pytest.mark.parametrize("cutoffs", [CUTOFFS, []])
@pytest.mark.parametrize("project_first", [False, True])
def test_adaptive_embedding_equals_a_loop(project_first: bool, cutoffs: list[int]) -> None:
    embedding = laws.randomise(AdaptiveEmbedding(D, config(cutoffs), scale=3.0, project_first=project_first))
    tokens = torch.arange(V + 1).view(3, -1)
    actual = embedding(tokens).flatten(0, 1)
    for cluster, (first, last) in enumerate(pairwise([0, *cutoffs, V])):
        for token in range(first, last):
            expected = embedding.tables[cluster][token - first]
            assert len(expected) == D // DIV**cluster
            if cluster or project_first:
                expected = (embedding.projections[cluster - 1] if cluster else embedding.first_projection) @ expected
            laws.assert_same(actual[token], 3 * expected, atol=1e-12)
    torch.testing.assert_close(actual[V], embedding.begin)


def test_tied_tables_are_one_parameter_and_survive_a_copy() -> None:
    sizes = {"num_layers": 1, "d_model": D, "num_heads": 2, "d_feedforward": 16, "window": 4, "memory": 4}
    tied = {"head": "adaptive", "cutoffs": CUTOFFS, "div_value": DIV, "tie_embeddings": True}
    model: Any = build("transformer_xl", vocab_size=V, **sizes, **tied)
    assert not [name for name, _ in model.named_parameters() if name.startswith(("head.tables", "head.projections"))]
    storages = [tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()]
    assert len(set(storages)) == len(storages), "a checkpoint must not hold a tensor twice"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.embedding.tables[0].zero_()
    hidden, targets = batch()
    assert not torch.equal(twin.head.nll(hidden.float(), targets), model.head.nll(hidden.float(), targets))
    assert twin.head._tables()[0][0] is twin.embedding.tables[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head": "adaptive"}, "head=adaptive needs some"),
        ({"cutoffs": [3]}, "softmax takes none"),
        ({"head": "adaptive", "cutoffs": [3, 3]}, "must rise"),
        ({"head": "adaptive", "cutoffs": [0, 3]}, "must rise"),
        ({"head": "adaptive", "cutoffs": [50]}, "below the vocabulary of 50"),
        ({"head": "hierarchical"}, "choose softmax or adaptive"),
        ({"dropout": 1.0}, "model.dropout is 1.0"),
    ],
)
@pytest.mark.parametrize("model", ["transformer_xl", "compressive_transformer", "lstm"])
def test_fields_that_do_not_fit_are_refused(model: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(model, vocab_size=V, **fields)
