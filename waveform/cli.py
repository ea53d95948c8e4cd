"""The `waveform` command, as a table: each verb's function and arguments. Loads nothing heavy until a verb runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from waveform.command.arguments import (
    CONFIG_DIR,
    DEVICE,
    DYNAMIC,
    EXPORT,
    FROM,
    JSON,
    MEMORIES,
    NEW_RUN_DIR,
    OUT_PAGE,
    RACE_DIR,
    RATINGS,
    RUN_DIR,
    RUN_DIRS,
    SEARCH,
    SEARCH_DIR,
    SEED,
    SPLIT,
    TEMPERATURE,
    analysis,
    entrants,
    max_tokens,
    overrides,
    protocol,
    quality,
)
from waveform.command.table import Verb, argument, run_command

_TRAIN_EPILOG = """\
settings (Hydra overrides), any number, after the paths:
  model=compressive_transformer|transformer_xl|wavenet|lstm   or any model that an installed package registers
  preset=demo|ten_minutes|hour|small|speech_paper|clips_4m    sizes and schedule; small is the default
  train.max_steps=1000 train.max_seconds=600 train.batch_size=8 train.lr=3e-4 train.state=utterance
  model.num_layers=4 model.compression=max seed=1             see --print-config for all of them
  data.labels=folder|FILE.csv|none                            speakers, words, ...: the first folder's name, or a CSV
                                                              of path,label; then sample ... --label NAME
A run folder that exists with the same settings is resumed.

your own voice, from a run that exists (a preset sets the schedule; the model is that of the run):
  waveform train MY_AUDIO RUN_DIR --from OTHER_RUN_DIR train.max_seconds=600 train.lr=1e-3

several GPUs:
  torchrun --nproc-per-node=8 -m waveform train AUDIO_DIR RUN_DIR
"""
_SOURCE = argument(
    "source", type=Path, metavar="AUDIO_DIR|DATA_DIR", help="a folder of audio, or a data set that `prepare` made"
)
_DATA = argument("--data", type=Path, metavar="DIR", help="audio or a data set, if not the run's own")
_PLOT = argument(
    "--plot",
    dest="plot_file",
    type=Path,
    metavar="FILE.png",
    help="draw validation NLL against updates, samples seen and seconds of training",
)
_PROTOCOL = protocol("utterance, or chunk if trained so", into="options", clips=True)

VERBS = (
    Verb(
        "prepare",
        "turn a folder of audio into a data set of tokens (8-bit mu-law at the paper's rate by default), with a report",
        "waveform.verbs.prepare:prepare",
        (
            argument(
                "audio_dir", type=Path, metavar="AUDIO_DIR", help="wav, flac, ogg, opus, mp3, aiff, in any folder"
            ),
            argument("data_dir", type=Path, metavar="DATA_DIR", help="created, or brought up to date"),
            argument(
                "--corpus",
                metavar="NAME",
                help="AUDIO_DIR is this published corpus: sc09, youtubemix, beethoven, ljspeech, libritts or vctk",
            ),
            argument("--partial", action="store_true", help="with --corpus: a part of it is enough"),
            overrides(
                "data.split.valid=0.1 data.split.by=folder; data.labels=folder or FILE.csv: labels of utterances"
            ),
            CONFIG_DIR,
        ),
        computes=False,
    ),
    Verb(
        "train",
        "train a model on a folder of audio or a prepared data set",
        "waveform.verbs.train:train",
        (
            _SOURCE,
            NEW_RUN_DIR,
            *FROM,
            argument(
                "--print-config",
                action="store_true",
                help="print the resolved configuration and stop",
                instead="waveform.speech:print_config",
            ),
            overrides("train.max_steps=1000 model=wavenet"),
            CONFIG_DIR,
        ),
        epilog=_TRAIN_EPILOG,
        configs={"origin": "waveform.runs.origin:Origin"},
        report="waveform.verbs.train:report",
    ),
    Verb(
        "tune",
        "search a model's settings on your own audio: equal training time for each trial, judged by validation NLL",
        "waveform.verbs.tune:tune",
        (
            _SOURCE,
            SEARCH_DIR,
            *SEARCH,
            JSON,
            overrides("model=wavenet train.batch_size=8; what you give is not searched; preset=demo is the default"),
            CONFIG_DIR,
        ),
        configs={"config": "waveform.runs.search:SearchConfig"},
    ),
    Verb(
        "evaluate",
        "print a run's NLL on held-out audio, in nats and bits per sample",
        "waveform.verbs.evaluate:evaluate",
        (RUN_DIR, _DATA, SPLIT, JSON, _PROTOCOL, *MEMORIES, *DYNAMIC, *quality("quality"), DEVICE),
        configs={
            "options": "waveform.runs.scoring:EvaluateOptions",
            "quality": "waveform.quality.measure:QualityConfig",
        },
    ),
    Verb(
        "sample",
        "generate audio into WAV files or stdout, or play it, as it is drawn",
        "waveform.verbs.sample:sample",
        (
            RUN_DIR,
            argument(
                "--out",
                into="output",
                metavar="DIR|-",
                help="folder for the WAV files; - writes one WAV to stdout, for example for `| aplay`",
            ),
            argument("--raw", into="output", action="store_true", help="with --out -: 16-bit PCM without a WAV header"),
            argument("--play", into="output", action="store_true", help="play it as it is drawn; needs waveform[play]"),
            argument("--num", type=int, metavar="N", help="how many, generated side by side (default 1)"),
            argument(
                "--seconds", type=float, metavar="S", help="length of each (default 1); inf with --play or --out -"
            ),
            TEMPERATURE,
            argument(
                "--top-k", into="sampling", type=int, metavar="K", help="draw from the K most probable classes only"
            ),
            argument(
                "--top-p",
                into="sampling",
                type=float,
                metavar="P",
                help="draw from the fewest classes that reach probability P",
            ),
            SEED,
            argument(
                "--label",
                into="sampling",
                metavar="NAME",
                help="of a run with labels: what to sample (a speaker, a word, ...); each: --num of every label",
            ),
            argument("--prime", type=Path, metavar="FILE", help="audio that every sample begins with and continues"),
            argument(
                "--int8",
                into="sampling",
                action="store_true",
                help="8-bit weights on a CPU: faster; prints what it costs in NLL",
            ),
            DEVICE,
        ),
        configs={"output": "waveform.audio.sinks:Output", "sampling": "waveform.verbs.sample:SampleConfig"},
    ),
    Verb(
        "export",
        "write a trained run, without its data, to one file from which others can sample, score and go on training",
        "waveform.verbs.export:export",
        (RUN_DIR, *EXPORT),
    ),
    Verb(
        "compare",
        "compare runs on the same test audio: NLL, difference to WaveNet, size and speed",
        "waveform.verbs.compare:compare",
        (
            RUN_DIRS,
            _DATA,
            SPLIT,
            JSON,
            _PLOT,
            protocol("utterance; with --published: clip", into="config", clips=True),
            argument(
                "--published",
                into="config",
                metavar="NAME",
                help="show what others published for a corpus (sc09, youtubemix, beethoven) beside runs on all of it",
            ),
            *quality("config"),
            DEVICE,
        ),
        configs={"config": "waveform.verbs.compare:CompareConfig"},
    ),
    Verb(
        "race",
        "train models in turn, for the same budget and with several seeds, and compare them on the test audio",
        "waveform.verbs.race:race",
        (
            _SOURCE,
            RACE_DIR,
            *entrants("compressive_transformer transformer_xl wavenet", into="entrants"),
            JSON,
            _PLOT,
            overrides("preset=demo train.max_seconds=600"),
            CONFIG_DIR,
        ),
        configs={"entrants": "waveform.runs.race:Entrants"},
    ),
    Verb(
        "bench",
        "measure training, memory, sampling and data preparation, each against this machine's limit",
        "waveform.verbs.bench:bench",
        (
            argument("--model", dest="models", nargs="+", metavar="NAME", help="default: every registered model"),
            argument("--preset", dest="presets", nargs="+", metavar="NAME", help="default: small speech_paper"),
            argument(
                "--batch-size",
                type=int,
                metavar="B",
                setting="train.batch_size",
                help="rows in training (default: 1 on a CPU, 32 on a GPU)",
            ),
            argument("--audio-minutes", type=float, metavar="N", help="audio to prepare; 0: none (default 10)"),
            JSON,
            DEVICE,
            overrides("model.num_layers=2"),
            CONFIG_DIR,
        ),
    ),
    Verb(
        "analyse",
        "where runs attend, how they compress, how far back they look, what carried state saves",
        "waveform.verbs.analyse:analyse",
        (RUN_DIRS, _DATA, *analysis("sample"), JSON, DEVICE),
        configs={"config": "waveform.analyses.analyse:AnalysisConfig"},
    ),
    Verb(
        "report",
        "write a page to listen to and to read: samples beside real speech, NLL, attention, settings",
        "waveform.verbs.report:report",
        (
            argument("run_dirs", type=Path, nargs="*", metavar="RUN_DIR", help="several stand side by side"),
            OUT_PAGE,
            argument(
                "--listen",
                type=Path,
                nargs="+",
                default=(),
                metavar="RUN_DIR",
                help="further runs, at the same rate, of which only sounds are shown",
            ),
            argument(
                "--num", into="config", type=int, metavar="N", help="sounds of each run at each temperature (default 2)"
            ),
            argument("--seconds", into="config", type=float, metavar="S", help="length of each sound (default 2)"),
            argument(
                "--real",
                into="config",
                type=int,
                metavar="N",
                help="recordings, whose beginnings every run continues (default 4)",
            ),
            argument(
                "--temperatures",
                into="config",
                type=float,
                nargs="+",
                metavar="T",
                help="default 1 0.9; the first one for continuations too",
            ),
            replace(SEED, into="config"),
            argument(
                "--quality",
                into="config",
                type=int,
                metavar="N",
                help="measure figures of quality by N sounds of each run (default 0: none)",
            ),
            _DATA,
            replace(SPLIT, into="config"),
            max_tokens("samples to score, longest utterances first (default: all)"),
            JSON,
            DEVICE,
            RATINGS,
        ),
        configs={"config": "waveform.verbs.report:ReportConfig"},
    ),
    Verb(
        "demo",
        "prepare, train, compare and sample bundled speech, in minutes on two CPU cores",
        "waveform.verbs.demo:demo",
        (
            argument("--out", dest="out_dir", type=Path, metavar="DIR", help="default: waveform-demo"),
            overrides("train.max_seconds=10"),
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    description = "Model raw audio waveforms: Compressive Transformer, Transformer-XL and WaveNet."
    return run_command("waveform", "waveform", description, VERBS, arguments)
