"""Where each head attends, and which terms of its score send it there (Dai et al. 2019, appendix D, Figures 5 to 7).

The score of a query and a slot has four terms (section 3.3): by content (a), by position, depending on the query's
content (b), a bias for some contents (c) and one for some positions (d). Each term is shown by the softmax of it alone.

Only windows with full memories are looked at: the last one of each of several pieces of the data.

Shape letters: B rows, L layers, H heads, T queries, K slots, N buckets of distance.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from waveform.analyses.hooks import attending, observe_attention, read_once
from waveform.analyses.layers import REGIONS, in_buckets, whole_pieces
from waveform.engine.interface import wide
from waveform.engine.token_set import TokenSet
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots, softmax_of_visible
from waveform.runs.opened import TrainedRun

TERMS = {
    "a": "content-based addressing",
    "b": "content-dependent positional bias",
    "c": "global content bias",
    "d": "global positional bias",
}
ALL_TERMS = "all"
MOST_BUCKETS = 64  # of distance, and columns of a head's picture
_MOST_WINDOWS = 32  # looked at: a head's average hardly moves after that
_MOST_WEIGHTS = 2**24  # of one layer that are held at a time, unless a single row has more
_NUM_WIDEST = 3  # heads shown one query at a time, as in Figure 6
_NUM_TARGETS = 16  # queries shown of each of these heads


@torch.no_grad()
def score_terms(attention: RelativeAttention, attended: AttentionOutput, slots: Slots) -> dict[str, Tensor]:
    """Terms of all scores, each [B, H, T, K], by their letter in the paper; one that is zero everywhere is left out.

    A score is affine in its query, so a query of zeros gives the terms that do not depend on it, (c) and (d).
    """
    q_BHTd, k_BHKd = attended.queries, attended.keys
    nothing = torch.zeros_like(q_BHTd)
    c, d = attention.content_logits(nothing, k_BHKd), attention.position_logits(nothing, slots)
    a, b = attention.content_logits(q_BHTd, k_BHKd) - c, attention.position_logits(q_BHTd, slots) - d
    scale = q_BHTd.shape[-1] ** -0.5
    return {letter: term * scale for letter, term in zip(TERMS, (a, b, c, d), strict=True) if term.any()}


def attention_by_head(run: TrainedRun, tokens: TokenSet, *, max_tokens: int, show_progress: bool) -> dict[str, Any]:
    """Return the average distribution of each head over distances, of all terms and of each alone.

    weight [L][H][N]: share of an average query's attention, by bucket of distance, nearest first; sums to one over N.
    share [L][H] by region: of an average query's attention that goes to compressed memory, memory and the window.
    slots [N]: how many slots of a bucket an average query sees. mean_distance [L][H]: in steps. widest: the three heads
    with the largest mean distance, each with the weights of a window's last queries over its slots, oldest first. The
    data must have a piece that fills the memories and a window more; if the model has nothing to look at, the figures
    say why.
    """
    if isinstance(model := attending(run), str):
        return {"absent": model}
    config = model.config
    length = config.steps_to_full + config.window  # of a piece, whose last window is looked at
    pieces, order = whole_pieces(tokens, length, at_most=min(max_tokens // length, _MOST_WINDOWS))
    assert order
    reach = model.receptive_field
    width = -(-reach // MOST_BUCKETS)
    num_buckets = -(-reach // width)
    regions = dict(zip(REGIONS, (config.compressed, config.memory, config.window), strict=True))
    zeros = partial(torch.zeros, dtype=torch.float64)
    # Sums over queries, of all terms and of each alone: of the weight by bucket of distance, and of the distance.
    weight_LHN: dict[str, Tensor] = defaultdict(lambda: zeros(config.num_layers, config.num_heads, num_buckets))
    distance_LH: dict[str, Tensor] = defaultdict(lambda: zeros(config.num_layers, config.num_heads))
    share_RLH = zeros(len(regions), config.num_layers, config.num_heads)
    slots_N = zeros(num_buckets)
    last_queries: dict[int, Tensor] = {}
    num_windows = length // config.window  # of a piece
    num_read = 0

    def see(layer: int, attention: RelativeAttention, attended: AttentionOutput, slots: Slots) -> None:
        if num_read % num_windows != num_windows - 1:
            return
        distance_BTK = slots.query_times[..., :, None] - slots.slot_times[..., None, :]
        visible_BTK = distance_BTK >= 0 if slots.visible is None else slots.visible[:, 0]
        distance_BTK = distance_BTK.clamp(min=0).float()
        bucket_BTK = (distance_BTK / width).long().clamp(max=num_buckets - 1)
        weights_BHTK = attention.weights(attended.queries, attended.keys, slots)
        index_BHn = bucket_BTK[:, None].expand_as(weights_BHTK).flatten(2)
        kinds = {ALL_TERMS: weights_BHTK}
        for letter, logits_BHTK in score_terms(attention, attended, slots).items():
            kinds[letter] = softmax_of_visible(logits_BHTK, slots)
        for kind, of_kind_BHTK in kinds.items():
            flat_BHn = of_kind_BHTK.flatten(2)
            summed_BHN = flat_BHn.new_zeros(*flat_BHn.shape[:2], num_buckets).scatter_add_(2, index_BHn, flat_BHn)
            weight_LHN[kind][layer] += summed_BHN.sum(dim=0).cpu().double()
            distance_LH[kind][layer] += (of_kind_BHTK * distance_BTK[:, None]).sum(dim=(0, 2, 3)).cpu().double()
        by_region = wide(weights_BHTK).sum(dim=(0, 2)).split(list(regions.values()), dim=-1)
        share_RLH[:, layer] += torch.stack([weights_HK.sum(dim=-1) for weights_HK in by_region]).cpu()
        last_queries[layer] = weights_BHTK[-1, :, -_NUM_TARGETS:].float().cpu()
        if layer == 0:
            visible_BTK = visible_BTK.expand(len(attended.queries), -1, -1)
            seen = bucket_BTK.expand_as(visible_BTK)[visible_BTK]
            slots_N.add_(torch.bincount(seen.cpu(), minlength=num_buckets))

    num_weights = config.num_heads * config.window * sum(regions.values())
    rows = min(len(order), max(1, _MOST_WEIGHTS // num_weights))
    with torch.inference_mode(), observe_attention(model, see):
        for _ in read_once(run, pieces, order, what="heads of", show_progress=show_progress, rows=rows):
            num_read += 1
    num_queries = config.window * len(order)
    figures = {
        kind: {
            "weight": (weight_LHN[kind] / num_queries).tolist(),
            "mean_distance": (distance_LH[kind] / num_queries).tolist(),
        }
        for kind in weight_LHN
    }
    return {
        "num_windows": len(order),
        "buckets": [{"from": i * width, "to": min((i + 1) * width, reach) - 1} for i in range(num_buckets)],
        "slots": (slots_N / num_queries).tolist(),
        "share": {
            region: share.tolist()
            for (region, num_slots), share in zip(regions.items(), share_RLH / num_queries, strict=True)
            if num_slots
        },
        **figures.pop(ALL_TERMS),
        "terms": {letter: {"name": TERMS[letter], **of_term} for letter, of_term in figures.items()},
        "widest": _widest(distance_LH[ALL_TERMS] / num_queries, last_queries),
    }


def _widest(distance_LH: Tensor, last_queries: dict[int, Tensor]) -> list[dict[str, Any]]:
    """The heads that look furthest on average, and the weights [targets][columns] of their last queries."""
    num_heads = distance_LH.shape[1]
    heads = distance_LH.flatten().argsort(descending=True)[:_NUM_WIDEST].tolist()
    num_columns = min(last_queries[0].shape[-1], MOST_BUCKETS)
    return [
        {
            "layer": layer,
            "head": head,
            "mean_distance": float(distance_LH[layer, head]),
            "weight": in_buckets(last_queries[layer][head].double().numpy(), num_buckets=num_columns).round(6).tolist(),
        }
        for layer, head in (divmod(index, num_heads) for index in heads)
    ]
