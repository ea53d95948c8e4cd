"""Trains several models in turn, in slices of a few seconds, so that other work on the machine falls on all alike."""

from collections.abc import Mapping
from contextlib import ExitStack

from waveform.engine.trainer import Trainer, TrainResult, progress_of
from waveform.system.signals import signals_ask

SLICE_S = 2.0
# Training time that a kill, or an error in another run, costs at most. Saving 40M parameters takes 1 or 2 s.
SAVE_EVERY_S = 30.0
_SHARE_STEPS = 1 << 20  # ranks compare whole numbers


def train_in_turn(trainers: Mapping[str, Trainer], *, slice_s: float = SLICE_S) -> list[TrainResult]:
    """Train each until its budget is used up or a signal asks to stop; either way the last state of all is saved.

    The next slice goes to the one that has used the least share of its budget, so a resumed run that is behind catches
    up first. Results that do not depend on the clock are bit for bit those of `run`. Raises what a trainer raises; the
    next call continues the others from what they saved last.
    """
    training = dict(trainers)
    with signals_ask() as stop, progress_of([*trainers.values()]) as progress, ExitStack() as opened:
        for trainer in trainers.values():
            opened.enter_context(trainer.opened(stop, progress))
        while training:
            world = next(iter(training.values())).world
            shares = world.largest(*(round(trainer.share * _SHARE_STEPS) for trainer in training.values()))
            progress.about = min(zip(shares, training, strict=True))[1]  # ranks agree on it
            trainer = training.pop(progress.about)
            learner, end_s = trainer.learner, trainer.learner.seconds + slice_s
            with trainer.turn():
                while trainer.step() and not world.any(learner.seconds >= end_s and trainer.share < 1):
                    pass
                if trainer.result is None:
                    training[progress.about] = trainer
                    if world.any(learner.seconds - trainer.saved_s >= SAVE_EVERY_S):
                        trainer.save()
    return [trainer.result for trainer in trainers.values() if trainer.result is not None]
