"""`python -m recipes`, as a table: each verb's function and arguments; also under torchrun."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes.corpora.catalogue import RECIPES
from recipes.reinforcement.recipes import RECIPES as AGENTS
from waveform.command.arguments import (
    AVERAGE,
    CONFIG_DIR,
    DEVICE,
    DYNAMIC,
    EXPORT,
    FROM,
    JSON,
    MEMORIES,
    OUT_PAGE,
    RACE_DIR,
    RUN_DIR,
    RUN_DIRS,
    SEARCH,
    SEARCH_DIR,
    SEED,
    SPLIT,
    STRIDE,
    TEMPERATURE,
    analysis,
    entrants,
    overrides,
    protocol,
)
from waveform.command.table import Verb, argument, run_command

_PREPARE_EPILOG = """\
python -m recipes prepare RECIPE SOURCE DATA_DIR [settings]
python -m recipes prepare recall DATA_DIR [settings]

settings, any number:
  corpus.check=false        accept a source that is not the published corpus: a slice, or a corpus of your own
  corpus.tokens=subwords    for the recipe folder: bytes (default) or subwords
  corpus.vocab_size=32000   how many subwords
  corpus.vocabulary=FILE    words of a published model, in JSON or one a line, instead of the corpus's own (see import)
  corpus.gutenberg=true     cut off Project Gutenberg's licence around each file
  corpus.valid=0.05 corpus.test=0.05   shares of a folder, or of a file with corpus.check=false
for recall, which is generated:
  corpus.keys=16 corpus.values=8       facts, one value a key in each episode
  corpus.episode=640                   tokens of an episode
  corpus.fillers=0.6                   share of these that tell nothing
  corpus.train=4096 corpus.valid=128 corpus.test=2048 corpus.seed=0   episodes, and the seed that they come from
Nothing is downloaded; an error names what was expected and where it is published.
"""
_TRAIN_EPILOG = """\
settings (Hydra overrides), any number, after the paths:
  model=compressive_transformer|transformer_xl
  preset=paper|small|cpu|smoke    the papers' sizes; an hour on one GPU (default); a minute or two on a CPU; seconds
  preset=dai_12l|dai_18l|dai_24l|dai_standard|dai_base|dai_large|dai   Transformer-XL's own, each on some recipes
  study=table5_max                a row of the paper's tables, on top of preset=paper (see recipes/conf/study)
  train.max_steps=1000 train.batch_size=8 train.lr=3e-4 model.compressed=1152 seed=1
A run folder that exists with the same settings is resumed.

several GPUs:
  torchrun --nproc-per-node=8 -m recipes train RECIPE DATA_DIR RUN_DIR

agents, which learn from rewards and have no data:
  python -m recipes train object_matching RUN_DIR task.delay=8 model=compressive_transformer|transformer_xl|lstm
  python -m recipes train rl RUN_DIR env=MiniGrid-MemoryS7-v0     (pip install "waveform[rl]")
  preset=paper|cpu|smoke    sizes of Rae et al. 2019, section 5.7; minutes on a CPU core (default); seconds
"""
_IMPORT_EPILOG = """\
CHECKPOINT is a folder with model.safetensors, pytorch_model.bin or model.pt (or that file), beside a config.json with
mem_len, clamp_len and the like, in the layout of Hugging Face's TransfoXLLMHeadModel or of kimiyoung's code. Nothing in
it is run. The words are read from DATA_DIR, else from --vocabulary, else from CHECKPOINT's vocab.json or vocab.txt.

  python -m recipes prepare wikitext103 SOURCE data/wt103 corpus.vocabulary=CHECKPOINT/vocab.txt
  python -m recipes import CHECKPOINT runs/published --data data/wt103
  python -m recipes evaluate runs/published

Without --data there is a vocabulary but no text, so the run can only be sampled from.
settings, any number: model.memory=400 model.clamp_len=400 preset=small train.batch_size=4 train.lr=1e-5, the last for
training that continues
"""
_OPTIONS = {"options": "waveform.runs.scoring:EvaluateOptions"}
_SCORING = {**_OPTIONS, "playing": "recipes.verbs.agents:Playing"}
_RECIPE = argument("recipe", metavar="RECIPE", help=f"{', '.join(RECIPES)}, or one of an installed package")
_PROTOCOL = protocol("as in training; an utterance is a document", into="options")
_ROWS = argument(
    "--rows",
    into="options",
    type=int,
    metavar="N",
    help="cut the text into N pieces, each from empty memories: faster, a bit worse",
)

_PUBLISHED_WORDS = argument(
    "--published-words",
    into="options",
    action="store_true",
    help="word-level perplexity divides by the number of words that the papers do (Rae et al. 2019, Table 2)",
)

_PLOT = argument(
    "--plot",
    dest="plot_file",
    type=Path,
    metavar="FILE.png",
    help="draw bits per answer by distance (recall), or an agent's return in training",
)
_ENV = argument(
    "--env",
    into="playing",
    metavar="NAME",
    help="of Gymnasium: the environment in which the agent was trained, to say that you trust its module or options",
)
_ENVS = argument(
    "--envs",
    into="playing",
    nargs="+",
    metavar="NAME",
    help="of Gymnasium: play as many episodes besides in each of these environments",
)
_PLAYING = (
    argument("--episodes", into="playing", type=int, metavar="N", help="that an agent plays (default 256)"),
    argument(
        "--delays",
        into="playing",
        type=int,
        nargs="+",
        metavar="N",
        help="of object matching: play as many episodes besides in which every way takes N steps",
    ),
    _ENV,
    _ENVS,
)
_HOW_SCORED = (SPLIT, _PROTOCOL, _ROWS, _PUBLISHED_WORDS, *_PLAYING, JSON)

VERBS = (
    Verb(
        "prepare",
        "turn a corpus that you have into a data set of tokens",
        "recipes.verbs.prepare:prepare_paths",
        (
            _RECIPE,
            argument(
                "paths",
                nargs="+",
                metavar="PATH",
                help="SOURCE, the folder, file or archive as it was published, and DATA_DIR, a new folder; "
                "DATA_DIR alone for recall",
            ),
            overrides("corpus.check=false"),
        ),
        epilog=_PREPARE_EPILOG,
    ),
    Verb(
        "train",
        "train a model on a prepared data set",
        "recipes.verbs.train:train_paths",
        (
            replace(_RECIPE, options={**_RECIPE.options, "help": f"{_RECIPE.options['help']}; {', '.join(AGENTS)}"}),
            argument(
                "paths",
                nargs="+",
                metavar="PATH",
                help="DATA_DIR, and RUN_DIR, where the run is kept (resumed if it exists); RUN_DIR alone for an agent",
            ),
            *FROM,
            argument(
                "--print-config",
                action="store_true",
                help="print the resolved configuration and stop",
                instead="recipes.verbs.train:print_settings",
            ),
            CONFIG_DIR,
            overrides("preset=paper"),
        ),
        epilog=_TRAIN_EPILOG,
        configs={"origin": "waveform.runs.origin:Origin"},
        report="recipes.verbs.train:report",
    ),
    Verb(
        "tune",
        "search a model's settings on a data set: equal training time for each trial, judged by validation NLL",
        "recipes.verbs.tune:tune",
        (
            _RECIPE,
            argument("data_dir", type=Path, metavar="DATA_DIR", help="a data set that `prepare` made"),
            SEARCH_DIR,
            *SEARCH,
            JSON,
            CONFIG_DIR,
            overrides(
                "model=transformer_xl train.batch_size=8; what you give is not searched; preset=cpu is the default"
            ),
        ),
        configs={"config": "waveform.runs.search:SearchConfig"},
    ),
    Verb(
        "import",
        "make a run of a published Transformer-XL's weights",
        "recipes.verbs.import_run:import_run",
        (
            argument("checkpoint", type=Path, metavar="CHECKPOINT"),
            argument("run_dir", type=Path, metavar="RUN_DIR", help="a new folder"),
            argument(
                "--data", dest="data_dir", type=Path, metavar="DATA_DIR", help="text, prepared with its vocabulary"
            ),
            argument("--vocabulary", type=Path, metavar="FILE", help="the words, in JSON or one a line"),
            overrides("model.memory=400"),
        ),
        epilog=_IMPORT_EPILOG,
    ),
    Verb(
        "evaluate",
        "print a run's metrics on held-out text",
        "recipes.verbs.evaluate:evaluate",
        (RUN_DIR, *MEMORIES, AVERAGE, STRIDE, *DYNAMIC, *_HOW_SCORED, _PLOT, DEVICE),
        configs=_SCORING,
    ),
    Verb(
        "export",
        "write a trained run, with its vocabulary but without its texts, to one file from which others can sample, "
        "score and go on training",
        "recipes.verbs.export:export",
        (RUN_DIR, *EXPORT),
    ),
    Verb(
        "compare",
        "compare runs on the same held-out text",
        "recipes.verbs.compare:compare",
        (
            argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="differences are to the first"),
            *MEMORIES,
            AVERAGE,
            STRIDE,
            *_HOW_SCORED,
            argument(
                "--plot",
                dest="plot_file",
                type=Path,
                metavar="FILE.png",
                help="draw validation NLL in training; bits per answer by distance (recall); agents' returns",
            ),
            DEVICE,
        ),
        configs=_SCORING,
    ),
    Verb(
        "race",
        "train models in turn, for the same budget and with several seeds, and compare them on the test text",
        "recipes.verbs.race:race",
        (
            _RECIPE,
            argument("data_dir", type=Path, metavar="DATA_DIR", help="a data set that `prepare` made"),
            RACE_DIR,
            *entrants("compressive_transformer transformer_xl", into="config"),
            replace(_ROWS, into="config"),
            JSON,
            argument("--plot", dest="plot_file", type=Path, metavar="FILE.png", help="draw the figures there"),
            replace(CONFIG_DIR, into="config"),
            overrides("preset=cpu train.max_steps=null train.max_seconds=600"),
        ),
        configs={"config": "recipes.verbs.race:RaceConfig"},
    ),
    Verb(
        "play",
        "let an agent play an episode, and draw it",
        "recipes.reinforcement.episode:draw_episode",
        (
            RUN_DIR,
            argument("--gif", dest="gif_file", type=Path, metavar="FILE.gif", help="draw it as a moving picture"),
            argument("--plot", dest="plot_file", type=Path, metavar="FILE.png", help="draw its steps side by side"),
            argument("--steps", dest="num_steps", type=int, metavar="N", help="at most so many (default 60)"),
            argument("--episode", type=int, metavar="N", help="which one (default 0)"),
            replace(_ENV, into=None),
            DEVICE,
        ),
        report="recipes.reinforcement.episode:report",
    ),
    Verb(
        "study",
        "train every setting of a paper's table or figure, or of recall, at a preset's size: table, plot and JSON",
        "recipes.verbs.study:study_paths",
        (
            argument(
                "name",
                metavar="NAME",
                help="table5, table8, table9, figure3, figure5 or rare_updates (Rae et al. 2019), txl_table6 or "
                "txl_table7 (Dai et al. 2019), or recall",
            ),
            argument(
                "paths",
                nargs="+",
                metavar="PATH",
                help="DATA_DIR, any text (for recall, data of that recipe), and OUT_DIR, where the runs are kept "
                "(continued if it exists); OUT_DIR alone for figure5, which trains agents",
            ),
            argument(
                "--seeds", into="config", type=int, metavar="N", help="runs of each setting (default 1; of recall 3)"
            ),
            argument(
                "--jobs", into="config", type=int, metavar="N", help="runs at a time, which share the CPU (default 2)"
            ),
            replace(_ROWS, into="config"),
            argument(
                "--agents", into="config", nargs="+", metavar="NAME", help="of figure5: train these alone (default all)"
            ),
            replace(_ENVS, into="config"),
            replace(JSON, options={**JSON.options, "help": "write the figures there (default OUT_DIR/NAME.json)"}),
            argument(
                "--plot",
                dest="plot_file",
                type=Path,
                metavar="FILE.png",
                help="draw them there (default OUT_DIR/NAME.png)",
            ),
            replace(CONFIG_DIR, into="config"),
            overrides("preset=smoke train.max_steps=500"),
        ),
        configs={"config": "recipes.verbs.study:StudyConfig"},
    ),
    Verb(
        "sweep",
        "evaluate a run at several sizes of its memories, and the best of them on the test split: table, plot and JSON",
        "recipes.verbs.sweep:sweep",
        (
            RUN_DIR,
            argument("--compressed", metavar="N,N,...", help="compressed slots, for example 512,1024,2048"),
            argument("--memory", metavar="N,N,...", help="memory slots; with --compressed, every pair"),
            argument("--split", metavar="NAME", help="train, valid (default) or test"),
            _PROTOCOL,
            _ROWS,
            JSON,
            DEVICE,
        ),
        configs=_OPTIONS,
    ),
    Verb(
        "speed",
        "time a Transformer-XL against itself without carried memory, by context length",
        "recipes.verbs.speed:speed",
        (
            RUN_DIR,
            argument("--contexts", required=True, metavar="N,N,...", help="lengths, for example 800,1800,2800,3800"),
            JSON,
            argument("--plot", dest="plot_file", type=Path, metavar="FILE.png", help="draw the figures there"),
            DEVICE,
        ),
    ),
    Verb(
        "analyse",
        "where runs attend, how they compress, how far back they look, what carried state saves",
        "recipes.verbs.analyse:analyse",
        (RUN_DIRS, *analysis("token"), JSON, DEVICE),
        configs={"config": "waveform.analyses.analyse:AnalysisConfig"},
    ),
    Verb(
        "sample",
        "print text that continues a prompt, or the beginnings of held-out documents",
        "recipes.verbs.sample:sample",
        (
            RUN_DIR,
            argument("--prompt", metavar="TEXT|FILE", help="what to continue (default: nothing)"),
            argument(
                "--documents", into="prefixes", type=int, metavar="N", help="continue N held-out documents instead"
            ),
            argument(
                "--prefix", into="prefixes", type=int, metavar="N", help="tokens of each that are read (default 512)"
            ),
            replace(SPLIT, into="prefixes"),
            argument("--tokens", dest="num_tokens", type=int, metavar="N", help="how many to generate (default 512)"),
            argument(
                "--top-p",
                into="sampling",
                rival="kept",
                type=float,
                metavar="P",
                help="the fewest tokens that reach P (default 0.98; 1: all)",
            ),
            argument(
                "--top-k", into="sampling", rival="kept", type=int, metavar="K", help="the K most probable tokens only"
            ),
            TEMPERATURE,
            SEED,
            DEVICE,
        ),
        configs={
            "sampling": "waveform.engine.sampler:SamplingConfig",
            "prefixes": "recipes.verbs.sample:Prefixes",
        },
        report="builtins:print",
    ),
    Verb(
        "report",
        "write a page on runs: texts side by side, perplexity, NLL in training, attention, settings",
        "recipes.verbs.report:report",
        (
            argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="differences are to the first"),
            OUT_PAGE,
            argument(
                "--documents",
                into="config",
                type=int,
                metavar="N",
                help="held-out documents that every run continues (default 3)",
            ),
            argument(
                "--prefix", into="config", type=int, metavar="N", help="tokens of each that are read (default 512)"
            ),
            argument(
                "--tokens", dest="num_tokens", into="config", type=int, metavar="N", help="to generate (default 256)"
            ),
            replace(TEMPERATURE, into="config"),
            replace(SEED, into="config"),
            replace(SPLIT, into="config"),
            replace(_ROWS, into="config"),
            JSON,
            DEVICE,
        ),
        configs={"config": "recipes.verbs.report:ReportConfig"},
    ),
    Verb(
        "topics",
        "what a folder of texts is about: topics by latent Dirichlet allocation (needs waveform[topics])",
        "recipes.verbs.topics:topics",
        (
            argument("source", type=Path, metavar="SOURCE", help="a folder or archive of .txt files, a document each"),
            argument("--topics", into="config", type=int, metavar="N", help="default 7"),
            argument("--words", into="config", type=int, metavar="N", help="shown of each topic (default 15)"),
            argument("--seed", into="config", type=int, metavar="N", help="from which the topics begin (default 0)"),
            JSON,
        ),
        configs={"config": "recipes.verbs.topics:TopicsConfig"},
        computes=False,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    description = "The text benchmarks of the Compressive Transformer and Transformer-XL, and agents."
    return run_command("recipes", "python -m recipes", description, VERBS, arguments)
