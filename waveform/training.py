"""`waveform train`: composes a configuration, opens the data, claims the run folder and trains into it."""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from waveform.audio.corpus import DataConfig
from waveform.audio.files import SAMPLE_RATE_HZ
from waveform.audio.mulaw import decode
from waveform.config import compose_config, differing_keys, to_yaml, typed
from waveform.engine.atomic import explain_write_errors, write_file
from waveform.engine.distributed import World, join, leave
from waveform.engine.errors import UserError
from waveform.engine.interface import SequenceModel
from waveform.engine.metrics import MetricsLog
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.shards import Dataset, is_dataset, read_dataset
from waveform.engine.streams import check_sizes
from waveform.engine.trainer import TrainConfig, Trainer, TrainResult
from waveform.run import CONFIG_FILE, cache_of, model_from, num_parameters, open_data, read_config, window_of

# Settings that may differ when a run is resumed: when it ends (which also moves the end of a cosine without
# train.decay_steps), what it reports, and where things lie.
_MAY_DIFFER = {
    "train": ("max_steps", "max_seconds", "checkpoint_every", "keep_checkpoints", "log_every", "sample_seconds",
              "evaluate_every", "evaluate_tokens", "evaluate_batch_size", "device"),
    "data": ("num_workers",),
    "dataset": ("path",),
}  # fmt: skip


def train(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on `source` (a folder of audio, or a prepared data set) into `run_dir`; resumes what is there.

    overrides: `key=value` settings. Under torchrun every process calls this. Raises UserError for bad settings or
    data, for a run folder of another configuration, and where the loss stops being finite.
    """
    source, run_dir = Path(source), Path(run_dir)
    config = compose_config(overrides, config_dir=None if config_dir is None else Path(config_dir))
    train_config: TrainConfig = typed(TrainConfig, config["train"], section="train")
    world = join(device=train_config.device)
    try:
        return _train(source, run_dir, config, train_config, world=world, show_progress=show_progress)
    finally:
        leave()


def _train(
    source: Path, run_dir: Path, config: dict[str, Any], train_config: TrainConfig, *, world: World, show_progress: bool
) -> TrainResult:
    if not source.exists():
        raise UserError(f"no such folder: {source}; give a folder of audio or a prepared data set")
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run {run_dir} is a file; give a folder")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / CONFIG_FILE).exists():
        unknown = [path.name for path in run_dir.iterdir() if path.name != ".train.lock"]
        if unknown:
            raise UserError(f"--run {run_dir} holds other files ({unknown[0]}, ...) and no run; give a new folder")
    model_from({**config, "dataset": {"vocab_size": 256}})  # refuses bad fields before any data is prepared
    data_config: DataConfig = typed(DataConfig, config["data"], section="data")
    check_sizes(
        batch_size=train_config.batch_size,
        window=window_of(config),
        chunk=train_config.chunk,
        mode=train_config.state,
        num_ranks=world.size,
    )
    _refuse_other_config(run_dir, config)
    data = _data_of_run(source, run_dir)
    if data is None:
        data = open_data(source, beside=run_dir, config=data_config, world=world, show_progress=show_progress)
    elif show_progress and world.is_first:
        print(f"resuming with {data.folder}, as prepared when this run began")
    splits = {split: data.open_split(split) for split in ("train", "valid", "test")}
    config["dataset"] = {
        "path": str(data.folder.resolve()),
        "vocab_size": data.vocab_size,
        "modality": data.modality,
        "checksums": {split: tokens.checksum for split, tokens in splits.items()},
    }
    _refuse_other_config(run_dir, config)
    torch.manual_seed(config["seed"] + world.rank)
    with explain_write_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with _locked(run_dir, world):
        model = model_from(config)
        trainer = Trainer(
            model,
            train_config,
            train=splits["train"],
            valid=splits["valid"],
            run_dir=run_dir,
            window=window_of(config),
            seed=config["seed"],
            world=world,
            units_per_second=data.modality.get("sample_rate_hz"),
            on_evaluate=_audio_summary(train_config, data) if data.modality.get("kind") == "audio" else None,
            show_progress=show_progress,
        )
        if world.is_first:  # now that every setting has been accepted
            write_file(run_dir / CONFIG_FILE, to_yaml(config).encode())
        if show_progress and world.is_first:
            print(
                f"training {config['model']['name']} ({num_parameters(model):,} parameters, preset {config['preset']}) "
                f"on {splits['train'].num_tokens / data.modality.get('sample_rate_hz', 1) / 60:.1f} minutes of audio, "
                f"{world.size} x {world.device.type}, into {run_dir}",
                flush=True,
            )
        return trainer.run()


@contextmanager
def _locked(run_dir: Path, world: World) -> Iterator[None]:
    """Refuse a second training process on one run folder; a dead process holds no lock."""
    if not world.is_first:
        yield
        return
    path = run_dir / ".train.lock"
    with explain_write_errors(path):
        path.touch()  # alone, so that a full disk during training is not blamed on this file
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {run_dir}; wait for it, or give another --run") from None
        yield


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what may differ."""
    return {
        section: {key: value for key, value in content.items() if key not in _MAY_DIFFER.get(section, ())}
        if isinstance(content, dict)
        else content
        for section, content in config.items()
    }


def _refuse_other_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Raises UserError, naming the settings, where `run_dir` holds a run of another configuration."""
    if not (run_dir / CONFIG_FILE).exists():
        return
    here, asked = _comparable(read_config(run_dir)), _comparable(config)
    if "dataset" not in config:  # not opened yet
        here.pop("dataset")
    different = differing_keys(here, asked)
    if not different:
        return
    if all(key.startswith("dataset.checksums") for key in different):
        raise UserError(
            f"the audio changed since the run in {run_dir} began, so it cannot go on exactly; train on the data set "
            "that it began with, or give another --run"
        )
    raise UserError(
        f"{run_dir} holds a run of another configuration: {'; '.join(different)}. "
        "Give another --run, or the settings of that run to resume it"
    )


def _data_of_run(source: Path, run_dir: Path) -> Dataset | None:
    """The data set that the run in `run_dir` began with, if it was prepared from the raw audio in `source`.

    It is left as it is: bringing it up to date with files added since would change what the run is trained on.
    """
    if not (run_dir / CONFIG_FILE).exists() or is_dataset(source):
        return None
    folder = Path(read_config(run_dir)["dataset"]["path"])
    return read_dataset(folder) if folder == cache_of(source, beside=run_dir).resolve() and is_dataset(folder) else None


def _audio_summary(config: TrainConfig, data: Dataset) -> Callable[[SequenceModel, int, MetricsLog], None] | None:
    """A hook that puts one generated sample, heard and seen, into TensorBoard at each evaluation."""
    if config.sample_seconds <= 0:
        return None

    def summarise(model: SequenceModel, step: int, log: MetricsLog) -> None:
        from waveform.audio.plots import mel_image

        num_steps = int(config.sample_seconds * SAMPLE_RATE_HZ)
        tokens = sample_tokens(
            model, vocab_size=data.vocab_size, num_streams=1, num_steps=num_steps, config=SamplingConfig()
        )
        samples = decode(tokens[0].to(torch.uint8))
        log.tensorboard.add_audio("sample", samples, step, sample_rate=SAMPLE_RATE_HZ)
        log.tensorboard.add_image("sample/mel", mel_image(samples.numpy()), step, dataformats="HWC")

    return summarise
