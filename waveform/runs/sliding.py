"""Evaluation of a model without memory, in windows that overlap, so that each token has a context to be scored with.

Such a model (a plain Transformer, or Transformer-XL without recurrence) begins each window anew. If windows do not
overlap, their first tokens have no context. If they move by `stride` tokens at a time, each but the first scores only
its last `stride` tokens, and reads the others again (Al-Rfou et al. 2018; Dai et al. 2019, section 3.1).
"""

from collections.abc import Iterator

import torch

from waveform.engine.evaluator import Evaluation, Tally
from waveform.engine.single_pass import DealtWindow, score_once
from waveform.engine.state_ram import fast_rows
from waveform.engine.streams import read_window, span_of
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.runs.opened import TrainedRun
from waveform.system.errors import UserError
from waveform.system.progress import Progress


@torch.inference_mode()
def evaluate_sliding(
    run: TrainedRun, tokens: TokenSet, *, stride: int, world: World, classes: torch.Tensor | None = None
) -> Evaluation:
    """Score every token of `tokens` once, with a context of `window` - `stride` tokens or more if so many precede it.

    classes: of each token id, as in the engine's `evaluate`. Under torchrun each rank scores its share of the windows.
    Raises UserError for a model that carries memory or reads labels, and for a stride outside 1 to the window.
    """
    model, window = run.model, run.window
    fields = run.config["model"]
    if fields.get("memory") != 0 or fields.get("compressed"):
        raise UserError(
            f"--stride is for models without memory, and {run.folder} has model.memory={fields.get('memory')}, which "
            "carries the context; leave it out"
        )
    if run.labels:
        raise UserError("--stride is for runs without labels, which only an utterance's first window would read")
    if not 1 <= stride <= window:
        raise UserError(f"--stride is {stride}; it must be from 1 to the window, {window}")
    tally = Tally(tokens, classes=classes, device=world.device)
    places = _places(tokens, window=window, stride=stride)[world.rank :: world.size]
    rows = fast_rows(model, window=window, device=world.device)
    total, unit, unit_s = tokens.num_tokens, run.unit, run.unit_s
    with Progress(f"evaluate {run.name}", total=total, unit=unit, unit_s=unit_s, enabled=world.shows) as progress:
        windows = _deal(tokens, places, window=window, stride=stride, rows=rows)
        for dealt, scores in score_once(model, windows, device=world.device):
            progress.update(tally.add(dealt, scores))
    return tally.result(protocol="window", world=world, whole=True)


def _places(tokens: TokenSet, *, window: int, stride: int) -> list[tuple[int, int]]:
    """List (utterance, first token) of every window: an utterance's first begins at 0, and its last reaches the end."""
    return [
        (utterance, start)
        for utterance, length in enumerate(tokens.lengths)
        for start in range(0, max(length - window, 0) + stride, stride)
    ]


def _deal(
    tokens: TokenSet, places: list[tuple[int, int]], *, window: int, stride: int, rows: int
) -> Iterator[DealtWindow]:
    """The windows at `places`, `rows` side by side, each from a fresh state."""
    for first in range(0, len(places), rows):
        batch = places[first : first + rows]
        spans = [[span_of(tokens, utterance, start, window=window, bos=start == 0)] for utterance, start in batch]
        first_scored = [window - stride if start else 0 for _, start in batch]
        read = read_window(tokens, spans, window=window, reset=[True] * len(batch), first_scored=first_scored)
        yield DealtWindow(read, [utterance for utterance, _ in batch], 0, None)
