"""What is due as training passes: records of the log and checkpoints by steps, evaluations also by the clock."""

from waveform.engine.train_config import TrainConfig


class Due:
    """Whether a record, a checkpoint or an evaluation is due; steps may advance by more than one."""

    def __init__(self, config: TrainConfig, *, has_clock: bool) -> None:
        """has_clock: whether this rank's clock decides for all."""
        self._config, self._has_clock = config, has_clock
        self._step, self._seconds = 0, 0.0  # when it last looked
        self.record = self.save = False  # after the update before
        self.evaluation = False  # and not made yet: a stop may come first

    def resume(self, step: int, seconds: float, *, evaluation: bool) -> None:
        """Go on from a checkpoint, which says whether an evaluation was still due."""
        self._step, self._seconds, self.evaluation = step, seconds, evaluation

    def look(self, step: int, seconds: float) -> None:
        """Note what has become due since the last look."""
        config = self._config
        by_clock = self._has_clock and _passed(config.evaluate_every_seconds, self._seconds, seconds)
        self.evaluation = by_clock or _passed(config.evaluate_every, self._step, step)
        self.record = _passed(config.log_every, self._step, step)
        self.save = _passed(config.checkpoint_every, self._step, step)
        self._step, self._seconds = step, seconds


def _passed(every: float | None, before: float, now: float) -> bool:
    """Whether a multiple of `every` lies in (before, now]; None: there is none."""
    return every is not None and now // every > before // every
