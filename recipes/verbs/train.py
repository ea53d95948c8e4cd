"""`python -m recipes train`: composes a configuration and trains on a prepared corpus into a run folder."""

from collections.abc import Sequence
from pathlib import Path

from recipes.text import compose_config
from waveform.engine.dataset import read_dataset
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import RunContext, TrainResult
from waveform.ranks.distributed import job
from waveform.runs.folder import check_run_dir
from waveform.runs.settings import typed
from waveform.runs.training import check_settings, report_training, train_run
from waveform.system.errors import UserError


def train(
    recipe: str,
    data_dir: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on the data set in `data_dir`, prepared by the same recipe, into `run_dir`; resume a run that is there.

    Under torchrun every process calls this. Raises UserError for bad settings or data, for a run folder with a
    different configuration, and if the loss stops being finite.
    """
    data_dir, run_dir = Path(data_dir), Path(run_dir)
    config = compose_config(recipe, overrides, config_dir=config_dir)
    train_config: TrainConfig = typed(TrainConfig, config["train"], section="train")
    data = read_dataset(data_dir)
    prepared_as = data.modality.get("recipe")
    if prepared_as != recipe:
        raise UserError(f"{data_dir} was prepared as {prepared_as or data.modality.get('kind')}, not as {recipe}")
    with job(device=train_config.device, timeout_s=train_config.timeout_s) as world:
        check_run_dir(run_dir)
        check_settings(run_dir, config, train_config, vocab_size=data.vocab_size, world=world)
        return train_run(
            data,
            config,
            train_config,
            RunContext(run_dir, world, show_progress=show_progress),
            amount=lambda tokens: f"{tokens.num_tokens:,} {data.modality['tokens']} of {recipe}",
            cut_valid=True,
        )


def report(result: TrainResult) -> int:
    """Say how training ended; returns the exit code of the command."""
    return report_training(result, unit="tokens")
