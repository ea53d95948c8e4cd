"""Arguments that several verbs have in common."""

import argparse
from functools import partial

from waveform.command.table import OVERRIDES, Argument, decimal, number, path, switch


def overrides(example: str) -> Argument:
    """`key=value` settings."""
    optional = {"nargs": "*", "default": argparse.SUPPRESS}  # without it argparse says that settings are required
    return Argument(OVERRIDES, f"settings, for example {example}", metavar="key=value", **optional)


def setting(flag: str, name: str, help: str, *, metavar: str) -> Argument:
    """An option that is short for a setting."""
    return Argument(flag, help, dest=OVERRIDES, action="append", type=f"{name}={{}}".format, metavar=metavar)


plot = partial(path, "--plot", dest="plot_file", metavar="FILE.png")  # of the figures; its help says what it shows

_RUN = "a run folder, an exported run, the name of a bundled run, or hf://owner/name@revision"
RUN_DIR = path("run_dir", _RUN, metavar="RUN_DIR")
RUN_DIRS = path("run_dirs", f"{_RUN}; several are compared", nargs="+", metavar="RUN_DIR")
NEW_RUN_DIR = path("run_dir", "where the run is kept; resumed if it exists", metavar="RUN_DIR")
CONFIG_DIR = path("--config-dir", "your own Hydra configs, for example DIR/preset/mine.yaml", metavar="DIR")
SPLIT = Argument("--split", "train, valid or test (default)", metavar="NAME")
JSON = path("--json", "write the figures there", dest="json_file", metavar="FILE")
DEVICE = Argument("--device", "default: a CUDA GPU if there is one", choices=("cpu", "cuda", "mps"))
DATA = path("--data", "audio or a data set to use instead of the run's own", metavar="DIR")
MEMORIES = (
    number("--memory", "memory slots, if not as in training"),
    number("--compressed", "compressed slots, if not as in training"),
)
PROTOCOL = Argument(
    "--protocol",
    "when state is reset: utterance, at each utterance or document; chunk, at each chunk; carry, never; clip, at each "
    "clip of data.piece_samples, as for published figures (default for audio: utterance, or chunk if it was trained "
    "so; for text: as in training)",
    choices=("utterance", "chunk", "carry", "clip"),
)
ROWS = number(
    "--rows",
    "cut what is longer than 1/N of the split into pieces that begin with empty memories: faster, NLL a bit higher",
)
# How a run is scored
SCORING = (
    DATA,
    SPLIT,
    PROTOCOL,
    *MEMORIES,
    ROWS,
    number("--average", "score with the mean weights of the last N checkpoints"),
    number("--stride", "move the window of a model without memory by N tokens at a time, and score the last N"),
    switch(
        "--published-words",
        "for pg19: compute word-level perplexity with the paper's numbers of words (Rae et al. 2019, Table 2)",
    ),
)
TEMPERATURE = decimal(
    "--temperature", "of sampling: lower is less varied; 0: always the most probable (default 1)", metavar="T"
)
SEED = number("--seed", "seed of the samples (default 0)")
# Whether and how samples are drawn to measure how they sound
QUALITY = (
    switch("--quality", "for audio: also draw samples, and compare them with real clips and noise"),
    number("--num", "with --quality: samples of each run (default 16)"),
    decimal("--seconds", "with --quality: length of each sample (default 2)", metavar="S"),
    TEMPERATURE,
    SEED,
)
ENV = Argument(
    "--env",
    "for Gymnasium: name the environment in which the agent was trained, to say that you trust its code and options",
    metavar="NAME",
)
ENVS = Argument(
    "--envs",
    "for Gymnasium: also evaluate in these environments, the same number of episodes in each",
    nargs="+",
    metavar="NAME",
)
# What agents play
PLAYING = (
    number("--episodes", "for agents: how many to play (default 256)"),
    number("--delays", "for object matching: also evaluate with corridors that take N steps", nargs="+"),
    ENV,
    ENVS,
)
