"""Training into a run folder, for any modality: claims the folder, refuses another configuration, resumes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from waveform.engine.dataset import Dataset
from waveform.engine.interface import optional_parts
from waveform.engine.labels import label_names, labels_checksum
from waveform.engine.state_ram import require_ram_for_state
from waveform.engine.streams import check_sizes
from waveform.engine.token_learner import TokenLearner
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import BaseTrainConfig, TrainConfig
from waveform.engine.trainer import RunContext, Trainer
from waveform.ranks.distributed import World, explain_lost_ranks
from waveform.runs.configured_model import model_from, num_parameters, sketch_model, window_of
from waveform.runs.fine_tuning import find_origin, load_origin
from waveform.runs.folder import CONFIG_FILE, LOCK_FILE, check_recorded, comparable, refuse_other_config
from waveform.runs.settings import to_yaml
from waveform.system.atomic import explain_write_errors, write_file
from waveform.system.console import counted
from waveform.system.cpu import why_threads
from waveform.system.locks import locked

_ROWS_OF_A_LOOK = 16  # of a validation, in each process: more would be faster, but each begins with empty memories


def check_fits(
    config: dict[str, Any], train_config: BaseTrainConfig, *, dataset: Mapping[str, Any], world: World
) -> None:
    """Raises UserError for fields that the model refuses, and sizes that do not fit each other or this machine.

    dataset: `vocab_size` and `modality` of the data, which decide the rest of the model.
    """
    # With a GPU, whose own allocator refuses too large a model, or with sharding, RAM holds only the weights.
    alone = world.device.type == "cpu" and train_config.sharding == "none"
    sketch = sketch_model({**config, "dataset": dataset}, num_copies=4 if alone else 1)
    check_sizes(train_config, window=window_of(config), num_ranks=world.size)
    if world.device.type == "cpu":
        require_ram_for_state(sketch, train_config.batch_size // world.size)


@contextmanager
def claim(run_dir: Path, config: dict[str, Any], *, world: World, timeout_s: float) -> Iterator[None]:
    """Make a run folder if need be, and lock it while training with `config`; the first rank does so for all.

    Raises UserError for a folder with a run of another configuration, and if another process is training there.
    """
    with explain_write_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    refusal = f"another process is training in {run_dir}; wait for it, or give another RUN_DIR"
    with (
        explain_lost_ranks(world, timeout_s=timeout_s, where=lambda: "the start"),
        locked(run_dir / LOCK_FILE, refusal=refusal) if world.is_first else nullcontext(),
    ):
        refuse_other_config(run_dir, config)
        yield


@contextmanager
def open_training(
    data: Dataset,
    config: dict[str, Any],
    train_config: TrainConfig,
    context: RunContext,
    *,
    amount: Callable[[TokenSet], str],
) -> Iterator[Trainer]:
    """Claim the run folder of `context` for a trainer on `data`, new or resumed; `config` gains the section `dataset`.

    amount: describes the size of the training split, for the line that is printed. Raises UserError for a run folder of
    another configuration or data, and if another process is training there.
    """
    run_dir, world = context.run_dir, context.world
    splits = {split: data.open_split(split) for split in ("train", "valid", "test")}
    config["dataset"] = {
        "path": str(data.folder.resolve()),
        "vocab_size": data.vocab_size,
        "modality": data.modality,
        "checksums": {split: tokens.checksum for split, tokens in splits.items()},
    }
    if (token_range := splits["train"].token_range) is not None:
        config["dataset"]["token_range"] = list(token_range)
    names = label_names(splits["train"])
    if names:
        config["dataset"]["labels"] = names
        config["dataset"]["checksums"]["labels"] = labels_checksum(splits.values())
        splits = {split: tokens.numbered(names) for split, tokens in splits.items()}
    torch.manual_seed(config["seed"] + world.rank)
    if "origin" in config and not (run_dir / CONFIG_FILE).exists():
        find_origin(config)  # before anything is written
    with claim(run_dir, config, world=world, timeout_s=train_config.timeout_s):
        model = model_from(config)
        learner = TokenLearner(
            model, train_config, tokens=splits["train"], window=window_of(config), seed=config["seed"], world=world
        )
        valid = cut_for_a_look(splits["valid"], train_config, world=world)
        per_second = data.modality.get("sample_rate_hz")
        context = replace(context, record=comparable(config), units_per_second=per_second)
        trainer = Trainer(learner, context, validate=partial(learner.evaluated, valid))
        if trainer.resumed_from is not None:
            check_recorded(run_dir, config, trainer.resumed_from)
        elif "origin" in config:
            load_origin(config, learner)
        if world.is_first:  # now that every setting has been accepted
            write_file(run_dir / CONFIG_FILE, to_yaml(config).encode())
        labelled = f" with {len(names)} labels" if names else ""
        world.say(
            f"training {config['model']['name']} ({num_parameters(model):,} parameters, preset {config['preset']}) on "
            f"{amount(splits['train'])}{labelled}, {world.size} x {world.device.type}, into {run_dir}"
        )
        if (reach := optional_parts(model).receptive_field) and per_second:
            world.say(f"receptive field: {reach:,} samples = {1000 * reach / per_second:.1f} ms")
        if "origin" in config and trainer.resumed_from is None:
            world.say(f"beginning with the weights of {config['origin']['run']}, step {config['origin']['step']:,}")
            trainer.save()  # so that this run no longer needs its origin
        yield trainer


def say_threads(world: World, *, in_kernels: bool = False) -> None:
    """Say how many threads training uses on a CPU, for what, and why."""
    if world.device.type == "cpu":
        num_threads = torch.get_num_threads()
        each = " for kernels, 1 for torch" if in_kernels and num_threads > 1 else ""
        each += " in each process" if world.size > 1 else ""
        world.say(f"{counted(num_threads, 'thread')}{each}: {why_threads(num_threads)}")


def cut_for_a_look(valid: TokenSet, config: TrainConfig, *, world: World) -> TokenSet:
    """Cut the long utterances of `valid`, so that `train.evaluate_tokens` of it make several rows for every process."""
    num_tokens = min(valid.num_tokens, config.evaluate_tokens or valid.num_tokens)
    return valid.cut(max(1, -(-num_tokens // (_ROWS_OF_A_LOOK * world.size))))
