"""How much context models use: relative effective context length (RECL; Dai et al. 2019, section 4.3 and appendix C).

Each model of a group is compared with the group's best at a shorter context: a longer context counts only if it
beats what any of them can do without it, so a model gains nothing by being bad at short contexts.

Shape letters: N models, J context lengths, P positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from waveform.analyses.hooks import rows_of
from waveform.engine.interface import shift_right
from waveform.engine.token_set import TokenSet
from waveform.runs.opened import TrainedRun
from waveform.system.progress import Progress

RATIOS = (0.1, 0.5, 1.0)  # r: the share of positions that count, those hardest at the short context (Table 8)
THRESHOLD = 0.01  # relative gain below which more context counts as unused
_BLOCKS_PER_STEP, _MIN_BLOCKS = 4, 8


@dataclass(frozen=True)
class ContextGrid:
    """Which positions are scored, with which contexts.

    Positions come in blocks of neighbours whose context begins at the same token: `block` of them share the cost of
    reading it, and position k of a block has a context of c + k tokens, where the paper has c. The difference between
    two context lengths is exact at every position. If `step` is a multiple of a model's window, a position has the same
    index in its window with every context; otherwise that index moves, and its effect looks like a gain.
    """

    step: int  # Delta: context lengths are step, 2 step, ...
    num_steps: int
    block: int
    starts: list[tuple[int, int]]  # (utterance, position of the block's first token)

    @property
    def lengths(self) -> list[int]:
        return [self.step * (i + 1) for i in range(self.num_steps)]


def context_grid(tokens: TokenSet, *, step: int, longest: int, max_tokens: int) -> ContextGrid | str:
    """Lay out contexts up to `longest`, with blocks spread evenly over `tokens`, reading at most `max_tokens`.

    The longest context shrinks if max_tokens or the utterances do not allow eight blocks. Returns one line if not even
    two lengths fit.
    """
    block = max(1, step // _BLOCKS_PER_STEP)
    for num_steps in range(max(longest // step, 2), 1, -1):
        span = step * num_steps + block
        cost = sum(step * (i + 1) + block for i in range(num_steps))
        places = [
            (i, start)
            for i, length in enumerate(tokens.lengths)
            for start in range(step * num_steps, length - block + 1, span)
        ]
        num_blocks = min(len(places), max_tokens // cost)
        if num_blocks >= _MIN_BLOCKS:
            chosen = np.linspace(0, len(places) - 1, num_blocks)
            return ContextGrid(step, num_steps, block, [places[int(i)] for i in chosen])
    return (
        f"too little data for contexts of {step} and {2 * step} tokens at {_MIN_BLOCKS} places; give more --tokens "
        "or a smaller --context-step"
    )


@torch.inference_mode()
def losses_by_context(run: TrainedRun, tokens: TokenSet, grid: ContextGrid, *, progress: Progress) -> np.ndarray:
    """Return the NLL in nats [J, P] of each position at each context length, every context read from a fresh state.

    As in evaluation, a fresh state begins with the begin-of-utterance input, and so with the label. If a model carries
    nothing from window to window, it reads only the last window of each context, so that no token is scored at the
    start of a window, where it would have no context.
    """
    model, window, device, rows, tokens = run.model, run.window, run.device, rows_of(run), run.reading(tokens)
    carries = run.config["model"].get("memory", 1) or run.config["model"].get("compressed")
    losses = np.zeros((grid.num_steps, len(grid.starts) * grid.block))
    for j, length in enumerate(grid.lengths):
        num_read = length + grid.block if carries else max(min(length + grid.block, window), grid.block)
        for begin in range(0, len(grid.starts), rows):
            places = grid.starts[begin : begin + rows]
            stops = [(i, at + grid.block) for i, at in places]
            targets = torch.from_numpy(
                np.stack([tokens.read(i, start=stop - num_read, stop=stop) for i, stop in stops]).astype(np.int64)
            )
            inputs = shift_right(targets, vocab_size=tokens.vocab_size)
            inputs[:, 0] += torch.tensor([tokens.label_numbers[i] for i, _ in places])
            state = model.init_state(len(places), device=device, dtype=next(iter(model.parameters())).dtype)
            parts = []
            for x, y in zip(inputs.split(window, dim=1), targets.split(window, dim=1), strict=True):
                hidden, state, _ = model.forward(x.to(device), state)
                parts.append(model.head.nll(hidden, y.to(device)).cpu().double())
            scored = torch.cat(parts, dim=1)[:, -grid.block :]
            losses[j, begin * grid.block : (begin + len(places)) * grid.block] = scored.flatten().numpy()
            progress.update(targets.numel())
    return losses


def relative_gain(losses: np.ndarray, *, model: int, short: int, long: int, ratio: float) -> float:
    """Return g_i(c, c') of appendix C: the share by which model i, with the longer context, lowers the best perplexity.

    losses [N, J, P] nats; short, long: indices of c and c'; ratio: r, the share of positions that count, those hardest
    for the group at c.
    """
    baseline = losses[:, short].min(axis=0)
    num_counted = max(1, round(ratio * len(baseline)))
    counted = np.argsort(-baseline, kind="stable")[:num_counted]
    before = baseline[counted].mean()
    after = np.minimum(baseline, losses[model, long])[counted].mean()
    return float(-np.expm1(after - before))


def effective_context(losses: np.ndarray, lengths: Sequence[int], *, ratio: float) -> list[dict[str, Any]]:
    """Return the RECL of each of N models from losses [N, J, P] at `lengths` [J], an arithmetic progression.

    recl: the first length at which one more step gains less than `THRESHOLD`. reached_limit: every step gained more, so
    recl is the longest length tried, a lower bound. gains: of every step, including those after recl.
    """
    entries = []
    for model in range(len(losses)):
        gains = [relative_gain(losses, model=model, short=j, long=j + 1, ratio=ratio) for j in range(len(lengths) - 1)]
        stopped = next((j for j, gain in enumerate(gains) if gain < THRESHOLD), None)
        entries.append(
            {"recl": lengths[-1 if stopped is None else stopped], "reached_limit": stopped is None, "gains": gains}
        )
    return entries
