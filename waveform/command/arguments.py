"""Arguments that verbs of both commands have in common."""

import argparse
from dataclasses import replace
from pathlib import Path

from waveform.command.table import OVERRIDES, Argument, argument, is_setting


def _new_run_dir(text: str) -> Path:
    """A run folder to train into. Raises ArgumentTypeError if a setting stands in its place."""
    if is_setting(text):
        raise argparse.ArgumentTypeError(f"name the run folder before the settings; for one called {text!r}, ./{text}")
    return Path(text)


def overrides(example: str) -> Argument:
    """`key=value` settings."""
    return argument(OVERRIDES, nargs="*", metavar="key=value", help=f"settings, for example {example}")


_RUN = "a run folder, an archive that `export` made, or the name of a bundled run"
RUN_DIR = argument("run_dir", type=Path, metavar="RUN_DIR", help=_RUN)
RUN_DIRS = argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help=f"{_RUN}; several are compared")
NEW_RUN_DIR = argument(
    "run_dir", type=_new_run_dir, metavar="RUN_DIR", help="where the run is kept; resumed if it exists"
)
FROM = (
    argument(
        "--from",
        dest="run",
        into="origin",
        type=Path,
        metavar="RUN_DIR",
        help="begin with the weights and settings of another run, archived or bundled; settings that you give, or a "
        "preset, take precedence",
    ),
    argument(
        "--from-optimiser",
        dest="optimiser",
        into="origin",
        action="store_true",
        help="take over what its optimiser remembers too",
    ),
)
CONFIG_DIR = argument(
    "--config-dir",
    type=Path,
    metavar="DIR",
    help="your own Hydra configs, for example DIR/preset/mine.yaml",
)
SPLIT = argument("--split", metavar="NAME", help="train, valid or test (default)")
JSON = argument("--json", dest="json_file", type=Path, metavar="FILE", help="write the figures there")
DEVICE = argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")

# How a run is scored; fields of `EvaluateOptions`.
MEMORIES = (
    argument("--memory", into="options", type=int, metavar="N", help="memory slots, if not as in training"),
    argument("--compressed", into="options", type=int, metavar="N", help="compressed slots, if not as in training"),
)
EXPORT = (
    argument("file", type=Path, metavar="FILE", help="a new file, a zip archive"),
    argument(
        "--optimiser",
        action="store_true",
        help="include what only training needs, to resume it; the file is three to ten times as large",
    ),
)
AVERAGE = argument(
    "--average", into="options", type=int, metavar="N", help="score with the mean weights of the last N checkpoints"
)
STRIDE = argument(
    "--stride",
    into="options",
    type=int,
    metavar="N",
    help="move the window of a model without memory by N tokens at a time, and score the last N",
)
DYNAMIC = (
    argument("--dynamic", into="options", action="store_true", help="score again while learning from what was scored"),
    argument(
        "--dynamic-optimiser",
        into="options",
        choices=("sgd", "adam", "continued"),
        help="sgd (default) or adam, which start afresh; continued: Adam as training left it",
    ),
    argument(
        "--dynamic-lr",
        into="options",
        type=float,
        metavar="LR",
        help="default: 3e-2 with sgd, 3e-5 with adam; with continued, that of training where it ended",
    ),
)


def protocol(default: str, *, into: str | None = None, clips: bool = False) -> Argument:
    """When state resets while a run is scored; default: what the help says of it; clips: offer `clip`, too."""
    return argument(
        "--protocol",
        into=into,
        choices=("utterance", "chunk", "carry", *["clip"] * clips),
        help="reset state at each utterance, at each chunk, or never"
        + "; clip: at each clip of data.piece_samples, as published figures have it" * clips
        + f" (default: {default})",
    )


def quality(into: str) -> tuple[Argument, ...]:
    """Whether and how samples are drawn to measure how they sound, fields of `QualityConfig`."""
    return (
        argument(
            "--quality",
            into=into,
            action="store_true",
            help="also draw samples, and measure them beside real clips and noise",
        ),
        argument("--num", into=into, type=int, metavar="N", help="with --quality: samples of each run (default 16)"),
        argument("--seconds", into=into, type=float, metavar="S", help="with --quality: of each (default 2)"),
        replace(TEMPERATURE, into=into),
        replace(SEED, into=into),
    )


def max_tokens(help: str) -> Argument:
    """At most how many tokens are read; help: what is said of it."""
    return argument("--tokens", dest="max_tokens", into="config", type=int, metavar="N", help=help)


def analysis(unit: str) -> tuple[Argument, ...]:
    """What `analyse` reads, fields of `AnalysisConfig`, and draws; unit: what the help calls a token."""
    return (
        replace(SPLIT, into="config"),
        max_tokens(f"{unit}s that each run reads at most for each figure (default 200000)"),
        argument(
            "--context-step", into="config", type=int, metavar="N", help=f"{unit}s from one context length to the next"
        ),
        *(replace(size, into="config") for size in MEMORIES),
        argument("--plot", dest="plot_file", type=Path, metavar="FILE.png", help="draw the figures there"),
    )


SEARCH_DIR = argument(
    "out_dir", type=Path, metavar="DIR", help="where the search and its runs are kept; continued if it exists"
)
# What a search does; fields of `SearchConfig`.
SEARCH = (
    argument(
        "--budget",
        into="config",
        metavar="TIME",
        help="training of each trial, for example 90s, 10min (default) or 1h",
    ),
    argument("--trials", into="config", type=int, metavar="N", help="how many in all (default 20)"),
    argument("--seed", into="config", type=int, metavar="N", help="of the search (default 0)"),
    argument(
        "--space",
        into="config",
        type=Path,
        metavar="FILE.yaml",
        help="what to search, if not what comes with the model (docs/tuning.md)",
    ),
)
RACE_DIR = argument("out_dir", type=Path, metavar="OUT_DIR", help="a run folder of each model and seed; resumed")


def entrants(models: str, *, into: str) -> tuple[Argument, ...]:
    """Who takes part in a race, fields of `Entrants`; models: what the help says of the default."""
    return (
        argument("--models", into=into, nargs="+", metavar="NAME", help=f"default: {models}"),
        argument("--seeds", into=into, type=int, metavar="N", help="trainings of each model (default 1)"),
    )


TEMPERATURE = argument(
    "--temperature", into="sampling", type=float, metavar="T", help="below 1: safer; 0: the likeliest (default 1)"
)
SEED = argument("--seed", into="sampling", type=int, metavar="N", help="of the samples (default 0)")

OUT_PAGE = argument("--out", type=Path, metavar="FILE.html", help="the page (default report.html)")
RATINGS = argument(
    "--ratings",
    type=Path,
    nargs="+",
    metavar="FILE",
    help="ratings that a page's blind mode exported: print each run's mean with its interval, and write no page",
    instead="waveform.report_page.ratings:rate",
)
