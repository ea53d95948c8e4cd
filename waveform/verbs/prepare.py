"""`waveform prepare`: a folder of audio into a data set of tokens, or one brought up to date."""

from collections.abc import Sequence
from pathlib import Path

from waveform.audio.corpus import prepare as corpus
from waveform.engine.dataset import Dataset
from waveform.runs.settings import typed
from waveform.speech import compose_config


def prepare(
    audio_dir: Path | str,
    data_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    show_progress: bool = True,
) -> Dataset:
    """Prepare the audio under `audio_dir` into `data_dir`, which gains what is new and loses what is gone.

    overrides: `data.NAME=value` settings. Raises UserError for bad settings and as `audio.corpus.prepare` does.
    """
    config = typed(corpus.DataConfig, compose_config(overrides, config_dir=config_dir)["data"], section="data")
    return corpus.prepare(Path(audio_dir), Path(data_dir), config=config, show_progress=show_progress)
