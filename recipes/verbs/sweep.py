"""`python -m recipes sweep`: one run at several sizes of its memories (Rae et al. 2019, Tables 8 and 9)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

from recipes.metrics import UNITS
from recipes.text import Text
from waveform.ranks.distributed import SCORING_TIMEOUT_S, job
from waveform.runs.scoring import EvaluateOptions, own_tokens
from waveform.system.console import as_table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.panels import panels


def sweep(
    run_dir: Path | str,
    *,
    compressed: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    options: EvaluateOptions | None = None,
    json_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Evaluate a run at each size; print a table, write the figures as JSON and a plot next to it.

    compressed, memory: slots; with both, every pair. All are scored on the validation split, and only the best on the
    test split, because the best of several test scores would be too good. Returns `sizes`, what `evaluate` gives for
    each, and `chosen`, what it gives on the test split. Under torchrun every process calls this. Raises UserError as
    `evaluate` does, and if the plot would replace another file.
    """
    if compressed is None and memory is None:
        raise UserError("name the sizes with --compressed, --memory or both, for example --compressed 512,1024,2048")
    options, domain = options or EvaluateOptions(), Text()
    as_trained: list[int | None] = [None]
    pairs = list(product(compressed or as_trained, memory or as_trained))
    plot = None if json_file is None else Path(json_file).with_suffix(".png")
    if plot is not None and plot.exists() and not Path(json_file or "").exists():
        raise UserError(f"{plot} exists, and the plot would replace it; give another --json, or move it away")
    check_files(json_file=json_file, plot_file=plot)
    with job(device=device, timeout_s=SCORING_TIMEOUT_S, show_progress=show_progress) as world:

        def figures(sizes: tuple[int | None, ...], of: str) -> dict[str, Any]:
            sized = replace(options, compressed=sizes[0], memory=sizes[1], split=of)
            run = domain.load_to_score(run_dir, sized, world=world)
            return domain.measure(run, own_tokens(run, split=of), sized, world=world).figures

        entries = [figures(sizes, "valid") for sizes in pairs]
        best = min(entries, key=lambda entry: entry[entry["headline"]])
        result = {"sizes": entries, "chosen": figures(pairs[entries.index(best)], "test")}
        if world.shows:
            print(format_table(result))
        if world.is_first:
            write_json(json_file, result)
            if plot is not None:
                save_plot(plot, result)
        return result


def format_table(result: dict[str, Any]) -> str:
    """Return a table with one line per size, and what the best of them gives on the test split."""
    entries, chosen = result["sizes"], result["chosen"]
    headline = entries[0]["headline"]
    rows = [
        {
            "memory": str(entry["memory"]),
            "compressed": "-" if entry["compressed"] is None else str(entry["compressed"]),
            UNITS[headline]: f"{entry[headline]:.4f}",
            "nats/token": f"{entry['nats_per_token']:.4f}",
        }
        for entry in entries
    ]
    compressed = "" if chosen["compressed"] is None else f", compressed {chosen['compressed']}"
    best = f"memory {chosen['memory']}{compressed}, on the test split: {chosen[headline]:.4f}"
    cut = [f"cut for speed, state {chosen['state']}"] if chosen["rows"] else []
    return "\n".join([_title(entries[0]), as_table(rows, f"the best of these, {best}", *cut)])


def _title(entry: dict[str, Any]) -> str:
    return f"{entry['recipe']}, {entry['split']} split, {entry['model']} at step {entry['step']}"


def save_plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the headline metric over the slots that were swept. Raises UserError if the PNG cannot be written."""
    entries, chosen = result["sizes"], result["chosen"]
    headline = entries[0]["headline"]
    # With both memories swept, a line for each size of the uncompressed one.
    along = "compressed" if any(entry["compressed"] != entries[0]["compressed"] for entry in entries) else "memory"
    across = "memory" if along == "compressed" else "compressed"
    by_line = sorted(entries, key=lambda entry: (entry[across] or 0, entry[along]))
    with panels(path, 1, size=(6, 4), dpi=150) as (axes,):
        for size, line in groupby(by_line, key=lambda entry: entry[across]):
            points = [(entry[along], entry[headline]) for entry in line]
            label = entries[0]["split"] if size is None else f"{entries[0]['split']}, {across} {size}"
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.plot([chosen[along]], [chosen[headline]], marker="*", markersize=12, linestyle="", label="test, the best")
        axes.set_xlabel(f"slots of {'compressed memory' if along == 'compressed' else 'memory'} at evaluation")
        axes.set(title=_title(entries[0]), ylabel=UNITS[headline])
        axes.legend()
