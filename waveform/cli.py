"""The `waveform` command, as a table: each verb's function and arguments. Loads nothing heavy until a verb runs.

`RUN_VERBS` are for every run, whatever it models; `python -m recipes` has them too.
"""

from collections.abc import Sequence

from waveform.command import arguments as common
from waveform.command.table import OF_DOMAIN, Argument, Verb, decimal, number, path, run_command, switch

_TRAIN_EPILOG = """\
settings (Hydra overrides), any number, after the paths:
  model=compressive_transformer|transformer_xl|wavenet|lstm   or any model that an installed package registers
  preset=demo|ten_minutes|hour|small|speech_paper|clips_4m    sizes and schedule; small is the default
  train.max_steps=1000 train.max_seconds=600 train.batch_size=8 train.lr=3e-4 train.state=utterance
  model.num_layers=4 model.compression=max seed=1             see --print-config for all of them
  data.labels=folder|FILE.csv|none                            speakers, words, ...: the first folder's name, or a CSV
                                                              of path,label; then sample ... --label NAME
for text (`python -m recipes prepare` makes data sets of it):
  preset=paper|small|cpu|smoke    the papers' sizes; an hour on one GPU (default); a minute or two on a CPU; seconds
  preset=dai_12l|dai_18l|dai_24l|dai_standard|dai_base|dai_large|dai   Transformer-XL's own, each on some recipes
  study=table5_max                a row of the paper's tables, on top of preset=paper (recipes/conf/studies.yaml)
for agents, which learn from rewards and have no data: SOURCE is object_matching or rl
  train object_matching RUN_DIR task.delay=8 model=compressive_transformer|transformer_xl|lstm
  train rl RUN_DIR env=MiniGrid-MemoryS7-v0     (pip install "waveform[rl]")
  preset=paper|cpu|smoke    sizes of Rae et al. 2019, section 5.7; minutes on a CPU core (default); seconds
A run folder that exists with the same settings is resumed.

your own voice, beginning with a run that exists (a preset sets the schedule; the model is that of the run):
  waveform train MY_AUDIO RUN_DIR --from OTHER_RUN_DIR train.max_seconds=600 train.lr=1e-3

several GPUs:
  torchrun --nproc-per-node=8 -m waveform train SOURCE RUN_DIR
"""
_SOURCE = path("source", "a folder of audio, or a data set that `prepare` made, of audio or text", metavar="SOURCE")
_PLOT = common.plot("draw validation NLL in training; bits per answer by distance (recall); agents' returns")
# The options that `evaluate` and `compare` both end with
_FIGURES = (*common.QUALITY, *common.PLAYING, common.JSON, _PLOT, common.DEVICE)

RUN_VERBS = (
    Verb(
        "train",
        "train a model on a folder of audio or a prepared data set, or an agent",
        "waveform.verbs.train:train",
        (
            _SOURCE,
            common.NEW_RUN_DIR,
            path(
                "--from",
                "begin with the weights and settings of another run (a folder, an archive or a bundled run); settings "
                "that you give, or a preset, take precedence",
                dest="run",
                metavar="RUN_DIR",
            ),
            switch("--from-optimiser", "with --from: take over the other run's optimiser state too", dest="optimiser"),
            switch(
                "--print-config",
                "print the resolved configuration and stop; SOURCE may be a recipe's name",
                instead="waveform.verbs.train:print_config",
            ),
            common.overrides("train.max_steps=1000 model=wavenet"),
            common.CONFIG_DIR,
        ),
        epilog=_TRAIN_EPILOG,
        continues=True,
    ),
    Verb(
        "tune",
        "search a model's settings on your own data: equal training time for each trial, judged by validation NLL",
        "waveform.verbs.tune:tune",
        (
            _SOURCE,
            path("out_dir", "where the search and its runs are kept; continued if it exists", metavar="DIR"),
            Argument("--budget", "training time of each trial, for example 90s, 10min (default) or 1h", metavar="TIME"),
            number("--trials", "number of trials in all (default 20)"),
            number("--seed", "seed of the search (default 0)"),
            path("--space", "search space, if not the model's own (docs/performance.md)", metavar="FILE.yaml"),
            Argument(
                "--storage", "database in which several machines share the search (docs/performance.md)", metavar="URL"
            ),
            common.JSON,
            common.overrides(
                "model=wavenet train.batch_size=8; settings given here stay fixed; the default preset is demo, and cpu "
                "for text"
            ),
            common.CONFIG_DIR,
        ),
        continues=True,
    ),
    Verb(
        "evaluate",
        "print a run's NLL on held-out data, and the metrics of its domain",
        OF_DOMAIN,
        (
            common.RUN_DIR,
            *common.SCORING,
            switch("--dynamic", "score again while learning from what was scored"),
            Argument(
                "--dynamic-optimiser",
                "sgd (default) or adam, which start afresh; continued: Adam as training left it",
                choices=("sgd", "adam", "continued"),
            ),
            decimal(
                "--dynamic-lr",
                "default: 3e-2 with sgd, 3e-5 with adam; with continued, the last learning rate of training",
                metavar="LR",
            ),
            *_FIGURES,
        ),
    ),
    Verb(
        "sample",
        "generate audio: into WAV files, to stdout, or played as it is drawn; or print text",
        OF_DOMAIN,
        (
            common.RUN_DIR,
            Argument(
                "--out",
                "folder for the WAV files, or one file; - writes one WAV to stdout, for example for `| aplay`",
                metavar="DIR|FILE.wav|-",
            ),
            switch("--raw", "with --out -: 16-bit PCM without a WAV header"),
            switch("--play", "play it as it is drawn; needs waveform[play]"),
            number("--num", "number of sounds, generated side by side (default 1)"),
            decimal("--seconds", "length of each sound (default 1); inf with --play or --out -", metavar="S"),
            common.TEMPERATURE,
            number("--top-k", "draw from the K most probable classes only", metavar="K"),
            decimal(
                "--top-p", "draw from the fewest classes that reach probability P (default for text: 0.98)", metavar="P"
            ),
            common.SEED,
            Argument(
                "--label",
                "for a run with labels: what to sample (a speaker, a word, ...); each: --num of every label",
                metavar="NAME",
            ),
            path("--prime", "audio that every sample begins with and continues", metavar="FILE"),
            switch("--int8", "8-bit weights on a CPU: faster; prints what it costs in NLL"),
            Argument("--prompt", "for text: what to continue (default: nothing)", metavar="TEXT|FILE"),
            number("--documents", "for text: continue N held-out documents instead"),
            number("--prefix", "with --documents: tokens of each that are read (default 512)"),
            common.SPLIT,
            number("--tokens", "for text: number of tokens to generate (default 512)", dest="num_tokens"),
            common.DEVICE,
        ),
    ),
    Verb(
        "export",
        "write a trained run, without its data, to one file, or to a folder for a model hub, from which others can "
        "sample, score and go on training",
        "waveform.verbs.export:export",
        (
            common.RUN_DIR,
            path("file", "a new file, or folder", metavar="FILE"),
            Argument(
                "--format",
                "zip: one file (default); hub: a folder with a model card and sounds, as model hubs expect it",
                choices=("zip", "hub"),
            ),
            Argument("--licence", "for the card: its identifier, for example cc-by-4.0", metavar="ID"),
            Argument("--language", "for the card: its code, for example en", metavar="CODE"),
            Argument("--trained-on", "for the card: the data, in words", metavar="TEXT"),
            path("--figures", "for the card: what `evaluate --json` wrote of this run", metavar="FILE"),
            switch(
                "--optimiser",
                "include the optimiser's state, to resume training; the file is three to ten times as large",
            ),
        ),
    ),
    Verb(
        "compare",
        "compare runs on the same held-out data: NLL, difference from WaveNet (or the first run), size and speed",
        OF_DOMAIN,
        (
            common.RUN_DIRS,
            *common.SCORING,
            Argument(
                "--published",
                "show what others published for a corpus (sc09, youtubemix, beethoven) beside runs on all of it",
                metavar="NAME",
            ),
            *_FIGURES,
        ),
    ),
    Verb(
        "race",
        "train models in turn, for the same budget and with several seeds, and compare them on the test data",
        "waveform.verbs.race:race",
        (
            _SOURCE,
            path("out_dir", "gets a run folder for each model and seed; continued if it exists", metavar="OUT_DIR"),
            Argument(
                "--models",
                "default: compressive_transformer transformer_xl, and for audio wavenet",
                nargs="+",
                metavar="NAME",
            ),
            number("--seeds", "seeds that each model is trained with (default 1)"),
            common.ROWS,
            common.JSON,
            common.plot("draw validation NLL in training, and test NLL against parameters"),
            common.overrides("preset=demo train.max_seconds=600"),
            common.CONFIG_DIR,
        ),
        continues=True,
    ),
    Verb(
        "analyse",
        "show where runs attend, how they compress, how far back they look, and what carried state saves",
        "waveform.verbs.analyse:analyse",
        (
            common.RUN_DIRS,
            common.DATA,
            common.SPLIT,
            number("--tokens", "most tokens that each run reads for a figure (default 200000)", dest="max_tokens"),
            number("--context-step", "tokens from one context length to the next"),
            *common.MEMORIES,
            common.plot("draw the figures there"),
            common.JSON,
            common.DEVICE,
        ),
    ),
    Verb(
        "report",
        "write a page to read and to listen to: samples beside real data, NLL, attention, settings",
        OF_DOMAIN,
        (
            path("run_dirs", "runs to show side by side", nargs="*", metavar="RUN_DIR"),
            path("--out", "the page (default report.html)", metavar="FILE.html"),
            path(
                "--listen",
                "other runs at the same sample rate, of which only sounds are shown; linear-prediction: what the "
                "predictors draw alone",
                nargs="+",
                metavar="RUN_DIR",
            ),
            number("--num", "sounds of each run at each temperature (default 2)"),
            decimal("--seconds", "length of each sound (default 2)", metavar="S"),
            number("--real", "recordings whose beginnings every run continues (default 4)"),
            decimal("--temperatures", "for audio: default 1 0.9; continuations use the first", nargs="+", metavar="T"),
            number("--quality", "for audio: measure the quality of N sounds of each run (default 0: none)"),
            number("--documents", "for text: held-out documents that every run continues (default 3)"),
            number("--prefix", "for text: tokens of each document that are read (default 512)"),
            decimal("--temperature", "for text (default 1)", metavar="T"),
            common.SEED,
            common.DATA,
            common.SPLIT,
            common.ROWS,
            number(
                "--tokens",
                "for audio: samples to score, longest utterances first (default: all); for text: tokens to write "
                "(default 256)",
            ),
            common.JSON,
            common.DEVICE,
            path(
                "--ratings",
                "files that the page's blind mode exported: print each run's mean with its interval, and write no page",
                nargs="+",
                metavar="FILE",
                instead="waveform.report_page.ratings:rate",
            ),
        ),
    ),
)

VERBS = (
    Verb(
        "prepare",
        "turn a folder of audio into a data set of tokens (8-bit mu-law at the paper's rate by default), with a report",
        "waveform.verbs.prepare:prepare",
        (
            path("audio_dir", "a folder, nested or not, of wav, flac, ogg, opus, mp3, aiff", metavar="AUDIO_DIR"),
            path("data_dir", "the data set; created, or updated", metavar="DATA_DIR"),
            Argument(
                "--corpus",
                "AUDIO_DIR is this published corpus: sc09, youtubemix, beethoven, ljspeech, libritts or vctk",
                metavar="NAME",
            ),
            switch("--partial", "with --corpus: accept a part of it"),
            Argument(
                "--executor",
                "decode the files on this Dask cluster, whose workers must see both folders under the same paths",
                metavar="dask://HOST:PORT",
            ),
            common.overrides(
                "data.split.valid=0.1 data.split.by=folder; data.labels=folder or FILE.csv: labels of utterances"
            ),
            common.CONFIG_DIR,
        ),
        computes=False,
        continues=True,
    ),
    *RUN_VERBS,
    Verb(
        "serve",
        "serve a web page that plays sounds while runs generate them (default: the runs that come with waveform)",
        "waveform.verbs.serve:serve",
        (
            path("run_dirs", "the runs to choose from on the page", nargs="*", metavar="RUN_DIR"),
            number("--port", "default 8000; 0: a free one"),
            Argument("--host", "default 127.0.0.1, which only this machine reaches", metavar="NAME"),
            decimal("--max-seconds", "longest sound (default 60)", metavar="S"),
            number("--clients", "most listeners at once (default 2)"),
            common.DEVICE,
        ),
    ),
    Verb(
        "bench",
        "measure training, memory, sampling and data preparation, each against this machine's limit",
        "waveform.verbs.bench:bench",
        (
            Argument("--models", "default: every registered model", nargs="+", metavar="NAME"),
            Argument("--presets", "default: small speech_paper", nargs="+", metavar="NAME"),
            common.setting(
                "--batch-size", "train.batch_size", "rows in training (default: 1 on a CPU, 32 on a GPU)", metavar="B"
            ),
            number("--audio-minutes", "audio to prepare; 0: none (default 10)", type=float),
            common.JSON,
            common.DEVICE,
            common.overrides("model.prediction=none"),
            common.CONFIG_DIR,
        ),
    ),
    Verb(
        "demo",
        "prepare, train, compare and sample bundled speech, in minutes on two CPU cores",
        "waveform.verbs.demo:demo",
        (
            path("--out", "default: waveform-demo", dest="out_dir", metavar="DIR"),
            common.overrides("train.max_seconds=10"),
        ),
        continues=True,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    description = "Model raw audio waveforms: Compressive Transformer, Transformer-XL and WaveNet."
    return run_command("waveform", "waveform", description, VERBS, arguments)
