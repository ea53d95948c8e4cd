"""`tune`: searches the settings that reach the best validation NLL on one's own data in a given time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waveform.domain import TrainRequest, token_domain_of
from waveform.system.atomic import require_writable
from waveform.system.errors import UserError
from waveform.system.output import write_json
from waveform.tuning.config import SearchConfig


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
    for a folder with anything else, and if Optuna is not installed.
    """
    try:
        from optuna import logging
    except ImportError as error:
        raise UserError('tune needs Optuna: pip install "waveform[tune]"') from error
    from waveform.tuning.report import report_search
    from waveform.tuning.search import search

    logging.set_verbosity(logging.WARNING)
    source, out_dir, domain = Path(source), Path(out_dir), token_domain_of(source)
    config = config or SearchConfig()
    require_writable(json_file, option="--json")
    if not any(override.startswith("preset=") for override in overrides):
        overrides = [f"preset={domain.tune_preset}", *overrides]
    own = None if config_dir is None else Path(config_dir)
    request = TrainRequest(source, overrides=overrides, config_dir=own)
    found = search(out_dir, request, domain, config, show_progress=show_progress)
    write_json(json_file, found.entries)
    report_search(found, out_dir, request, domain, show_progress=show_progress)
    return found.entries
