"""`python -m recipes`, also under torchrun: parses, and calls one function a verb."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from waveform.runs.command import add_device, add_dynamic, add_run_dir, add_verb, report_training, run_command

_RECIPES = "enwik8, text8, wikitext103, pg19, lm1b, ptb or folder"

_PREPARE_EPILOG = """\
settings, any number:
  corpus.check=false        take a source that is not the published corpus: a slice, or a corpus of your own
  corpus.tokens=subwords    for the recipe folder: bytes (default) or subwords
  corpus.vocab_size=32000   how many subwords
  corpus.valid=0.05 corpus.test=0.05   shares of a folder, or of a file with corpus.check=false
Nothing is downloaded; an error names what was expected and where it is published.
"""

_TRAIN_EPILOG = """\
settings (Hydra overrides), any number, after the paths:
  model=compressive_transformer|transformer_xl
  preset=paper|small|smoke        the papers' sizes; an hour on one GPU (default); a minute on a CPU
  study=table5_max                a row of the paper's tables, over preset=paper (see recipes/conf/study)
  train.max_steps=1000 train.batch_size=8 train.lr=3e-4 model.compressed=1152 seed=1
A run folder that exists with the same settings is resumed.

several GPUs:
  torchrun --nproc-per-node=8 -m recipes train RECIPE DATA_DIR RUN_DIR
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes", description="The text benchmarks of the Compressive Transformer and Transformer-XL."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    verb = partial(add_verb, verbs)

    p = verb("prepare", "turn a corpus that you have into a data set of tokens", _PREPARE_EPILOG)
    p.add_argument("recipe", metavar="RECIPE", help=_RECIPES)
    p.add_argument("source", type=Path, metavar="SOURCE", help="the folder, file or archive as it was published")
    p.add_argument("data_dir", type=Path, metavar="DATA_DIR", help="a new folder")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as corpus.check=false")

    p = verb("train", "train a model on a prepared data set", _TRAIN_EPILOG)
    p.add_argument("recipe", metavar="RECIPE", help=_RECIPES)
    p.add_argument("data_dir", type=Path, metavar="DATA_DIR")
    add_run_dir(p)
    p.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    p.add_argument(
        "--config-dir", type=Path, metavar="DIR", help="your own Hydra configs, such as DIR/preset/mine.yaml"
    )
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as preset=paper")

    p = verb("evaluate", "print a run's metrics on held-out text")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument("--compressed", type=int, metavar="N", help="compressed slots, other than in training")
    add_dynamic(p)
    _add_evaluation(p)

    p = verb("sweep", "evaluate a run at several sizes of compressed memory: table, plot and JSON")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument("--compressed", required=True, metavar="N,N,...", help="sizes, such as 512,1024,2048")
    _add_evaluation(p)

    p = verb("analyse", "where runs attend, how they compress, how far back they look, what carried state saves")
    p.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="several are held against one another")
    p.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default)")
    p.add_argument("--tokens", type=int, default=200_000, metavar="N", help="tokens read at most, twice, by each run")
    p.add_argument("--context-step", type=int, metavar="N", help="tokens from one context length to the next")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures there")
    add_device(p)

    p = verb("sample", "print text that continues a prompt")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument("--prompt", default="", metavar="TEXT|FILE", help="what to continue (default: nothing)")
    p.add_argument("--tokens", type=int, default=512, metavar="N", help="how many to generate (default 512)")
    kept = p.add_mutually_exclusive_group()
    kept.add_argument("--top-p", type=float, metavar="P", help="the fewest tokens that reach P (default 0.98; 1: all)")
    kept.add_argument("--top-k", type=int, metavar="K", help="the K most probable tokens only")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T", help="below 1: safer (default 1)")
    p.add_argument("--seed", type=int, default=0, metavar="N")
    add_device(p)
    return parser


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=int, metavar="N", help="memory slots, other than in training")
    parser.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default)")
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="cut the text into N pieces, each from empty memories: faster, a bit worse",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_device(parser)


def _run(args: argparse.Namespace) -> int:
    from waveform.system.cpu import set_defaults

    set_defaults()
    if args.verb == "prepare":
        from recipes.verbs.prepare import prepare

        prepare(args.recipe, args.source, args.data_dir, args.overrides)
    elif args.verb == "train" and args.print_config:
        from recipes.text import compose_config
        from waveform.runs.settings import to_yaml

        print(to_yaml(compose_config(args.recipe, args.overrides, config_dir=args.config_dir)), end="")
    elif args.verb == "train":
        from recipes.verbs.train import train

        result = train(args.recipe, args.data_dir, args.run_dir, args.overrides, config_dir=args.config_dir)
        return report_training(result, "tokens")
    elif args.verb == "evaluate":
        from recipes.verbs.evaluate import evaluate

        longer = {name: getattr(args, name) for name in ("memory", "compressed") if getattr(args, name) is not None}
        evaluate(
            args.run_dir,
            split=args.split,
            rows=args.rows,
            dynamic=args.dynamic,
            dynamic_optimiser=args.dynamic_optimiser,
            dynamic_lr=args.dynamic_lr,
            json_file=args.json,
            device=args.device,
            **longer,
        )
    elif args.verb == "analyse":
        from recipes.verbs.analyse import analyse

        analyse(
            args.run_dirs,
            split=args.split,
            tokens=args.tokens,
            context_step=args.context_step,
            json_file=args.json,
            plot_file=args.plot,
            device=args.device,
        )
    elif args.verb == "sweep":
        from recipes.verbs.sweep import sizes_from, sweep

        sweep(
            args.run_dir,
            compressed=sizes_from(args.compressed),
            memory=args.memory,
            split=args.split,
            rows=args.rows,
            json_file=args.json,
            device=args.device,
        )
    else:
        from recipes.verbs.sample import sample

        print(
            sample(
                args.run_dir,
                prompt=args.prompt,
                num_tokens=args.tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                seed=args.seed,
                device=args.device,
            )
        )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `run_command`."""
    return run_command("recipes", _parser(), _run, arguments)
