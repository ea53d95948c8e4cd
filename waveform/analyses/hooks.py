"""Watches a run as it reads tokens once: its progress, and its layers, by forward hooks that change nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from waveform.engine.scored_window import ScoredWindow
from waveform.engine.single_pass import DealtWindow, deal, score_once
from waveform.engine.state_ram import fast_rows
from waveform.engine.token_set import TokenSet
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.models.compressive_transformer import CompressiveTransformer, Layer, LayerOutput
from waveform.runs.opened import TrainedRun
from waveform.system.progress import Progress

See = Callable[[int, RelativeAttention, AttentionOutput, Slots], None]


def rows_of(run: TrainedRun) -> int:
    """How many utterances a run reads side by side."""
    return fast_rows(run.model, window=run.window, device=run.device)


def read_once(
    run: TrainedRun,
    tokens: TokenSet,
    order: Sequence[int],
    *,
    what: str,
    show_progress: bool,
    rows: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[DealtWindow, ScoredWindow]]:
    """Score the utterances `order` once; yield each window that was dealt with its scores.

    what: the name of the work beside its progress. rows: read side by side; None: as many as `rows_of` says. chunk: as
    in `deal`.
    """
    total = sum(tokens.lengths[i] for i in order)
    with Progress(
        f"{what} {run.folder.name}", total=total, unit=run.unit, unit_s=run.unit_s, enabled=show_progress
    ) as progress:
        windows = deal(run.reading(tokens), order, window=run.window, rows=rows or rows_of(run), chunk=chunk)
        for dealt, scores in score_once(run.model, windows, device=run.device):
            yield dealt, scores
            progress.update(int(dealt.window.scored.sum()))


def attending(run: TrainedRun) -> CompressiveTransformer | str:
    """The model of a run, if its attention can be looked at; otherwise a line that says why not."""
    if not isinstance(run.model, CompressiveTransformer):
        return "the model has no attention"
    return "its layers have memories of different sizes" if run.model.config.is_mixed else run.model


def observe_attention(model: nn.Module, see: See) -> AbstractContextManager[None]:
    """While open, `see(layer, attention, output, slots)` is called at every relative attention.

    What a fused attention does not keep is computed from these: `attention.weights(output.queries, output.keys, slots)`
    [B, H, T, K], or for one block of queries at a time `attention.received_attention(output, slots)` [B, K].
    """

    def hook(layer: int, module: RelativeAttention, inputs: Sequence[Any], output: AttentionOutput) -> None:
        see(layer, module, output, inputs[2])

    return _hooked([module for module in model.modules() if isinstance(module, RelativeAttention)], hook)


def observe_compression_loss(model: nn.Module, see: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
    """While open, `see(layer, loss [B])` is called whenever a layer computes its compression loss.

    Models compute it only if gradients are enabled.
    """

    def hook(layer: int, module: nn.Module, inputs: Sequence[Any], output: LayerOutput) -> None:
        if output.loss is not None:
            see(layer, output.loss.detach())

    return _hooked([module for module in model.modules() if isinstance(module, Layer)], hook)


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """While open, `hook(number, module, inputs, output)` is called after each forward pass of a module."""
    handles = [module.register_forward_hook(partial(hook, i)) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
