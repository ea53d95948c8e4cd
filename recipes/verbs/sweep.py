"""`python -m recipes sweep`: one run at several sizes of compressed memory (Rae et al. 2019, Tables 8 and 9)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.metrics import UNITS
from recipes.text import load
from recipes.verbs.evaluate import measure
from waveform.ranks.distributed import SCORING_TIMEOUT_S, job
from waveform.runs.scoring import EvaluateOptions
from waveform.system.atomic import require_writable
from waveform.system.errors import UserError
from waveform.system.output import write_json, write_png


def sizes_from(text: str) -> list[int]:
    """`512,1024` -> [512, 1024]. Raises UserError for anything else."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 0:
        raise UserError(f"--compressed is {text!r}; give whole numbers separated by commas, for example 512,1024,2048")
    return sorted(set(sizes))


def sweep(
    run_dir: Path | str,
    *,
    compressed: Sequence[int] | str,
    options: EvaluateOptions | None = None,
    split: str = "test",
    json_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate a run at each size; print a table, write the figures as JSON and a plot next to it.

    compressed: slots, or text like "512,1024". Under torchrun every process calls this. Raises UserError as `evaluate`
    does, and if the plot would replace something else.
    """
    sizes = sizes_from(compressed) if isinstance(compressed, str) else compressed
    require_writable(json_file, option="--json")
    plot = None if json_file is None else Path(json_file).with_suffix(".png")
    if plot is not None and plot.exists() and not Path(json_file or "").exists():
        raise UserError(f"{plot} exists, and the plot would replace it; give another --json, or move it away")
    with job(device=device, timeout_s=SCORING_TIMEOUT_S) as world:
        entries = []
        for size in sizes:
            chosen = replace(options or EvaluateOptions(), compressed=size)
            run = load(run_dir, device=world.device.type, **chosen.model_fields)
            entries.append(
                measure(run, chosen, split=split, world=world, show_progress=show_progress and world.is_first).figures
            )
        if world.is_first:
            if show_progress:
                print(format_table(entries))
            write_json(json_file, entries)
            if plot is not None:
                save_plot(plot, entries)
        return entries


def _trained_with(entries: Sequence[dict[str, Any]]) -> str:
    first = entries[0]
    return f"{first['recipe']}, {first['split']} split, {first['model']} at step {first['step']}"


def format_table(entries: Sequence[dict[str, Any]]) -> str:
    """Return a table with one line per size."""
    headline = entries[0]["headline"]
    lines = [
        f"{_trained_with(entries)}, memory {entries[0]['memory']}",
        f"compressed  {UNITS[headline]:>21}  nats/token",
    ]
    for entry in entries:
        lines.append(f"{entry['compressed']:>10}  {entry[headline]:>21.4f}  {entry['nats_per_token']:>10.4f}")
    if entries[0]["rows"]:
        lines.append(f"cut for speed, state {entries[0]['state']}")
    return "\n".join(lines)


def save_plot(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Draw the headline metric over the slots of compressed memory. Raises UserError if the PNG cannot be written."""
    from matplotlib.figure import Figure

    headline = entries[0]["headline"]
    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot([entry["compressed"] for entry in entries], [entry[headline] for entry in entries], marker="o")
    axes.set_xlabel("slots of compressed memory at evaluation")
    axes.set_ylabel(UNITS[headline])
    axes.set_title(_trained_with(entries), fontsize="medium")
    axes.grid(alpha=0.3)
    write_png(path, figure)
