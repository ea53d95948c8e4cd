"""Training into a run folder, whatever the modality: claims the folder, refuses another configuration, resumes."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from waveform.engine.checkpoint import CHECKPOINTS_DIR
from waveform.engine.dataset import Dataset
from waveform.engine.metrics import METRICS_FILE
from waveform.engine.state_ram import require_ram_for_state
from waveform.engine.streams import check_sizes
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import RunContext, Trainer, TrainResult
from waveform.ranks.distributed import World, explain_lost_ranks
from waveform.runs.folder import (
    CONFIG_FILE,
    check_recorded,
    comparable,
    model_from,
    num_parameters,
    read_config,
    sketch_model,
    window_of,
)
from waveform.runs.settings import differing_keys, to_yaml
from waveform.system.atomic import explain_write_errors, write_file
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.locks import locked

_LOCK_FILE = ".train.lock"


def check_run_dir(run_dir: Path) -> None:
    """Raises UserError where `run_dir` is a file, a folder of other things than a run, or leads elsewhere by links."""
    for name in (CONFIG_FILE, _LOCK_FILE, METRICS_FILE, CHECKPOINTS_DIR, "tensorboard"):
        if (run_dir / name).is_symlink():  # a run from an untrusted place must not make training write elsewhere
            raise UserError(
                f"{run_dir / name} is a link, and training writes inside its run folder only; put what it leads to in "
                "its place, or make a link of the whole run folder"
            )
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; give a folder for the run")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / CONFIG_FILE).exists():
        unknown = [path.name for path in run_dir.iterdir() if not path.name.startswith(".")]  # such as our own lock
        if unknown:
            raise UserError(f"{run_dir} holds other files ({unknown[0]}, ...) and no run; give a new folder")


def check_settings(
    run_dir: Path, config: dict[str, Any], train_config: TrainConfig, *, vocab_size: int, world: World
) -> None:
    """What can be refused before anything is prepared or written.

    Raises UserError for fields that the model refuses, for sizes that do not fit each other or this machine, and for
    another configuration than that of `run_dir`.
    """
    # A GPU, whose own allocator refuses, and sharding leave no more than the weights themselves to this machine.
    alone = world.device.type == "cpu" and train_config.sharding == "none"
    sketch = sketch_model({**config, "dataset": {"vocab_size": vocab_size}}, num_copies=4 if alone else 1)
    check_sizes(
        batch_size=train_config.batch_size,
        window=window_of(config),
        chunk=train_config.chunk,
        mode=train_config.state,
        num_ranks=world.size,
    )
    if world.device.type == "cpu":
        require_ram_for_state(sketch, train_config.batch_size // world.size)
    _refuse_other_config(run_dir, config)


def train_run(
    data: Dataset,
    config: dict[str, Any],
    train_config: TrainConfig,
    context: RunContext,
    *,
    amount: Callable[[TokenSet], str],
    cut_valid: bool = False,
) -> TrainResult:
    """Train on `data` into the run folder of `context`, or resume what is there; `config` gains the section `dataset`.

    amount: says how much the training split holds, for the line that is printed first. cut_valid: cut long validation
    utterances so that the quick looks during training fill their rows. Raises UserError for a run folder of another
    configuration or data, and if the loss stops being finite.
    """
    run_dir, world = context.run_dir, context.world
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
    refusal = f"another process is training in {run_dir}; wait for it, or give another RUN_DIR"
    with (
        explain_lost_ranks(world, timeout_s=train_config.timeout_s, where=lambda: "the start"),
        locked(run_dir / _LOCK_FILE, refusal=refusal) if world.is_first else nullcontext(),
    ):
        _refuse_other_config(run_dir, config)  # which another process may have begun since
        model = model_from(config)
        trainer = Trainer(
            model,
            train_config,
            train=splits["train"],
            valid=cut_for_a_look(splits["valid"], train_config, world=world) if cut_valid else splits["valid"],
            window=window_of(config),
            seed=config["seed"],
            context=replace(context, record=comparable(config)),
        )
        if trainer.resumed_from is not None:
            check_recorded(run_dir, config, trainer.resumed_from)
        if world.is_first:  # now that every setting has been accepted
            write_file(run_dir / CONFIG_FILE, to_yaml(config).encode())
        if context.show_progress and world.is_first:
            say(
                f"training {config['model']['name']} ({num_parameters(model):,} parameters, preset {config['preset']}) "
                f"on {amount(splits['train'])}, {world.size} x {world.device.type}, into {run_dir}"
            )
        return trainer.run()


def cut_for_a_look(valid: TokenSet, config: TrainConfig, *, world: World) -> TokenSet:
    """Long utterances cut, so that a look at train.evaluate_tokens of them fills the rows of every process."""
    num_tokens = min(valid.num_tokens, config.evaluate_tokens or valid.num_tokens)
    return valid.cut(max(1, -(-num_tokens // (config.evaluate_batch_size * world.size))))


def _refuse_other_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Raises UserError, naming the settings, where `run_dir` holds a run of another configuration."""
    if not (run_dir / CONFIG_FILE).exists():
        return
    here, asked = comparable(read_config(run_dir)), comparable(config)
    if "dataset" not in config:  # not opened yet
        here.pop("dataset")
    different = differing_keys(here, asked)
    if not different:
        return
    if all(key.startswith("dataset.checksums") for key in different):
        raise UserError(
            f"the data changed since the run in {run_dir} began, so it cannot go on exactly; train on the data set "
            "that it began with, or give another RUN_DIR"
        )
    raise UserError(
        f"{run_dir} holds a run of another configuration, by its {run_dir / CONFIG_FILE}: {'; '.join(different)}. "
        "Give another RUN_DIR, or the settings of that run to resume it"
    )


def report_training(result: TrainResult, *, unit: str) -> int:
    """Say on the first rank how training ended; returns the exit code: 0, or 128 + the signal that stopped it.

    unit: what tokens are called.
    """
    if os.environ.get("RANK", "0") == "0":
        how = "finished"
        if result.interrupted:
            how = f"stopped by {signal.Signals(result.stopped_by).name}; the same command resumes"
        seen = f"{result.seconds:.0f} s of training, {result.tokens_seen:,} {unit} seen"
        say(f"{how}: step {result.step}, {seen}")
    return 128 + result.stopped_by if result.interrupted else 0
