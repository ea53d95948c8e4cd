"""TensorBoard events are on the disk as soon as they are added, and a resumed run's replace later ones."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from waveform.engine.tensorboard import EventFile


def curve(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_events_are_written_at_once_and_purged_by_a_resumed_run(tmp_path: Path) -> None:
    first = EventFile(tmp_path)
    for step in (1, 2, 3):
        first.add_scalars({"loss": 0.5 * step}, step)
    assert curve(tmp_path) == [(1, 0.5), (2, 1.0), (3, 1.5)]  # not closed
    second = EventFile(tmp_path, purge_step=3)
    second.add_scalars({"loss": 9.0}, 3)
    assert curve(tmp_path) == [(1, 0.5), (2, 1.0), (3, 9.0)]
    first.close(), second.close()
