"""Runs every analysis on opened runs and one token set: prints, returns and writes the figures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waveform.analyses.context import RATIOS, THRESHOLD, context_grid, effective_context, losses_by_context
from waveform.analyses.layers import attention_by_position, compression_loss_by_layer, observe_layers
from waveform.analyses.plots import save_analysis
from waveform.analyses.state_reuse import state_reuse_speed
from waveform.engine.interface import optional_parts
from waveform.engine.shards import TokenSet
from waveform.runs.evaluation import write_json
from waveform.runs.folder import TrainedRun, num_parameters
from waveform.system.atomic import require_writable
from waveform.system.errors import UserError
from waveform.system.progress import Progress

DEFAULT_TOKENS = 200_000
_NUM_CONTEXTS = 16  # lengths tried by default


def analyse(
    runs: Sequence[TrainedRun],
    tokens: TokenSet,
    *,
    split: str,
    max_tokens: int = DEFAULT_TOKENS,
    context_step: int | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    unit: str = "token",
    show_progress: bool = True,
) -> dict[str, Any]:
    """Attention by position, compression loss by layer, effective context and the gain of carried state.

    runs: one, or a group whose effective contexts are relative to one another; all on the alphabet of `tokens`.
    max_tokens: read at most by each run for the first two, and again for the third. context_step: tokens from one
    context length to the next. unit: what a token is called. What a model or the data does not have is said in one
    line (`absent`), and the rest is done. Raises UserError for settings or files that cannot be.
    """
    check_files(json_file=json_file, plot_file=plot_file)
    if max_tokens < 1:
        raise UserError(f"--tokens is {max_tokens}; it must be at least 1")
    if context_step is not None and context_step < 1:
        raise UserError(f"--context-step is {context_step}; it must be at least 1")
    for run in runs:
        if run.config["dataset"]["vocab_size"] != tokens.vocab_size:
            raise UserError(
                f"{run.folder} knows {run.config['dataset']['vocab_size']} kinds of token, the data has "
                f"{tokens.vocab_size}; name data of the run's own kind"
            )
    figures: dict[str, Any] = {
        "split": split,
        "data_checksum": tokens.checksum,
        "max_tokens": max_tokens,
        "unit": unit,
        "runs": [
            {
                "model": run.name,
                "label": label,
                "run": str(run.folder),
                "step": run.step,
                "num_parameters": num_parameters(run.model),
                "model_config": dict(run.config["model"]),
                **_layers(run, tokens, max_tokens=max_tokens, unit=unit, show_progress=show_progress),
                "state_reuse": state_reuse_speed(
                    run.model, vocab_size=tokens.vocab_size, window=run.window, device=run.device
                ),
            }
            for run, label in zip(runs, _labels(runs), strict=True)
        ],
        "effective_context": _context(
            runs, tokens, max_tokens=max_tokens, step=context_step, unit=unit, show_progress=show_progress
        ),
    }
    if show_progress:
        print(describe(figures))
    write_json(json_file, figures)
    if plot_file is not None:
        save_analysis(plot_file, figures)
    return figures


def common_tokens(runs: Sequence[TrainedRun], token_sets: Sequence[TokenSet], *, split: str) -> TokenSet:
    """The one token set of a group. Raises UserError where two runs' sets differ."""
    for run, tokens in zip(runs, token_sets, strict=True):
        if tokens.checksum != token_sets[0].checksum:
            raise UserError(
                f"{runs[0].folder} and {run.folder} have other {split} data, so they are no group to analyse; "
                "analyse runs that were trained on one data set, or name one for all"
            )
    return token_sets[0]


def check_files(*, json_file: Path | None, plot_file: Path | None) -> None:
    """Raises UserError for names that cannot be written, before any work is done."""
    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise UserError(f"--plot {plot_file} is no .png; only PNG files are drawn")
    require_writable(json_file, option="--json")
    require_writable(plot_file, option="--plot")


def _labels(runs: Sequence[TrainedRun]) -> list[str]:
    """The model's name, with the run's where several runs are of one model."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else f"{run.name} ({run.folder.name})" for run in runs]


def _layers(
    run: TrainedRun, tokens: TokenSet, *, max_tokens: int, unit: str, show_progress: bool
) -> dict[str, dict[str, Any]]:
    with Progress(f"layers of {run.folder.name}", total=None, unit=unit, enabled=show_progress) as progress:
        observed = observe_layers(
            run.model,
            tokens,
            max_tokens=max_tokens,
            batch_size=run.config["train"]["evaluate_batch_size"],
            device=run.device,
            progress=progress,
        )
    if isinstance(observed, str):
        return {"attention_by_position": {"absent": observed}, "compression_loss_by_layer": {"absent": observed}}
    kind = str(run.config["model"].get("compression_loss", "none"))
    return {
        "attention_by_position": attention_by_position(observed),
        "compression_loss_by_layer": compression_loss_by_layer(observed, kind=kind),
    }


def _context(
    runs: Sequence[TrainedRun],
    tokens: TokenSet,
    *,
    max_tokens: int,
    step: int | None,
    unit: str,
    show_progress: bool,
) -> dict[str, Any]:
    """RECL of each run among `runs`, for every ratio."""
    # Layers of attention reach further than one does; a receptive field is all that there is.
    reach = [(optional_parts(run.model).receptive_field or run.window) * (2 if _has_window(run) else 1) for run in runs]
    windows = [run.window for run in runs if _has_window(run)]
    common = math.lcm(*windows)  # 1 for none; see ContextGrid
    step = step or -(-max(reach) // (_NUM_CONTEXTS * common)) * common
    grid = context_grid(tokens, step=step, longest=max(max(reach), 2 * step), max_tokens=max_tokens)
    if isinstance(grid, str):
        return {"absent": grid}
    total = sum(length + grid.block for length in grid.lengths) * len(grid.starts) * len(runs)
    with Progress("contexts", total=total, unit=unit, enabled=show_progress) as progress:
        losses = np.stack(
            [
                losses_by_context(
                    run.model,
                    tokens,
                    grid,
                    window=run.window,
                    batch_size=run.config["train"]["evaluate_batch_size"],
                    device=run.device,
                    progress=progress,
                )
                for run in runs
            ]
        )
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


def describe(figures: dict[str, Any]) -> str:
    """The figures in a few lines."""
    unit, lines = figures["unit"], []
    for entry in figures["runs"]:
        lines.append(f"{entry['label']}, step {entry['step']}, {figures['split']} split")
        attention = entry["attention_by_position"]
        if "absent" in attention:
            lines.append(f"  attention by position: {attention['absent']}")
        else:
            lines.append(
                f"  attention by position, oldest first, % of a query's weight ({attention['num_windows']} windows of "
                f"{attention['num_pieces']} pieces, memories full)"
            )
            for region, values in attention["regions"].items():
                errors = values["weight_standard_error"] or [float("nan")] * len(values["weight"])
                cells = [f"{100 * w:.2f}±{100 * e:.2f}" for w, e in zip(values["weight"], errors, strict=True)]
                lines.append(f"    {region:<10} {'  '.join(cells)}   sum {100 * sum(values['weight']):.1f}")
        loss = entry["compression_loss_by_layer"]
        if "absent" in loss:
            lines.append(f"  compression loss by layer: {loss['absent']}")
        else:
            errors = loss["standard_error"] or [float("nan")] * len(loss["mean"])
            cells = [f"{m:.3g}±{e:.1g}" for m, e in zip(loss["mean"], errors, strict=True)]
            lines.append(f"  compression loss by layer ({loss['loss']}): {'  '.join(cells)}")
        speed = entry["state_reuse"]
        if "absent" in speed:
            lines.append(f"  state reuse: {speed['absent']}")
        else:
            lines.append(
                f"  carried state: {1e6 * speed['seconds_per_token']['carried']:.1f} us per {unit}; reading its "
                f"{speed['context_tokens']} {unit}s of context anew is {speed['speedup_over_each_window']:.1f} times "
                f"slower for each window, {speed['speedup_over_each_token']:,.0f} times for each {unit} "
                f"({speed['device']})"
            )
    context = figures["effective_context"]
    if "absent" in context:
        lines.append(f"relative effective context: {context['absent']}")
        return "\n".join(lines)
    group = "the group" if len(figures["runs"]) > 1 else "one run, relative to itself"
    lines.append(
        f"relative effective context in {unit}s of {group} (steps of {context['step']} to {context['lengths'][-1]}, "
        f"{context['num_positions']:,} positions)"
    )
    for i, entry in enumerate(figures["runs"]):
        cells = [
            f"r={ratio}: {'> ' if results[i]['reached_limit'] else ''}{results[i]['recl']}"
            for ratio, results in context["by_ratio"].items()
        ]
        nats = context["nats_by_length"][i]
        lines.append(f"  {entry['label']:<24} {'   '.join(cells)}   nats {nats[0]:.4f} -> {nats[-1]:.4f}")
    return "\n".join(lines)
