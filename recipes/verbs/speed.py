"""`python -m recipes speed`: what carried memory saves, by context length (Dai et al. 2019, Table 9)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recipes.text import load
from waveform.analyses.state_reuse import ROUNDS, fresh_state, read_windows, seconds_per_token
from waveform.system.console import as_table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.panels import panels

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attention length -> times slower: 64 layers against 24, one GPU


def speed(
    run_dir: Path | str,
    *,
    contexts: Sequence[int],
    json_file: Path | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Time a Transformer-XL with memory against itself as a plain Transformer; print, return and write the figures.

    contexts: attention lengths. With memory of that length it reads a window and scores all of it; without memory, it
    reads that many tokens anew for each one that it scores. Raises UserError for other models.
    """
    check_files(json_file=json_file, plot_file=plot_file)
    if (name := load(run_dir, device=device).name) != "transformer_xl":
        raise UserError(
            f"{run_dir} is a run of {name}; speed needs one of Transformer-XL, as Table 9 has (model=transformer_xl)"
        )
    entries = [_measure(run_dir, length, device=device) for length in contexts]
    rows = [
        {
            "attention length": f"{entry['context']:,}",
            "ms/token, memory carried": f"{1e3 * entry['seconds_per_token']['carried']:.3f}",
            "ms/token, read anew": f"{1e3 * entry['seconds_per_token']['anew']:.2f}",
            "times slower": f"{entry['times_slower']:,.0f}",
            "paper": f"{PAPER[entry['context']]:,}" if entry["context"] in PAPER else "-",
        }
        for entry in entries
    ]
    print(as_table(rows, f"one row, {entries[0]['device']}; the same model both times"))
    threads = torch.get_num_threads()
    figures = {"run": str(run_dir), "rows": 1, "rounds": ROUNDS, "num_threads": threads, "contexts": entries}
    write_json(json_file, figures)
    if plot_file is not None:
        with panels(plot_file, 1, size=(6, 4), dpi=150) as (axes,):
            measured = [(entry["context"], entry["times_slower"]) for entry in entries]
            axes.plot(*zip(*measured, strict=True), marker="o", label="this run")
            axes.plot(
                *zip(*PAPER.items(), strict=True), marker="o", linestyle="--", color="0.5", label="Dai et al. 2019"
            )
            axes.set_yscale("log")
            axes.set(xlabel="tokens of context at evaluation", ylabel="times slower without carried memory")
            axes.legend()
    return figures


def _measure(run_dir: Path | str, length: int, *, device: str | None) -> dict[str, Any]:
    recurrent = load(run_dir, device=device, memory=length)
    plain = load(run_dir, device=device, memory=0, window=length)
    window = recurrent.window
    generator = torch.Generator().manual_seed(0)
    vocab_size = recurrent.config["dataset"]["vocab_size"]
    tokens = torch.randint(vocab_size, (1, length + window), generator=generator).to(recurrent.device)
    with torch.inference_mode():
        empty, fresh = (fresh_state(run.model, device=run.device) for run in (recurrent, plain))
        read = partial(read_windows, recurrent.model, window=window)
        full = read(tokens[:, :length], empty, num_scored=1)
        anew = partial(read_windows, plain.model, tokens[:, :length], fresh, window=length, num_scored=1)
        carried = partial(read, tokens[:, length:], full, num_scored=window)
        seconds = seconds_per_token({"carried": (carried, window), "anew": (anew, 1)})
    return {
        "context": length,
        "window": window,
        "seconds_per_token": seconds,
        "times_slower": seconds["anew"] / seconds["carried"],
        "device": str(recurrent.device),
    }
