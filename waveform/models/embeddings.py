"""Input embeddings whose width falls with a token's rank (adaptive inputs; Baevski and Auli 2018).

Shape letters: D model width, V tokens, n_i tokens and d_i width of cluster i.

Token ids are ranks by frequency: 0 is the most frequent. Cluster i holds the ids from one cutoff to the next and
embeds them with d_i = D / div_value^i numbers, projected to D.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.models.initial_values import INIT_STD
from waveform.models.model_config import LargeVocabularyConfig


class AdaptiveEmbedding(nn.Module):
    """Vectors of tokens 0..V - 1 in clusters by frequency, and a separate one for begin-of-utterance, V.

    Without cutoffs it is one table of width D. `scale` multiplies the vectors of tokens: if the tables are tied to an
    output head, they must be small for its sake, and sqrt(D) makes them large enough as inputs (Vaswani et al. 2017,
    section 3.4). `project_first`: the first cluster is projected too, although it is D wide (Dai et al. 2019's code).
    """

    def __init__(
        self,
        d_model: int,
        config: LargeVocabularyConfig,
        *,
        project_first: bool = False,
        std: float = INIT_STD,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.scale = config.vocab_size, scale
        self.bounds = [0, *config.cutoffs, config.vocab_size]
        widths = [max(1, d_model // config.div_value**i) for i in range(len(self.bounds) - 1)]
        sizes = [b - a for a, b in pairwise(self.bounds)]
        self.tables = nn.ParameterList(
            nn.Parameter(std * torch.randn(n, width)) for n, width in zip(sizes, widths, strict=True)
        )
        self.projections = nn.ParameterList(random_projection(d_model, width) for width in widths[1:])
        self.first_projection = random_projection(d_model, d_model) if project_first else None
        self.begin = nn.Parameter(std * scale * torch.randn(d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] in 0..V -> vectors [..., D].

        Every token is looked up in every cluster and the right vector is kept: cheaper than waiting for a GPU to count
        each cluster's tokens, because the later clusters are narrow.
        """
        vectors = self._look_up(0, tokens)
        for i in range(1, len(self.tables)):
            vectors = torch.where((tokens >= self.bounds[i])[..., None], self._look_up(i, tokens), vectors)
        if self.scale != 1:
            vectors = vectors * self.scale
        return torch.where((tokens == self.vocab_size)[..., None], self.begin, vectors)

    def _look_up(self, cluster: int, tokens: Tensor) -> Tensor:
        """Vectors [..., D] of `tokens`; a token outside the cluster gets the vector of the nearest one in it."""
        first, stop = self.bounds[cluster], self.bounds[cluster + 1]
        vectors = F.embedding(tokens.clamp(first, stop - 1) - first, self.tables[cluster])
        projection = self.projections[cluster - 1] if cluster else self.first_projection
        return vectors if projection is None else F.linear(vectors, projection)


class RectifiedEmbedding(nn.Embedding):
    """ReLU of a token's vector and a bias: a linear layer on one-hot vectors, as in the authors' own code."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.bias = nn.Parameter(torch.zeros(embedding_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> vectors [..., D]."""
        return F.relu(super().forward(tokens) + self.bias)


def random_projection(d_model: int, width: int) -> nn.Parameter:
    """[D, d_i] of a cluster, scaled so that the vectors of all clusters are equally long."""
    return nn.Parameter(torch.randn(d_model, width) / math.sqrt(width))


def token_embedding(
    d_model: int, config: LargeVocabularyConfig, *, std: float, project_first: bool = False, rectified: bool = False
) -> nn.Module:
    """The input embedding that goes with a head of `config`. A plain one is left for the model to initialise.

    std: of vectors that are not shared with a head; rectified: see RectifiedEmbedding.
    """
    if not config.cutoffs and not config.tie_embeddings:
        return (RectifiedEmbedding if rectified else nn.Embedding)(config.vocab_size + 1, d_model)
    return AdaptiveEmbedding(
        d_model,
        config,
        project_first=project_first,
        std=INIT_STD if config.tie_embeddings else std,
        scale=math.sqrt(d_model) if config.tie_embeddings else 1.0,
    )
