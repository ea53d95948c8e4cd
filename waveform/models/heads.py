"""Output heads: from hidden vectors to a distribution over the vocabulary.

Shape letters: B rows, T steps, N = B T, D model width, V classes, K clusters after the first, n_i classes and d_i
width of cluster i.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.engine.sound_classes import SoundClasses
from waveform.models.attention import VECTOR
from waveform.models.embeddings import AdaptiveEmbedding, random_projection
from waveform.models.initial_values import INIT_STD
from waveform.models.linear_prediction import (
    FARTHEST,
    LOG_LEAST_SCALE,
    NUM_DENSITY_OUTPUTS,
    NUM_HEAD_INPUTS,
    NUM_PREDICTORS,
)
from waveform.models.model_config import LargeVocabularyConfig
from waveform.system.linear_layers import Linear, linear


class SoftmaxHead(nn.Module):
    """A linear layer and a softmax."""

    def __init__(self, d_model: int, *, vocab_size: int) -> None:
        super().__init__()
        self.projection = Linear(d_model, vocab_size)
        nn.init.normal_(self.projection.weight, std=INIT_STD)
        nn.init.zeros_(self.projection.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] -> logits [B, T, V]."""
        return self.projection(hidden)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, T, D], targets [B, T] -> NLL in nats [B, T], computed in at least fp32."""
        logits = _at_least_fp32(self.logits(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


class AdaptiveSoftmaxHead(nn.Module):
    """A softmax over frequent classes and clusters of rare ones; each cluster is a narrower softmax.

    Grave et al. 2017, like torch.nn.AdaptiveLogSoftmaxWithLoss, but with a bias for every class, and optionally with
    the tables and projections of the input embedding (Baevski and Auli 2018; Dai et al. 2019). Without cutoffs it is
    a plain softmax. Classes are ranks by frequency, cut at `cutoffs`.
    """

    def __init__(
        self,
        d_model: int,
        config: LargeVocabularyConfig,
        *,
        project_first: bool = False,
        tied_to: AdaptiveEmbedding | None = None,
    ) -> None:
        """`tied_to` must be made from the same config. `project_first`: project the first cluster by its own matrix."""
        super().__init__()
        self.bounds = [0, *config.cutoffs, config.vocab_size]
        self.num_tails = len(config.cutoffs)
        # A tuple keeps the embedding from being a submodule too: its parameters belong to the model once.
        self._tied = (tied_to,) if tied_to is not None else ()
        if tied_to is None:
            own = AdaptiveEmbedding(d_model, config)
            self.tables = own.tables
            self.projections = own.projections
        self.first_projection = random_projection(d_model, d_model) if project_first else None
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(b - a)) for a, b in pairwise(self.bounds))
        if self.num_tails:
            self.cluster_weight = nn.Parameter(INIT_STD * torch.randn(self.num_tails, d_model))
            # The classes of a cluster are rare, but the cluster is not: it starts with the share that Zipf's law gives.
            shares = [math.log1p(b) - math.log1p(a) for a, b in pairwise(self.bounds)]
            by_share = [math.log(share / shares[0] * self.bounds[1]) for share in shares[1:]]
            self.cluster_bias = nn.Parameter(torch.tensor(by_share))

    def _tables(self) -> tuple[nn.ParameterList, nn.ParameterList]:
        """Class vectors [n_i, d_i] of every cluster, and projections [D, d_i] of all but the first."""
        owner = self._tied[0] if self._tied else self
        return owner.tables, owner.projections

    def _first_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., n_0 + K] of the frequent classes and of the clusters of rare ones."""
        tables, _ = self._tables()
        weight, bias = tables[0], self.biases[0]
        if self.num_tails:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        if self.first_projection is not None:
            hidden = linear(hidden, self.first_projection.t())
        return _at_least_fp32(linear(hidden, weight, bias))

    def _tail_logits(self, hidden: Tensor, tail: int) -> Tensor:
        """hidden [..., D] -> logits [..., n_i] within cluster `tail`, from 1."""
        tables, projections = self._tables()
        narrow = linear(hidden, projections[tail - 1].t())
        return _at_least_fp32(linear(narrow, tables[tail], self.biases[tail]))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] -> log-probabilities [B, T, V]; dense, for sampling."""
        first = self._first_logits(hidden).log_softmax(dim=-1)
        num_frequent = self.bounds[1]
        parts = [first[..., :num_frequent]]
        for tail in range(1, self.num_tails + 1):
            within = self._tail_logits(hidden, tail).log_softmax(dim=-1)
            parts.append(first[..., num_frequent + tail - 1 : num_frequent + tail] + within)
        return torch.cat(parts, dim=-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, T, D], targets [B, T] -> NLL in nats [B, T], computed in at least fp32.

        A cluster's logits are computed only for the targets in it: nothing here is [B, T, V].
        """
        hidden_ND, target_N = hidden.flatten(0, 1), targets.flatten()
        num_frequent = self.bounds[1]
        tail_N = torch.zeros_like(target_N)
        for bound in self.bounds[1:-1]:
            tail_N = tail_N + (target_N >= bound)
        in_first = torch.where(target_N < num_frequent, target_N, num_frequent - 1 + tail_N)
        nll_N = F.cross_entropy(self._first_logits(hidden_ND), in_first, reduction="none")
        for tail in range(1, self.num_tails + 1):
            # Even without a target in it, so that its gradient is zero, not absent, on any number of processes.
            chosen = (tail_N == tail).nonzero()[:, 0]
            within = target_N[chosen] - self.bounds[tail]
            logits = self._tail_logits(hidden_ND[chosen], tail)
            nll_N = nll_N.index_add(0, chosen, F.cross_entropy(logits, within, reduction="none"))
        return nll_N.view(targets.shape)


class PredictionHead(SoftmaxHead):
    """A softmax over the network's own logits plus w times the log of a logistic density around what is expected.

    The network also gives the weights by which expectations and log scales of the predictors are averaged, a shift of
    the centre in units of the scale, a factor of the scale, and w. At first its own logits are zero: the model is the
    predictors alone.
    """

    def __init__(self, d_model: int, *, classes: SoundClasses) -> None:
        super().__init__(d_model, vocab_size=len(classes.values) + NUM_DENSITY_OUTPUTS)
        self.num_classes = len(classes.values)
        with torch.no_grad():
            self.projection.weight[: self.num_classes] = 0
            self.projection.bias[-3:] = torch.tensor([1.0, -0.8, 0.0])  # w, log scale, shift
        self.register_buffer("values", torch.tensor(classes.values), persistent=False)
        self.register_buffer("log_widths", torch.from_numpy(np.log(classes.widths)).float(), persistent=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D + NUM_HEAD_INPUTS] -> logits [B, T, V], in at least fp32."""
        k = NUM_PREDICTORS
        expected, log_scale, log_width = hidden[..., -NUM_HEAD_INPUTS:].split([k, k, 1], dim=-1)
        own = self.projection(hidden[..., :-NUM_HEAD_INPUTS]).to(hidden.dtype)
        own, mix, weight, factor, shift = own.split([self.num_classes, k, 1, 1, 1], dim=-1)
        mix = mix.softmax(dim=-1)
        log_scale = (mix * log_scale).sum(dim=-1, keepdim=True) + factor
        log_scale = torch.logaddexp(2 * log_scale, 2 * (log_width + LOG_LEAST_SCALE)) / 2
        centre = (mix * expected).sum(dim=-1, keepdim=True) + shift * log_scale.exp()
        z = (self.values - centre) * (-log_scale).exp()
        log_logistic = (2 * F.logsigmoid(z) - z).clamp(min=-FARTHEST)
        return own + weight * (log_logistic - log_scale + self.log_widths)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As `SoftmaxHead.nll`; by kernels in fp32 on a CPU."""
        on_cpu = hidden.device.type == "cpu" and hidden.dtype == torch.float32 and not self.num_classes % VECTOR
        if not on_cpu or is_in_torch_dispatch_mode():  # a FLOP counter would not see kernels
            return super().nll(hidden, targets)
        from waveform.kernels.density import PredictedNll  # here, to load numba only if it is used

        y = self.projection(hidden[..., :-NUM_HEAD_INPUTS]).flatten(0, 1).float().contiguous()
        expected = hidden[..., -NUM_HEAD_INPUTS:].detach().flatten(0, 1).contiguous()
        return PredictedNll.apply(y, expected, targets.flatten(), self.values, self.log_widths).view(targets.shape)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def output_head(
    d_model: int, config: LargeVocabularyConfig, *, embedding: nn.Module, project_first: bool = False
) -> SoftmaxHead | AdaptiveSoftmaxHead:
    """The head of `config`, with the tables of the model's embedding if the two share them."""
    if config.predicted_classes is not None:
        return PredictionHead(d_model, classes=config.predicted_classes)
    if not config.cutoffs and not config.tie_embeddings:
        return SoftmaxHead(d_model, vocab_size=config.vocab_size)
    assert isinstance(embedding, AdaptiveEmbedding)
    tied_to = embedding if config.tie_embeddings else None
    return AdaptiveSoftmaxHead(d_model, config, project_first=project_first, tied_to=tied_to)
