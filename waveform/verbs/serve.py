"""`waveform serve`: serves a web page on which one hears sounds of runs as they are drawn."""

from collections.abc import Sequence
from pathlib import Path

from waveform.ranks.distributed import choose_device
from waveform.runs.named import bundled_names
from waveform.speech.run import load
from waveform.speech.sound_server import ServeConfig, SoundServer
from waveform.system.console import printable, say
from waveform.system.errors import UserError


def serve(
    run_dirs: Sequence[Path | str] | Path | str = (), config: ServeConfig | None = None, *, device: str | None = None
) -> None:
    """Serve a page with the runs on audio in `run_dirs` (none: those that come with waveform) until it is interrupted.

    Raises UserError as `load` does, if a run is named twice, and if the address is taken.
    """
    run_dirs = [run_dirs] if isinstance(run_dirs, str | Path) else run_dirs
    config, place = config or ServeConfig(), choose_device(device)
    names = [printable(str(run_dir)) for run_dir in run_dirs or bundled_names()]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{min(twice)} is named twice; name each run once")
    runs = {name: load(run_dir, device=place) for name, run_dir in zip(names, run_dirs or names, strict=True)}
    with SoundServer(runs, config) as server:
        say(f"open {server.address} in a browser; Ctrl-C ends this")
        server.serve_forever()
