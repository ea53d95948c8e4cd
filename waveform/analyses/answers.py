"""How much each head attends to the slot that holds an answer, by how far back it lies.

Shape letters: A answers of a window, L layers, H heads, T queries, K slots, N buckets of distance.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from waveform.analyses.hooks import attending, observe_attention, read_once
from waveform.engine.single_pass import DealtWindow
from waveform.engine.token_set import TokenSet
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.models.transformer_config import CompressiveTransformerConfig
from waveform.runs.opened import TrainedRun

NUM_BUCKETS = 10


class _Answers(NamedTuple):
    """The answers of one window: where each is asked for, and where it was last seen."""

    rows_A: Tensor
    queries_A: Tensor  # place in the window of the input whose target is the answer
    times_A: Tensor  # when the answer was read, relative to the window's start
    buckets_A: Tensor


def attention_on_answers(
    run: TrainedRun, tokens: TokenSet, distances: TokenSet, *, max_tokens: int, show_progress: bool
) -> dict[str, Any]:
    """Return the mean weight on the slot that holds the answer, by layer, head and distance.

    distances: for each of `tokens`, the steps back to where the same answer was last read; 0: it is not an answer.
    max_tokens: at most how many to read, in whole utterances; the first is read anyway. weight [L, H, N]: mean over the
    answers that a slot holds; None if there are none. held [N]: the share of answers that a slot holds; the others are
    out of the layer's reach. If the model has nothing to look at, the figures say why.
    """
    if isinstance(model := attending(run), str):
        return {"absent": model}
    config = model.config
    if config.compressed and (config.compressed_position != "time" or config.tracks_usage):
        return {"absent": "the model's compressed slots do not stand at the time of what they hold"}
    width = -(-(distances.vocab_size - 1) // NUM_BUCKETS)
    held_N, answers_N = torch.zeros(NUM_BUCKETS), torch.zeros(NUM_BUCKETS)
    weight_LHN = torch.zeros(config.num_layers, config.num_heads, NUM_BUCKETS)
    seen: list[tuple[Tensor, Slots]] = []

    def see(layer: int, attention: RelativeAttention, attended: AttentionOutput, slots: Slots) -> None:
        seen.append((attention.weights(attended.queries, attended.keys, slots).cpu(), slots))

    order = range(max(1, int(np.searchsorted(np.cumsum(tokens.lengths), max_tokens, side="right"))))
    with torch.inference_mode(), observe_attention(model, see):
        for dealt, _ in read_once(run, tokens, order, what="answers of", show_progress=show_progress):
            answers = _find(dealt, distances, width=width)
            slot_A, is_held_A = _holding(answers, seen[0][1], config)
            answers_N += torch.bincount(answers.buckets_A, minlength=NUM_BUCKETS)
            held = _Answers(*(part[is_held_A] for part in answers))
            held_N += torch.bincount(held.buckets_A, minlength=NUM_BUCKETS)
            for layer, (weights_BHTK, _) in enumerate(seen):
                weight_AH = weights_BHTK[held.rows_A, :, held.queries_A, slot_A[is_held_A]]
                weight_LHN[layer].index_add_(1, held.buckets_A, weight_AH.t())
            seen.clear()
    return {
        "buckets": [{"from": 1 + i * width, "to": (i + 1) * width} for i in range(NUM_BUCKETS)],
        "num_answers": answers_N.int().tolist(),
        "held": [float(h / n) if n else None for h, n in zip(held_N, answers_N, strict=True)],
        "weight": [
            [[float(w / n) if n else None for w, n in zip(head_N, held_N, strict=True)] for head_N in layer_HN]
            for layer_HN in weight_LHN
        ],
    }


def _find(dealt: DealtWindow, distances: TokenSet, *, width: int) -> _Answers:
    """Return the answers among the targets of a window."""
    scored = dealt.window.scored
    distance_BT = torch.zeros(scored.shape, dtype=torch.long)
    for row, (utterance, length) in enumerate(zip(dealt.utterances, scored.sum(dim=1).tolist(), strict=True)):
        part = distances.read(utterance, start=dealt.start, stop=dealt.start + length)
        distance_BT[row, :length] = torch.from_numpy(part.astype(np.int64))
    rows_A, queries_A = distance_BT.nonzero(as_tuple=True)
    distance_A = distance_BT[rows_A, queries_A]
    # The target of input i is token i + 1 of the stream: the token d steps before it is input i + 1 - d.
    return _Answers(rows_A, queries_A, queries_A + 1 - distance_A, (distance_A - 1) // width)


def _holding(answers: _Answers, slots: Slots, config: CompressiveTransformerConfig) -> tuple[Tensor, Tensor]:
    """Return the slot [A] nearest in time to each answer, and whether that slot covers the answer and is visible [A].

    A slot of the window or of memory covers its own step, a compressed slot the c steps around its time. Steps that
    were dropped are in no slot.
    """
    times_AK = slots.slot_times.cpu().expand(len(answers.rows_A), -1)
    away_A, slot_A = (times_AK - answers.times_A[:, None]).abs().min(dim=1)
    is_compressed_A = times_AK.gather(1, slot_A[:, None])[:, 0] < -config.memory
    covers_A = away_A <= is_compressed_A * ((config.compression_rate - 1) / 2)
    if slots.visible is not None:
        visible_BTK = slots.visible.cpu()[:, 0]
        rows_A = answers.rows_A if len(visible_BTK) > 1 else torch.zeros_like(answers.rows_A)
        covers_A &= visible_BTK[rows_A, answers.queries_A, slot_A]
    return slot_A, covers_A
