"""`tune`: searches for the settings that reach the best validation NLL on one's own data in a given time."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from waveform.domain import TrainRequest, token_domain_of
from waveform.runs.settings import given_by, to_yaml
from waveform.runs.space import SearchConfig, shown
from waveform.system.atomic import require_writable
from waveform.system.console import as_table, counted
from waveform.system.errors import UserError
from waveform.system.output import write_bytes, write_json

_NUM_ROWS = 10  # of the table


def tune(
    source: Path | str,
    out_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config: SearchConfig | None = None,
    config_dir: Path | str | None = None,
    json_file: Path | str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Search the settings of one model on `source` (a folder of audio, or a prepared data set), in `out_dir`.

    Every trial is a run `out_dir`/trial-NNN with the same budget; its figure is the NLL of the validation split, of
    about 2 million tokens of it if it has more. Prints the best, and returns (and writes) an entry for each trial,
    the best first; the best trial's settings become `out_dir`/preset/best.yaml. Called again, it continues.

    overrides: `key=value` settings of every trial, which are not searched. Raises UserError for bad settings or data,
    for a folder of other files, if Optuna is not installed, and if no trial is complete.
    """
    try:
        from optuna import logging
    except ImportError as error:
        raise UserError('tune needs Optuna: pip install "waveform[tune]"') from error
    from waveform.tuning.search import search

    logging.set_verbosity(logging.WARNING)
    source, out_dir, domain = Path(source), Path(out_dir), token_domain_of(source)
    config = config or SearchConfig()
    require_writable(json_file, option="--json")
    if "preset" not in given_by(overrides):
        overrides = [f"preset={domain.tune_preset}", *overrides]
    request = TrainRequest(source, overrides=overrides, config_dir=config_dir)
    entries, data_dir = search(out_dir, request, domain, config, show_progress=show_progress)
    write_json(json_file, entries)
    if not entries:
        raise UserError(
            "no trial has finished yet: other machines are running all of them; wait, or give more --trials"
        )
    best = entries[0]
    if show_progress:
        print(_table(entries[:_NUM_ROWS], domain.unit))
        if (num_others := len(entries) - _NUM_ROWS) > 0:
            print(f"and {counted(num_others, 'other trial')}")
    if best["state"] != "complete":
        raise UserError(f"no trial is complete; the last one failed: {entries[-1]['reason']}")
    settings = domain.compose(replace(request, overrides=best["settings"]))
    path = out_dir / "preset" / "best.yaml"  # every setting of model, data and training
    sections = {name: values for name, values in settings.items() if isinstance(values, dict)}
    sections["model"] = {name: value for name, value in settings["model"].items() if name != "name"}
    write_bytes(path, to_yaml(sections).encode())
    if show_progress:
        train = ["waveform", "train", str(data_dir), "RUN_DIR"]
        chosen = [f"model={settings['model']['name']}", "preset=best", f"seed={settings['seed']}"]
        run = best["run"] or "on another machine"
        print(f"the best run is {run}; to train it again, with {path} (longer: with another train.max_seconds):")
        print(f"    {shlex.join([*train, '--config-dir', str(out_dir), *chosen])}")
    return entries


def _table(entries: list[dict[str, Any]], unit: str) -> str:
    rows = []
    for entry in entries:
        nats, bits = entry["nats_per_token"], entry["bits_per_token"]
        share = max(entry["nll_nats_by_share_of_budget"], default="0")
        rows.append(
            {
                "trial": str(entry["trial"]),
                f"nats/{unit}": "-" if nats is None else f"{nats:.4f}",
                f"bits/{unit}": "-" if bits is None else f"{bits:.4f}",
                "state": entry["state"] + (f" at {float(share):.0%}" if entry["state"] == "pruned" else ""),
                "parameters": f"{entry['num_parameters']:,}" if "num_parameters" in entry else "-",
                f"{unit}s seen": f"{entry['train_tokens_seen']:,}" if "train_tokens_seen" in entry else "-",
                "settings": shown(entry["drawn"]),
            }
        )
    return as_table(rows)
