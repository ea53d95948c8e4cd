"""NLL over the course of an utterance, by the tokens since its start: whether longer memory helps later on.

Shape letters: N utterances, J bins of places, B rows, W tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from waveform.analyses.hooks import read_once
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.runs.opened import TrainedRun
from waveform.runs.statistics import interval_over_utterances

_RESAMPLES = 2_000  # of the bootstrap, for each bin


@dataclass(frozen=True)
class NllByPlace:
    """Sums of NLL by utterance and by place in it."""

    edges: Sequence[int]  # [J + 1] tokens since the utterance's start; bin j has places edges[j] to edges[j + 1] - 1
    nats: np.ndarray  # [N, J] fp64
    counts: np.ndarray  # [N, J] int64: tokens; 0 where the utterance has ended or was left out

    def figures(self) -> dict[str, Any]:
        """The mean of each bin in nats per token, and its 95% interval by the bootstrap over utterances, as JSON."""
        means, intervals = [], []
        for in_bin, counts in zip(self.nats.T, self.counts.T, strict=True):
            there = counts > 0
            means.append(float(in_bin.sum() / counts.sum()))
            intervals.append(interval_over_utterances(in_bin[there], counts[there], resamples=_RESAMPLES))
        return {
            "edges": list(self.edges),
            "nats": means,
            "interval_95": intervals,
            "num_utterances": (self.counts > 0).sum(axis=0).tolist(),
        }

    def minus(self, other: "NllByPlace") -> "NllByPlace":
        """NLL - NLL(other) of the same tokens, paired by utterance: how hard the places are to predict cancels out."""
        assert np.array_equal(self.counts, other.counts) and list(self.edges) == list(other.edges)
        return NllByPlace(self.edges, self.nats - other.nats, self.counts)


def _fitting(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Those utterances of `order` that fit into `max_tokens` together, or the shortest if none does."""
    chosen, left = [], max_tokens
    for index in order:
        if lengths[index] <= left:
            chosen.append(index)
            left -= lengths[index]
    return chosen or [order[-1]]


@torch.inference_mode()
def nll_by_place(
    run: TrainedRun, tokens: TokenSet, *, first: int, max_tokens: int | None, chunk: int | None = None, world: World
) -> NllByPlace:
    """Score utterances, each from a fresh state, and sum by place; bins double in length from `first` tokens on.

    max_tokens: at most how many to score, longest utterances first, leaving out those that are longer than what
    remains; None: all. chunk: tokens after which state is reset within an utterance too; None: it is not. Each rank of
    `world` scores a share of the utterances, and every rank gets the whole result.
    """
    order = sorted(range(len(tokens)), key=lambda i: (-tokens.lengths[i], i))
    if max_tokens is not None:
        order = _fitting(order, tokens.lengths, max_tokens)
    longest, edges = max(tokens.lengths[i] for i in order), [0, first]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    nats, counts = np.zeros((len(tokens), len(edges) - 1)), np.zeros((len(tokens), len(edges) - 1), dtype=np.int64)
    own = order[world.rank :: world.size]
    for dealt, scores in read_once(run, tokens, own, what="evaluate", show_progress=world.shows, chunk=chunk):
        bins = np.searchsorted(edges, dealt.start + np.arange(run.window), side="right") - 1
        scored = dealt.window.scored.numpy()  # [B, W]
        nll = np.where(scored, scores.nll.double().cpu().numpy(), 0)
        for j in np.unique(bins[: scored.sum(axis=1).max()]):
            nats[dealt.utterances, j] += nll[:, bins == j].sum(axis=1)
            counts[dealt.utterances, j] += scored[:, bins == j].sum(axis=1)
    for sums in (nats, counts):
        world.sum_(torch.from_numpy(sums))  # in place
    return NllByPlace(edges, nats, counts)
