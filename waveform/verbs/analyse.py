"""`analyse`: where runs attend, how they compress, and how far back they look."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from waveform.analyses.answers import attention_on_answers
from waveform.analyses.context import RATIOS, THRESHOLD, context_grid, effective_context, losses_by_context
from waveform.analyses.heads import attention_by_head
from waveform.analyses.layers import DEFAULT_TOKENS, attention_by_position, compression_loss_by_layer, observe_layers
from waveform.analyses.plots import save_analysis
from waveform.analyses.report import describe
from waveform.analyses.state_reuse import state_reuse_speed
from waveform.domain import domain_of_runs
from waveform.engine.interface import optional_parts
from waveform.engine.token_set import TokenSet
from waveform.runs.configured_model import num_parameters
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import common_tokens, names_of
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.progress import Progress

_NUM_CONTEXTS = 16  # lengths tried by default


@dataclass(frozen=True)
class AnalysisConfig:
    """What the analyses read."""

    split: str = "test"
    max_tokens: int = DEFAULT_TOKENS  # most that each run reads for a figure: layers, heads, answers, contexts
    context_step: int | None = None  # tokens between context lengths; None: chosen by the models' reach
    memory: int | None = None  # memory slots; None: as in training
    compressed: int | None = None  # compressed slots; None: as in training

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"--tokens is {self.max_tokens}; it must be at least 1")
        if self.context_step is not None and self.context_step < 1:
            raise UserError(f"--context-step is {self.context_step}; it must be at least 1")


def analyse(
    run_dirs: Sequence[Path | str] | Path | str,
    config: AnalysisConfig | None = None,
    *,
    data: Path | str | None = None,
    json_file: Path | str | None = None,
    plot_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Measure attention by position and by head, compression losses, effective context and the gain of carried state.

    run_dirs: one run, or a group whose effective contexts are relative to each other. Prints the figures, returns them,
    and writes them to `json_file` and, as pictures, `plot_file`. If a model or the data has nothing to measure, one
    line says so (`absent`), and the rest is done. Raises UserError as `load` does, if the runs' data differ or are of
    another kind, and for too few tokens.
    """
    plot_file = None if plot_file is None else Path(plot_file)
    check_files(json_file=json_file, plot_file=plot_file)
    config = config or AnalysisConfig()
    run_dirs = [run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs)
    domain = domain_of_runs(run_dirs)
    sizes = {"memory": config.memory, "compressed": config.compressed}
    runs = [domain.load(run_dir, device=device, **sizes) for run_dir in run_dirs]
    token_sets = [domain.open_split(run, data=data, split=config.split, show_progress=show_progress) for run in runs]
    tokens = common_tokens(runs, token_sets, split=config.split)
    distances = domain.distances(runs[0], config.split)
    figures: dict[str, Any] = {
        "split": config.split,
        "data_checksum": tokens.checksum,
        "max_tokens": config.max_tokens,
        "unit": runs[0].unit,
        "runs": [
            {
                "model": run.name,
                "label": label,
                "run": str(run.given),
                "step": run.step,
                "num_parameters": num_parameters(run.model),
                "model_config": dict(run.config["model"]),
                **_attention(run, tokens, distances, max_tokens=config.max_tokens, show_progress=show_progress),
                "state_reuse": state_reuse_speed(
                    run.model, vocab_size=tokens.vocab_size, window=run.window, device=run.device
                ),
            }
            for run, label in zip(runs, names_of(runs), strict=True)
        ],
        "effective_context": _context(runs, tokens, config, show_progress=show_progress),
    }
    if show_progress:
        print(describe(figures))
    write_json(json_file, figures)
    if plot_file is not None:
        save_analysis(plot_file, figures)
    return figures


def _attention(
    run: TrainedRun, tokens: TokenSet, distances: TokenSet | None, *, max_tokens: int, show_progress: bool
) -> dict[str, dict[str, Any]]:
    reading: dict[str, Any] = {"max_tokens": max_tokens, "show_progress": show_progress}
    observed = observe_layers(run, tokens, **reading)
    kind = str(run.config["model"].get("compression_loss", "none"))
    nothing = isinstance(observed, str)
    figures = {
        "attention_by_position": attention_by_position(observed),
        "compression_loss_by_layer": compression_loss_by_layer(observed, kind=kind),
        "attention_by_head": {"absent": observed} if nothing else attention_by_head(run, tokens, **reading),
    }
    if distances is not None:
        figures["attention_on_answers"] = attention_on_answers(run, tokens, distances, **reading)
    return figures


def _context(
    runs: Sequence[TrainedRun], tokens: TokenSet, config: AnalysisConfig, *, show_progress: bool
) -> dict[str, Any]:
    """Relative effective context length (RECL) of each of `runs`, for every ratio."""
    # Several layers of attention reach further than one; a receptive field is a hard limit.
    reach = [(optional_parts(run.model).receptive_field or run.window) * (2 if _has_window(run) else 1) for run in runs]
    windows = [run.window for run in runs if _has_window(run)]
    common = math.lcm(*windows)  # 1 for none; see ContextGrid
    step = config.context_step or -(-max(reach) // (_NUM_CONTEXTS * common)) * common
    grid = context_grid(tokens, step=step, longest=max(max(reach), 2 * step), max_tokens=config.max_tokens)
    if isinstance(grid, str):
        return {"absent": grid}
    total = sum(length + grid.block for length in grid.lengths) * len(grid.starts) * len(runs)
    with Progress("contexts", total=total, unit=runs[0].unit, enabled=show_progress) as progress:
        losses = np.stack([losses_by_context(run, tokens, grid, progress=progress) for run in runs])
    return {
        "step": grid.step,
        "lengths": grid.lengths,
        "block": grid.block,
        "num_positions": losses.shape[-1],
        "threshold": THRESHOLD,
        "nats_by_length": losses.mean(axis=-1).tolist(),
        "by_ratio": {str(ratio): effective_context(losses, grid.lengths, ratio=ratio) for ratio in RATIOS},
    }


def _has_window(run: TrainedRun) -> bool:
    return "window" in run.config["model"]
