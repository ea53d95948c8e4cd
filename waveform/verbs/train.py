"""`train`: composes a configuration, opens the data set of a source, and trains into a run folder."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from waveform.domain import domain_of
from waveform.engine.trainer import RunContext, Trainer, TrainResult
from waveform.engine.turns import train_in_turn
from waveform.ranks.distributed import job
from waveform.runs.origin import Origin
from waveform.runs.settings import typed
from waveform.runs.training import say_threads
from waveform.system.console import say


def train(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on `source` into `run_dir`; resume what is there.

    source: a folder of audio, a prepared data set of audio or text, or an environment of agents (`object_matching`,
    `rl`). overrides: `key=value` settings. origin: a run whose weights and settings this one begins with. Under
    torchrun every process calls this. Raises UserError for bad settings or data, for a run folder with a different
    configuration, for an origin that does not fit, and if the loss stops being finite.
    """
    with _opened(
        source, {Path(run_dir): overrides}, origin=origin, config_dir=config_dir, show_progress=show_progress
    ) as trainers:
        result = trainers[0].run()
    if show_progress and os.environ.get("RANK", "0") == "0":
        how = "finished"
        if result.interrupted:
            how = f"stopped by {signal.Signals(result.stopped_by).name}; the same command resumes"
        seen = f"{result.tokens_seen:,} {domain_of(source).seen} seen"
        say(f"{how}: step {result.step}, {result.seconds:.0f} s of training, {seen}")
    return result


def train_all(
    source: Path | str,
    runs: Mapping[Path, Sequence[str]],
    *,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> list[TrainResult]:
    """Train several runs on `source` in turn, in slices of seconds; resumes what is there. Returns how each ended.

    runs: `key=value` settings of each run folder. Raises UserError as `train` does, before anything is prepared if it
    is for a setting; if one run's loss stops being finite, the others are saved.
    """
    with _opened(source, runs, config_dir=config_dir, show_progress=show_progress) as trainers:
        return train_in_turn({run_dir.name: trainer for run_dir, trainer in zip(runs, trainers, strict=True)})


@contextmanager
def _opened(
    source: Path | str,
    runs: Mapping[Path, Sequence[str]],
    *,
    origin: Origin | None = None,
    config_dir: Path | str | None,
    show_progress: bool,
) -> Iterator[list[Trainer]]:
    """Trainers of runs on one source, new or resumed. Whatever can be refused is, before anything is prepared."""
    source, domain = Path(source), domain_of(source)
    settings = []
    for run_dir, overrides in runs.items():
        config = domain.compose(
            source,
            overrides,
            config_dir=None if config_dir is None else Path(config_dir),
            origin=origin,
            run_dir=run_dir,
        )
        train_config = typed(domain.train_config, config["train"], section="train")
        domain.refuse(source, run_dir, config, overrides=overrides, origin=origin)
        settings.append((run_dir, config, train_config))
    first_dir, first, train_config = settings[0]
    with job(device=train_config.device, timeout_s=train_config.timeout_s) as world, ExitStack() as opened:
        for run_dir, config, train_config in settings:
            domain.check(source, run_dir, config, train_config, world=world)
        data = domain.open_data(source, first_dir, first, world=world, show_progress=show_progress)
        trainers = []
        for run_dir, config, train_config in settings:
            context = domain.context(data, train_config, RunContext(run_dir, world, show_progress=show_progress))
            # Models in turn are looked at in pieces that have the same lengths.
            cut_valid = domain.cuts_valid or len(runs) > 1
            trainers.append(
                opened.enter_context(domain.open_training(data, config, train_config, context, cut_valid=cut_valid))
            )
        if show_progress:
            say_threads(world, in_kernels=all(trainer.learner.runs_in_kernels for trainer in trainers))
        yield trainers


def print_config(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | None = None,
) -> None:
    """Print the resolved configuration as YAML, with what states each value; arguments as those of `train`.

    source may be the name of a recipe, too.
    """
    source, domain = Path(source), domain_of(source)
    config = domain.compose(source, overrides, config_dir=config_dir, origin=origin, run_dir=Path(run_dir))
    print(domain.annotated(config, overrides), end="")


def exit_code(result: TrainResult) -> int:
    """That of the command: 0, or 128 + the signal that stopped training."""
    return 128 + result.stopped_by if result.interrupted else 0
