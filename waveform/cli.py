"""The `waveform` command: parses, and calls one function a verb. Imports nothing heavy until a verb runs."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from waveform.runs.command import add_device, add_dynamic, add_run_dir, add_verb, report_training, run_command

_TRAIN_EPILOG = """\
settings (Hydra overrides), any number, after the paths:
  model=compressive_transformer|transformer_xl|wavenet   or any model that an installed package registers
  preset=demo|small|speech_paper                         sizes and schedule; small is the default
  train.max_steps=1000 train.max_seconds=600 train.batch_size=8 train.lr=3e-4 train.state=utterance
  model.num_layers=4 model.compression=max seed=1        see --print-config for all of them
A run folder that exists with the same settings is resumed.

several GPUs:
  torchrun --nproc-per-node=8 -m waveform train AUDIO_DIR RUN_DIR
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waveform",
        description="Model raw audio waveforms: Compressive Transformer, Transformer-XL and WaveNet.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    verb = partial(add_verb, verbs)

    p = verb("prepare", "turn a folder of audio into a data set of 24 kHz mu-law tokens, with a report")
    p.add_argument("audio_dir", type=Path, metavar="AUDIO_DIR", help="wav, flac, ogg, opus, mp3, aiff; nested folders")
    p.add_argument("data_dir", type=Path, metavar="DATA_DIR", help="made, or brought up to date")
    _add_overrides(p, "data.split.valid=0.1 data.split.by=folder")

    p = verb("train", "train a model on a folder of audio or a prepared data set", _TRAIN_EPILOG)
    p.add_argument("source", type=Path, metavar="AUDIO_DIR|DATA_DIR")
    add_run_dir(p)
    p.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    _add_overrides(p, "train.max_steps=1000 model=wavenet")

    p = verb("evaluate", "print a run's NLL on held-out audio, in nats and bits per sample")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    _add_test_data(p)
    p.add_argument("--protocol", choices=("utterance", "chunk"), help="when state resets (default: as in training)")
    p.add_argument("--memory", type=int, metavar="N", help="memory slots, other than in training")
    p.add_argument("--compressed", type=int, metavar="N", help="compressed slots, other than in training")
    add_dynamic(p)
    add_device(p)

    p = verb("sample", "generate audio into WAV files")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the WAV files")
    p.add_argument("--num", type=int, default=1, metavar="N", help="how many, generated side by side (default 1)")
    p.add_argument("--seconds", type=float, default=1.0, metavar="S", help="length of each (default 1)")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T", help="below 1: safer, quieter (default 1)")
    p.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable classes only")
    p.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest classes that reach probability P")
    p.add_argument("--seed", type=int, default=0, metavar="N")
    p.add_argument("--prime", type=Path, metavar="FILE", help="audio that every sample begins with and continues")
    p.add_argument("--int8", action="store_true", help="8-bit weights on a CPU: faster; prints what it costs in NLL")
    add_device(p)

    p = verb("compare", "compare runs on the same test audio: NLL, difference to WaveNet, size and speed")
    p.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    _add_test_data(p)
    p.add_argument("--protocol", choices=("utterance", "chunk"), default="utterance", help="when state resets")
    add_device(p)

    p = verb("bench", "measure training, memory, sampling and data preparation, each beside this machine's limit")
    p.add_argument("--model", nargs="+", metavar="NAME", default=[], help="default: every registered model")
    p.add_argument("--preset", nargs="+", metavar="NAME", default=[], help="default: small speech_paper")
    p.add_argument("--batch-size", type=int, metavar="B", help="rows in training (default: 1 on a CPU, 32 on a GPU)")
    p.add_argument(
        "--audio-minutes", type=float, default=10, metavar="N", help="audio to prepare; 0: none (default 10)"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    add_device(p)
    _add_overrides(p, "model.num_layers=2")

    p = verb("analyse", "where runs attend, how they compress, how far back they look, what carried state saves")
    p.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="several are held against one another")
    _add_test_data(p)
    p.add_argument("--tokens", type=int, default=200_000, metavar="N", help="samples read at most, twice, by each run")
    p.add_argument("--context-step", type=int, metavar="N", help="samples from one context length to the next")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures there")
    add_device(p)

    p = verb("demo", "the whole job on bundled speech, in minutes on two CPU cores")
    p.add_argument("--out", type=Path, default=Path("waveform-demo"), metavar="DIR", help="default: waveform-demo")
    _add_overrides(p, "train.max_seconds=10", config_dir=False)
    return parser


def _add_overrides(parser: argparse.ArgumentParser, example: str, *, config_dir: bool = True) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings, such as {example}")
    if config_dir:
        parser.add_argument(
            "--config-dir",
            type=Path,
            metavar="DIR",
            help="your own Hydra configs, such as DIR/preset/mine.yaml: see `waveform/conf/preset/small.yaml`",
        )


def _add_test_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="audio or data set other than the run's own")
    parser.add_argument("--split", default="test", metavar="NAME", help="train, valid or test (default)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def _run(args: argparse.Namespace) -> int:
    if args.verb == "prepare":
        from waveform.audio.corpus.prepare import DataConfig, prepare
        from waveform.config import compose_config
        from waveform.runs.settings import typed

        config = compose_config(args.overrides, config_dir=args.config_dir)
        prepare(args.audio_dir, args.data_dir, config=typed(DataConfig, config["data"], section="data"))
        return 0
    if args.verb == "train" and args.print_config:
        from waveform.config import compose_config
        from waveform.runs.settings import to_yaml

        print(to_yaml(compose_config(args.overrides, config_dir=args.config_dir)), end="")
        return 0

    from waveform.system.cpu import set_defaults

    set_defaults()
    if args.verb == "train":
        from waveform.verbs.train import train

        result = train(args.source, args.run_dir, args.overrides, config_dir=args.config_dir)
        return report_training(result, "samples")
    elif args.verb == "evaluate":
        from waveform.verbs.evaluate import evaluate

        longer = {name: getattr(args, name) for name in ("memory", "compressed") if getattr(args, name) is not None}
        evaluate(
            args.run_dir,
            data=args.data,
            split=args.split,
            protocol=args.protocol,
            dynamic=args.dynamic,
            dynamic_optimiser=args.dynamic_optimiser,
            dynamic_lr=args.dynamic_lr,
            json_file=args.json,
            device=args.device,
            **longer,
        )
    elif args.verb == "sample":
        from waveform.verbs.sample import sample

        sample(
            args.run_dir,
            args.out,
            num=args.num,
            seconds=args.seconds,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            prime=args.prime,
            device=args.device,
            int8=args.int8,
        )
    elif args.verb == "compare":
        from waveform.verbs.compare import compare

        compare(
            args.run_dirs,
            data=args.data,
            split=args.split,
            protocol=args.protocol,
            json_file=args.json,
            device=args.device,
        )
    elif args.verb == "bench":
        from waveform.verbs.bench import bench

        # argparse gives what follows --model or --preset to them, settings too.
        named = [*args.model, *args.preset]
        bench(
            models=[name for name in args.model if "=" not in name] or None,
            presets=[name for name in args.preset if "=" not in name] or None,
            overrides=[*args.overrides, *(setting for setting in named if "=" in setting)],
            batch_size=args.batch_size,
            audio_minutes=args.audio_minutes,
            json_file=args.json,
            device=args.device,
            config_dir=args.config_dir,
        )
    elif args.verb == "analyse":
        from waveform.verbs.analyse import analyse

        analyse(
            args.run_dirs,
            data=args.data,
            split=args.split,
            tokens=args.tokens,
            context_step=args.context_step,
            json_file=args.json,
            plot_file=args.plot,
            device=args.device,
        )
    else:
        from waveform.verbs.demo import demo

        demo(args.out, overrides=tuple(args.overrides))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `run_command`."""
    return run_command("waveform", _parser(), _run, arguments)
