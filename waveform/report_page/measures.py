"""What a report measures of an opened run, on speech as on text: NLL by place, and attention by position."""

from typing import Any

from waveform.analyses.analyse import DEFAULT_TOKENS
from waveform.analyses.by_place import NllByPlace, nll_by_place
from waveform.analyses.layers import attention_by_position, observe_run
from waveform.engine.state_ram import fast_rows
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.runs.opened import TrainedRun
from waveform.system.progress import Progress


def measure_places(
    run: TrainedRun, tokens: TokenSet, *, first: int, max_tokens: int | None, world: World, show_progress: bool
) -> NllByPlace:
    """`nll_by_place` of a run."""
    total = min(tokens.num_tokens, max_tokens or tokens.num_tokens) // world.size
    with Progress(
        f"evaluate {run.folder.name}", total=total, unit=run.unit, unit_s=run.unit_s, enabled=show_progress
    ) as progress:
        rows = fast_rows(run.model, window=run.window, device=run.device)
        return nll_by_place(
            run.model,
            run.reading(tokens),
            first=first,
            window=run.window,
            rows=rows,
            max_tokens=max_tokens,
            world=world,
            progress=progress,
        )


def measure_attention(run: TrainedRun, tokens: TokenSet, *, label: str, show_progress: bool) -> dict[str, Any]:
    """`attention_by_position` of a run under that name, beside its label; {absent: why} if there is nothing to see."""
    observed = observe_run(run, tokens, max_tokens=DEFAULT_TOKENS, show_progress=show_progress)
    return {"label": label, "attention_by_position": attention_by_position(observed)}
