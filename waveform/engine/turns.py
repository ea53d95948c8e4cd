"""Trains several models in turn, in slices of a few seconds, so that other work on the machine falls on all alike."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from waveform.engine.nonfinite import Diverged
from waveform.engine.trainer import Trainer, TrainResult
from waveform.system.errors import UserError
from waveform.system.progress import Progress
from waveform.system.signals import signals_ask

SLICE_S = 2.0
SAVE_EVERY_S = 30.0  # of a run's training: what a kill costs at most; saving 40M parameters takes a second or two
_SHARE_STEPS = 1 << 20  # ranks compare whole numbers
_ENDED = object()


def train_in_turn(trainers: Mapping[str, Trainer], *, slice_s: float = SLICE_S) -> list[TrainResult]:
    """Train each until its budget is used up or a signal asks to stop; either way the last state of all is saved.

    The next slice goes to the one that has used the least share of its budget, so a resumed run that is behind catches
    up first. What does not depend on the clock is bit for bit what `run` gives. Raises what a trainer raises, after the
    others are saved.
    """
    for trainer in trainers.values():
        trainer.prepare_kernels()
    with signals_ask() as stop, _shared_progress(trainers) as progress, ExitStack() as open_slices:
        slices = {
            name: open_slices.enter_context(closing(trainer.slices(stop, progress, seconds=slice_s)))
            for name, trainer in trainers.items()
        }
        saved_s = {name: trainer.seconds for name, trainer in trainers.items()}
        while slices:
            name = _furthest_behind({name: trainers[name] for name in slices})
            trainer, progress.about = trainers[name], name
            with _others_saved([(trainers[other], slices[other]) for other in slices if other != name]):
                if next(slices[name], _ENDED) is _ENDED:
                    del slices[name]
                elif trainer.world.any(trainer.seconds - saved_s[name] >= SAVE_EVERY_S):
                    trainer.save()
                    saved_s[name] = trainer.seconds
    return [trainer.result for trainer in trainers.values() if trainer.result is not None]


def _furthest_behind(trainers: Mapping[str, Trainer]) -> str:
    """The name of the trainer that has used the least share of its budget; ranks agree on it."""
    world = next(iter(trainers.values())).world
    shares = world.largest(*(round(trainer.share * _SHARE_STEPS) for trainer in trainers.values()))
    return min(zip(shares, trainers, strict=True))[1]


@contextmanager
def _others_saved(others: Sequence[tuple[Trainer, Generator[None]]]) -> Iterator[None]:
    """Save `others` if what is done within fails; on several ranks only if all of them fail together."""
    try:
        yield
    except Exception as error:
        for other, slices in others:
            if other.step and (other.world.size == 1 or isinstance(error, Diverged)):
                with suppress(UserError):
                    slices.close()
                    other.save()
        raise


@contextmanager
def _shared_progress(trainers: Mapping[str, Trainer]) -> Iterator[Progress]:
    """One display of all: what they have used of their budgets together."""
    each = list(trainers.values())
    budgets = [trainer.budget for trainer in each]
    with Progress(
        "train",
        total=sum(total for total, _ in budgets),
        unit=budgets[0][1],
        initial=sum(trainer.done for trainer in each),
        enabled=each[0].shows_progress,
    ) as progress:
        yield progress
