"""`train`: composes a configuration, opens the data set of a source, and trains into a run folder."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from waveform.domain import Domain, TrainRequest, domain_of
from waveform.engine.trainer import RunContext, Trainer, TrainResult
from waveform.engine.turns import train_in_turn
from waveform.ranks.distributed import job
from waveform.runs.fine_tuning import Origin
from waveform.runs.folder import check_run_dir, refuse_other_config
from waveform.runs.settings import given_by, typed
from waveform.runs.sources import annotated
from waveform.runs.training import say_threads
from waveform.system.errors import UserError
from waveform.system.signals import Interrupted


def train(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    origin: Origin | Path | str | None = None,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on `source` into `run_dir`; resume what is there.

    source: a folder of audio, a prepared data set of audio or text, or an environment of agents (`object_matching`,
    `rl`). overrides: `key=value` settings. origin: a run whose weights and settings this one begins with. Under
    torchrun every process calls this. Raises UserError for bad settings or data, for a run folder with a different
    configuration, for an origin that does not fit, and if the loss stops being finite.
    """
    origin = Origin(origin) if isinstance(origin, str | Path) else origin or Origin()
    domain, request = domain_of(source), TrainRequest(Path(source), Path(run_dir), overrides, origin, config_dir)
    with _opened(domain, [request], show_progress=show_progress) as trainers:
        result = trainers[0].run()
    how = "finished"
    if result.stopped_by:
        how = f"stopped by {signal.Signals(result.stopped_by).name}; the same command resumes"
    seen = f"{result.tokens_seen:,} {domain.unit}s seen"
    trainers[0].world.say(f"{how}: step {result.step}, {result.seconds:.0f} s of training, {seen}")
    return result


def train_all(
    source: Path | str,
    runs: Mapping[Path, Sequence[str]],
    *,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> None:
    """Train several runs on `source` in turn, in slices of seconds; resume what is there.

    runs: `key=value` settings of each run folder. Raises UserError as `train` does, for a setting before anything is
    prepared; if one run's loss stops being finite, the others lose 30 s at most. Raises Interrupted if a signal asks to
    stop, even if it comes too late to stop training.
    """
    requests = [TrainRequest(Path(source), *run, config_dir=config_dir) for run in runs.items()]
    with _opened(domain_of(source), requests, show_progress=show_progress) as trainers:
        results = train_in_turn({run_dir.name: trainer for run_dir, trainer in zip(runs, trainers, strict=True)})
    if asked_by := next((result.asked_by for result in results if result.asked_by), 0):
        raise Interrupted(asked_by)


@contextmanager
def _opened(domain: Domain, requests: Sequence[TrainRequest], *, show_progress: bool) -> Iterator[list[Trainer]]:
    """Open trainers of runs on one source, new or resumed. What can be refused is refused before data is prepared."""
    runs = []
    for request in requests:
        config = domain.compose(request)
        runs.append((request, config, typed(domain.train_config, config["train"], section="train")))
        given = given_by(request.overrides)
        asked = [name for name in given if name.startswith("train.evaluate_every")]
        if asked and config["train"].get("evaluate_tokens") == 0 and "train.evaluate_tokens" not in given:
            raise UserError(f"{asked[0]} has no effect while train.evaluate_tokens is 0; set that too")
        domain.refuse(request, config)
    first, shared, shared_train = runs[0]  # all have the same data, device and timeout
    joined = job(device=shared_train.device, timeout_s=shared_train.timeout_s, show_progress=show_progress)
    with joined as world, ExitStack() as opened:
        for request, config, train_config in runs:
            assert request.run_dir is not None
            check_run_dir(request.run_dir)
            domain.check(request.source, config, train_config, world=world)
            refuse_other_config(request.run_dir, config)
        data = domain.open_data(first, shared, world=world)
        trainers = []
        for request, config, train_config in runs:
            assert request.run_dir is not None
            look = domain.on_evaluate(data, train_config)
            context = RunContext(request.run_dir, world, unit=domain.unit, on_evaluate=look)
            trainers.append(opened.enter_context(domain.open_training(data, config, train_config, context)))
        say_threads(world, in_kernels=all(trainer.learner.runs_in_kernels for trainer in trainers))
        yield trainers


def print_config(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | str | None = None,
) -> None:
    """Print the resolved configuration as YAML, with the source of each value; takes the arguments of `train`.

    source may also be the name of a recipe.
    """
    domain = domain_of(source)
    config = domain.compose(TrainRequest(Path(source), Path(run_dir), overrides, origin or Origin(), config_dir))
    print(annotated(config, domain=config.get("recipe", domain.kind), overrides=overrides), end="")
