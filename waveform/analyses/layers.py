"""Attention by position and compression loss by layer (Rae et al. 2019, Figures 2 and 6), from one pass over the data.

Shape letters: P pieces, L layers, K slots, C compressed slots, M memory slots, W window.

The data is cut into pieces of equal length, each read from an empty state: windows are skipped until all memories are
full, and then every window is looked at. Windows of one stream resemble each other, so one observation is a piece, not
a window: standard errors are over the means of pieces.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from waveform.analyses.hooks import attending, observe_attention, observe_compression_loss, read_once
from waveform.engine.token_set import TokenSet
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.runs.opened import TrainedRun
from waveform.system.errors import UserError

DEFAULT_TOKENS = 200_000  # read at most, if a user does not say
NUM_BUCKETS = 6  # of each region, as in Figure 2
REGIONS = ("compressed", "memory", "window")
_MIN_WINDOWS = 4  # looked at per piece; with fewer, nearly all of the work would be filling the memories


@dataclass(frozen=True)
class LayerObservations:
    """What was seen in P pieces, each value a mean over the piece's windows."""

    received: np.ndarray  # [P, L, K] weight that a slot receives, mean over all queries of a window; sums to one over K
    losses: np.ndarray | None  # [P, L] compression loss; None if the model computes none
    num_windows: int  # looked at per piece
    full_after: int  # tokens after which all memories are full
    slots: dict[str, int]  # region -> slots, in the order of K
    reach: int  # steps that a query sees, itself included


def observe_layers(
    run: TrainedRun, tokens: TokenSet, *, max_tokens: int, show_progress: bool
) -> LayerObservations | str:
    """Look at windows with full memories in pieces spread evenly over `tokens`, reading at most `max_tokens`.

    Returns one line if the model or the data has nothing to look at. Raises UserError if max_tokens does not even fill
    the memories.
    """
    if isinstance(model := attending(run), str):
        return model
    config = model.config
    lead = config.steps_to_full
    num_windows = max(_MIN_WINDOWS, lead // config.window)
    longest = max(tokens.lengths, default=0)
    num_windows = min(num_windows, (min(max_tokens, longest) - lead) // config.window)
    if max_tokens < lead + config.window:
        raise UserError(
            f"--tokens {max_tokens} is too few: filling the memories takes {lead}; give at least {lead + config.window}"
        )
    if num_windows < 1:
        return f"no utterance is long enough: memories are full after {lead} tokens, and the longest has {longest}"
    length = lead + num_windows * config.window
    pieces, order = whole_pieces(tokens, length, at_most=max_tokens // length)
    slots = dict(zip(REGIONS, (config.compressed, config.memory, config.window), strict=True))
    received = np.zeros((len(order), config.num_layers, sum(slots.values())))
    losses = np.zeros((len(order), config.num_layers))
    num_losses = 0
    seen_received: list[Tensor] = []
    seen_losses: list[Tensor] = []

    def see_attention(layer: int, attention: RelativeAttention, attended: AttentionOutput, slots: Slots) -> None:
        seen_received.append(attention.received_attention(attended, slots).cpu().double())

    def see_loss(layer: int, loss: Tensor) -> None:
        seen_losses.append(loss.cpu().double())

    place = {utterance: i for i, utterance in enumerate(order)}
    # A run's parameters require no gradient, but models compute the losses only if gradients are enabled.
    with torch.enable_grad(), observe_attention(model, see_attention), observe_compression_loss(model, see_loss):
        for dealt, _ in read_once(run, pieces, order, what="layers of", show_progress=show_progress):
            if dealt.start >= lead:
                at = [place[utterance] for utterance in dealt.utterances]
                received[at] += torch.stack(seen_received, dim=1).numpy() / (config.window * num_windows)
                if seen_losses:
                    losses[at] += torch.stack(seen_losses, dim=1).numpy() / num_windows
                    num_losses += len(at)
            seen_received.clear()
            seen_losses.clear()
    assert num_losses in (0, num_windows * len(order))
    return LayerObservations(received, losses if num_losses else None, num_windows, lead, slots, model.receptive_field)


def whole_pieces(tokens: TokenSet, length: int, *, at_most: int) -> tuple[TokenSet, list[int]]:
    """Cut `tokens` into pieces; also return which to read: at most `at_most` of `length` tokens, spread evenly."""
    pieces = tokens.cut(length)
    whole = [i for i, n in enumerate(pieces.lengths) if n == length]
    return pieces, [whole[int(i)] for i in np.linspace(0, len(whole) - 1, min(len(whole), at_most))]


def in_buckets(values: np.ndarray, *, num_buckets: int = NUM_BUCKETS) -> np.ndarray:
    """Sum `values` [..., n] over equal parts [..., num_buckets]; a slot on an edge is shared in proportion."""
    cumulative = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
    edges = np.linspace(0, values.shape[-1], num_buckets + 1)
    below = np.minimum(edges.astype(int), values.shape[-1] - 1)
    share = edges - below
    at_edges = (1 - share) * cumulative[..., below] + share * cumulative[..., below + 1]
    return np.diff(at_edges, axis=-1)


def mean_and_error(values: np.ndarray) -> tuple[list[Any], list[Any] | None]:
    """Return the mean over the first axis and its standard error, which is None for a single observation."""
    error = values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return values.mean(axis=0).tolist(), None if error is None else error.tolist()


def attention_by_position(observed: LayerObservations | str) -> dict[str, Any]:
    """Return the average attention by bucket, oldest first, of each region that the model has: Figure 2, and by layer.

    weight: the share of an average query's attention that a bucket receives. As in the paper the average is over all
    queries of the window, so all buckets of all regions sum to one. A query sees no slot of the window after its own,
    which lowers the window's last buckets for any model. weight_per_slot is the average over pairs of a query and a
    slot that it sees, comparable between buckets and between regions. observed: a line if there was nothing to see.
    """
    if isinstance(observed, str):
        return {"absent": observed}
    figures: dict[str, Any] = {
        "num_pieces": len(observed.received),
        "num_windows": len(observed.received) * observed.num_windows,
        "full_after_tokens": observed.full_after,
        "buckets": "equal parts of a region, oldest first; standard errors are over pieces",
        "regions": {},
        "by_layer": [{} for _ in range(observed.received.shape[1])],
    }
    window = observed.slots["window"]
    first = 0
    for region, num_slots in observed.slots.items():
        received = observed.received[:, :, first : first + num_slots]
        first += num_slots
        if not num_slots:
            continue
        # Share of a window's queries that see each slot: slot j of the window is seen by query j and later ones.
        times = np.arange(num_slots) - (0 if region == "window" else num_slots)
        seen = (np.minimum(times + observed.reach, window) - np.maximum(times, 0)).clip(0) / window
        weight = in_buckets(received)  # [P, L, 6]
        by_slot = weight / in_buckets(seen).clip(1e-12)  # what no query sees has no weight
        figures["regions"][region] = _of_region(num_slots, weight.mean(axis=1), by_slot.mean(axis=1))
        for i, layer in enumerate(figures["by_layer"]):
            layer[region] = _of_region(num_slots, weight[:, i], by_slot[:, i])
    return figures


def _of_region(num_slots: int, weight: np.ndarray, by_slot: np.ndarray) -> dict[str, Any]:
    """Figures from the values [P, 6] of all layers together, or of one."""
    figures: dict[str, Any] = {"slots": num_slots}
    for name, values in {"weight": weight, "weight_per_slot": by_slot}.items():
        figures[name], figures[f"{name}_standard_error"] = mean_and_error(values)
    return figures


def compression_loss_by_layer(observed: LayerObservations | str, *, kind: str) -> dict[str, Any]:
    """Return the mean compression loss of each layer, first to last, with standard errors over pieces: Figure 6.

    kind: the loss that the model trains. If the model computes none, the figures say why.
    """
    if isinstance(observed, str):
        return {"absent": observed}
    if observed.losses is None:
        return {"absent": "the model has no compressor that learns from its own loss"}
    mean, error = mean_and_error(observed.losses)
    return {"loss": kind, "mean": mean, "standard_error": error, "num_pieces": len(observed.losses)}
