"""Arguments that several verbs have in common."""

import argparse
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
CONFIG_DIR = argument(
    "--config-dir",
    type=Path,
    metavar="DIR",
    help="your own Hydra configs, for example DIR/preset/mine.yaml",
)
SPLIT = argument("--split", metavar="NAME", help="train, valid or test (default)")
JSON = argument("--json", dest="json_file", type=Path, metavar="FILE", help="write the figures there")
DEVICE = argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
DATA = argument("--data", type=Path, metavar="DIR", help="audio or a data set, if not the run's own")
MEMORIES = (
    argument("--memory", type=int, metavar="N", help="memory slots, if not as in training"),
    argument("--compressed", type=int, metavar="N", help="compressed slots, if not as in training"),
)
PROTOCOL = argument(
    "--protocol",
    choices=("utterance", "chunk", "carry", "clip"),
    help="reset state at each utterance or document, at each chunk, or never; clip: at each clip of "
    "data.piece_samples, as published figures have it (default: of audio utterance, or chunk if trained so; of text as "
    "in training)",
)
ROWS = argument(
    "--rows",
    type=int,
    metavar="N",
    help="of text: cut it into N pieces, each from empty memories: faster, a bit worse",
)
# How a run is scored
SCORING = (
    DATA,
    SPLIT,
    PROTOCOL,
    *MEMORIES,
    ROWS,
    argument("--average", type=int, metavar="N", help="score with the mean weights of the last N checkpoints"),
    argument(
        "--stride",
        type=int,
        metavar="N",
        help="move the window of a model without memory by N tokens at a time, and score the last N",
    ),
    argument(
        "--published-words",
        action="store_true",
        help="word-level perplexity divides by the number of words that the papers do (Rae et al. 2019, Table 2)",
    ),
)
TEMPERATURE = argument("--temperature", type=float, metavar="T", help="below 1: safer; 0: the likeliest (default 1)")
SEED = argument("--seed", type=int, metavar="N", help="of the samples (default 0)")
# Whether and how samples are drawn to measure how they sound
QUALITY = (
    argument(
        "--quality", action="store_true", help="of audio: also draw samples, and measure them beside clips and noise"
    ),
    argument("--num", type=int, metavar="N", help="with --quality: samples of each run (default 16)"),
    argument("--seconds", type=float, metavar="S", help="with --quality: of each (default 2)"),
    TEMPERATURE,
    SEED,
)
ENV = argument(
    "--env",
    metavar="NAME",
    help="of Gymnasium: the environment in which the agent was trained, to say that you trust its module or options",
)
ENVS = argument(
    "--envs",
    nargs="+",
    metavar="NAME",
    help="of Gymnasium: also evaluate in these environments, the same number of episodes in each",
)
# What agents play
PLAYING = (
    argument("--episodes", type=int, metavar="N", help="that an agent plays (default 256)"),
    argument(
        "--delays",
        type=int,
        nargs="+",
        metavar="N",
        help="of object matching: also evaluate where every corridor takes N steps",
    ),
    ENV,
    ENVS,
)


def plot(help: str) -> Argument:
    """A picture of the figures; help: what it shows."""
    return argument("--plot", dest="plot_file", type=Path, metavar="FILE.png", help=help)
