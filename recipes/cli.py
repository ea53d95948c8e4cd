"""`python -m recipes`, as a table: the verbs for every run, and those that only text and agents have.

Also under torchrun.
"""

from collections.abc import Sequence
from functools import partial

from recipes.corpora.catalogue import RECIPES
from waveform.cli import RUN_VERBS
from waveform.command.arguments import CONFIG_DIR, DEVICE, ENV, ENVS, JSON, PROTOCOL, ROWS, RUN_DIR, overrides, plot
from waveform.command.table import Argument, Verb, number, path, run_command

_PREPARE_EPILOG = """\
python -m recipes prepare RECIPE SOURCE DATA_DIR [settings]
python -m recipes prepare recall DATA_DIR [settings]

settings, any number:
  corpus.check=false        accept a source that is not the published corpus: a slice, or a corpus of your own
  corpus.tokens=subwords    for the recipe folder: bytes (default) or subwords
  corpus.vocab_size=32000   how many subwords
  corpus.vocabulary=FILE    words of a published model (JSON, or one per line), instead of the corpus's own (see import)
  corpus.gutenberg=true     cut off Project Gutenberg's licence around each file
  corpus.valid=0.05 corpus.test=0.05   shares of a folder, or of a file with corpus.check=false
for recall, which is generated:
  corpus.keys=16 corpus.values=8       facts: each key has one value in an episode
  corpus.episode=640                   tokens of an episode
  corpus.fillers=0.6                   share of these that are fillers, which tell nothing
  corpus.train=4096 corpus.valid=128 corpus.test=2048 corpus.seed=0   episodes, and the seed that they come from
Nothing is downloaded; an error names what was expected and where it is published.
"""
_IMPORT_EPILOG = """\
CHECKPOINT is a folder with model.safetensors, pytorch_model.bin or model.pt (or such a file), and a config.json beside
it with mem_len, clamp_len and the like, in the layout of Hugging Face's TransfoXLLMHeadModel or of kimiyoung's code. No
code in it is run. The words are read from DATA_DIR, else from --vocabulary, else from CHECKPOINT's vocab.json or
vocab.txt.

  python -m recipes prepare wikitext103 SOURCE data/wt103 corpus.vocabulary=CHECKPOINT/vocab.txt
  python -m recipes import CHECKPOINT runs/published --data data/wt103
  python -m recipes evaluate runs/published

Without --data there is a vocabulary but no text, so the run can only be sampled from.
settings, any number: model.memory=400 model.clamp_len=400; for training that continues, preset=small
train.batch_size=4 train.lr=1e-5
"""


def numbers(text: str) -> list[int]:
    """`1024,512` -> [512, 1024], each once. Raises ValueError, which argparse reports as an invalid value."""
    return sorted({int(part) for part in text.split(",")})


_sizes = partial(Argument, type=numbers, metavar="N,N,...")

VERBS = (
    *RUN_VERBS,
    Verb(
        "prepare",
        "turn a corpus that you have into a data set of tokens",
        "recipes.verbs.prepare:prepare_paths",
        (
            Argument("recipe", f"{', '.join(RECIPES)}, or one of an installed package", metavar="RECIPE"),
            Argument(
                "paths",
                "SOURCE, the folder, file or archive as it was published, and DATA_DIR, a new folder; DATA_DIR alone "
                "for recall",
                nargs="+",
                metavar="PATH",
            ),
            overrides("corpus.check=false"),
        ),
        epilog=_PREPARE_EPILOG,
    ),
    Verb(
        "import",
        "turn the weights of a published Transformer-XL into a run",
        "recipes.verbs.import_run:import_run",
        (
            path("checkpoint", metavar="CHECKPOINT"),
            path("run_dir", "a new folder", metavar="RUN_DIR"),
            path("--data", "text, prepared with its vocabulary", dest="data_dir", metavar="DATA_DIR"),
            path("--vocabulary", "the words, in JSON or one per line", metavar="FILE"),
            overrides("model.memory=400"),
        ),
        epilog=_IMPORT_EPILOG,
    ),
    Verb(
        "play",
        "let an agent play an episode, and draw it",
        "recipes.reinforcement.play:draw_episode",
        (
            RUN_DIR,
            path("--gif", "save it as an animated GIF", dest="gif_file", metavar="FILE.gif"),
            plot("draw its steps side by side"),
            number("--steps", "at most this many (default 60)", dest="num_steps"),
            ENV,
            DEVICE,
        ),
    ),
    Verb(
        "study",
        "train every setting of a paper's table or figure, or of recall, at a preset's size: table, plot and JSON",
        "recipes.verbs.study:study",
        (
            Argument(
                "name",
                "table5, table8, table9, figure3, figure5 or rare_updates (Rae et al. 2019), txl_table6 or txl_table7 "
                "(Dai et al. 2019), or recall",
                metavar="NAME",
            ),
            Argument(
                "paths",
                "DATA_DIR, any text (for recall, data of that recipe), and OUT_DIR, where the runs are kept (continued "
                "if it exists); OUT_DIR alone for figure5, which trains agents",
                nargs="+",
                metavar="PATH",
            ),
            number("--seeds", "runs of each setting (default 1; 3 for recall and figure5)"),
            number("--jobs", "runs at a time, which share the CPU (default 2)"),
            ROWS,
            Argument("--agents", "for figure5: train only these (default all)", nargs="+", metavar="NAME"),
            ENVS,
            path("--json", "write the figures there (default OUT_DIR/NAME.json)", dest="json_file", metavar="FILE"),
            plot("draw them there (default OUT_DIR/NAME.png)"),
            CONFIG_DIR,
            overrides("preset=smoke train.max_steps=500"),
        ),
        continues=True,
    ),
    Verb(
        "sweep",
        "evaluate a run at several sizes of its memories, then the best size on the test split: table, plot and JSON",
        "recipes.verbs.sweep:sweep",
        (
            RUN_DIR,
            _sizes("--compressed", "compressed slots, for example 512,1024,2048"),
            _sizes("--memory", "memory slots; with --compressed, every pair"),
            PROTOCOL,
            ROWS,
            path("--json", "write the figures there, and the plot next to it", dest="json_file", metavar="FILE"),
            DEVICE,
        ),
    ),
    Verb(
        "speed",
        "measure how much faster a Transformer-XL is scored because it carries memory, by context length",
        "recipes.verbs.speed:speed",
        (
            RUN_DIR,
            _sizes("--contexts", "lengths, for example 800,1800,2800,3800", required=True),
            JSON,
            plot("draw the figures there"),
            DEVICE,
        ),
    ),
    Verb(
        "topics",
        "find what a folder of texts is about: topics by latent Dirichlet allocation",
        "recipes.verbs.topics:topics",
        (
            path("source", "a folder or archive of .txt files, a document each", metavar="SOURCE"),
            number("--topics", "default 7", dest="num_topics"),
            JSON,
        ),
        computes=False,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    description = "The text benchmarks of the Compressive Transformer and Transformer-XL, and agents."
    return run_command("recipes", "python -m recipes", description, VERBS, arguments)
