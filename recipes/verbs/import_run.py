"""`python -m recipes import`: turns the weights of a published Transformer-XL into a run, which every verb accepts."""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.corpora.tokenizers import SymbolTokenizer, WordTokenizer, load_tokenizer, save_tokenizer
from recipes.corpora.vocabulary import VOCABULARY_FILES, read_vocabulary
from recipes.published import Published, read_published
from recipes.text import Text, compose_config
from waveform.engine.checkpoint import TrainingProgress, save
from waveform.engine.dataset import Dataset, read_dataset, write_dataset
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import RunContext
from waveform.ranks.distributed import World
from waveform.runs.configured_model import num_parameters, sketch_model, window_of
from waveform.runs.folder import CONFIG_FILE, comparable
from waveform.runs.settings import to_yaml, typed
from waveform.system.atomic import explain_write_errors, write_file
from waveform.system.errors import UserError

_VOCABULARY_DIR = "vocabulary"  # in a run without text: a data set without splits
_RECIPES = {"words": "wikitext103", "symbols": "enwik8"}  # of a run without text, by its tokens


def import_run(
    checkpoint: Path,
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    data_dir: Path | None = None,
    vocabulary: Path | None = None,
) -> None:
    """Read published weights (recipes/published.py) and write them as a run at step 0 in `run_dir`, a new folder.

    data_dir: text that was prepared with the model's vocabulary; without it the run can only be sampled from.
    vocabulary: its words; None for those of `data_dir`, or of a file in the folder of `checkpoint`. overrides: settings
    of the run. Raises UserError for weights that cannot be imported, a vocabulary of a different size and a `run_dir`
    that is not empty.
    """
    if not checkpoint.exists():
        raise UserError(f"no such file or folder: {checkpoint}")
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"{run_dir} is not empty; give a new folder")
    tokenizer = _tokenizer(checkpoint, data_dir, vocabulary)
    published = read_published(checkpoint, first_input=tokenizer.begin)
    if published.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"the vocabulary has {tokenizer.vocab_size:,} words, but the weights in {checkpoint} are for "
            f"{published.vocab_size:,}; give the one that they were trained with"
        )
    data = None if data_dir is None else read_dataset(data_dir)
    recipe = _RECIPES[tokenizer.kind] if data is None else str(data.modality.get("recipe"))
    settings = [*_settings(published), *overrides]
    config = compose_config(recipe, settings)
    config["dataset"] = {"vocab_size": published.vocab_size}
    model = sketch_model(config, num_copies=2)  # raises if they would not fit this machine
    assert isinstance(model, nn.Module)
    try:
        model.load_state_dict(published.weights, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split(":", 1)[-1].split())[:300]
        raise UserError(
            f"{checkpoint} does not fit model=transformer_xl: {reason}; leave out settings of sizes, or get the file "
            "again"
        ) from error
    try:
        if data is None:
            folder = run_dir / _VOCABULARY_DIR
            with explain_write_errors(folder):
                folder.mkdir(parents=True)
            save_tokenizer(tokenizer, folder)
            modality = {"kind": "text", "recipe": recipe, "tokens": tokenizer.kind}
            data = write_dataset(Dataset(folder, tokenizer.vocab_size, modality, splits={}, sources={}))
        _write_run(run_dir, config, data, model)
    except BaseException:  # leave no half-written run behind
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    print(
        f"{run_dir}: Transformer-XL of {num_parameters(model):,} parameters and {published.vocab_size:,} words, "
        f"from {published.layout.name} layout; memory {config['model']['memory']}, window {window_of(config)}"
    )
    if data_dir is not None:
        print(f"to train it: python -m recipes train {data_dir} {run_dir} {shlex.join(settings)}")


def _tokenizer(checkpoint: Path, data_dir: Path | None, vocabulary: Path | None) -> WordTokenizer | SymbolTokenizer:
    """The vocabulary of `data_dir`, or else the one in the file `vocabulary`, or else the one beside the weights."""
    if data_dir is not None:
        tokenizer = load_tokenizer(data_dir)
        if not isinstance(tokenizer, WordTokenizer | SymbolTokenizer) or tokenizer.kind not in _RECIPES:
            raise UserError(
                f"{data_dir} is read as {tokenizer.kind}; published Transformer-XLs have words or symbols of "
                "their own, so prepare it as a recipe of words, enwik8 or text8 with corpus.vocabulary=FILE"
            )
        if vocabulary is not None and tokenizer.content() != read_vocabulary(vocabulary).content():
            raise UserError(
                f"{data_dir} was prepared with other words than those of {vocabulary}; prepare it with "
                f"corpus.vocabulary={vocabulary}"
            )
        return tokenizer
    if vocabulary is None:
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        found = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
        if not found:
            raise UserError(
                f"{folder} has no {' or '.join(VOCABULARY_FILES)}; give the words that the weights were trained with "
                "by --vocabulary FILE, or a text prepared with them by --data DATA_DIR"
            )
        vocabulary = found[0]
    return read_vocabulary(vocabulary)


def _settings(published: Published) -> list[str]:
    """The settings of the model, and those for training one row, whose state the checkpoint holds too."""

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")

    window = published.fields["window"]
    model = [f"model.{name}={text(value)}" for name, value in published.fields.items()]
    return ["model=transformer_xl", *model, "train.batch_size=1", f"train.chunk={window}"]


def _write_run(run_dir: Path, config: dict[str, Any], data: Dataset, model: nn.Module) -> None:
    """Write the configuration and a checkpoint of step 0, from which training with the same settings continues."""
    if data.splits:
        train: TrainConfig = typed(TrainConfig, config["train"], section="train")
        context = RunContext(run_dir, World(show_progress=False))
        with Text().open_training(data, config, train, context) as trainer:
            trainer.learner.module.load_state_dict(model.state_dict())
            trainer.save()
        return
    path = str(data.folder.resolve())
    config["dataset"] = {"path": path, "vocab_size": data.vocab_size, "modality": data.modality, "checksums": {}}
    save(
        run_dir,
        model=model,
        optimiser=torch.optim.Adam(model.parameters()),
        state=(),
        progress=TrainingProgress(step=0, num_ranks=1, seconds=0, tokens_seen=0, cursor={}, run=comparable(config)),
        conditions={},
        world=World(),
        keep=1,
    )
    write_file(run_dir / CONFIG_FILE, to_yaml(config).encode())
