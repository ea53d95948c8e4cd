"""Scores a trained run on a token set of any modality, and collects what every report of it contains."""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from waveform.engine import checkpoint
from waveform.engine.dataset import is_dataset, read_dataset
from waveform.engine.dynamic import OPTIMISERS, DynamicConfig, evaluate_dynamically
from waveform.engine.evaluator import Classes, EvaluateConfig, Evaluation
from waveform.engine.evaluator import evaluate as evaluate_tokens
from waveform.engine.metrics import read_metrics, unigram_nll
from waveform.engine.sound_classes import classes_of
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.models.predictors_alone import PredictorsAlone
from waveform.ranks.distributed import World
from waveform.runs.folder import CONFIG_FILE, OWN_DATA_DIR
from waveform.runs.learning_curves import LearningCurve, learning_curve
from waveform.runs.opened import TrainedRun
from waveform.runs.speeds import speeds_of, training_speed, waited_share
from waveform.system.console import printable
from waveform.system.errors import UserError
from waveform.system.progress import Progress
from waveform.system.rules import NOT_NEGATIVE, check_rules, one_of, whole_number

_PREDICTED: dict[Hashable, Evaluation] = {}  # kept, because runs that are compared have the same tokens


def own_tokens(run: TrainedRun, *, split: str) -> TokenSet:
    """The tokens of a split of the run's own data set.

    Warns if they have changed since training. Raises UserError for a damaged shard, which it names, and if the data is
    gone or has another vocabulary.
    """
    folder = Path(run.config["dataset"]["path"])
    if folder == run.folder / OWN_DATA_DIR or not is_dataset(folder):
        raise UserError(
            f"{run.given} is without the data that it was trained on: it was exported, or {folder} is gone; evaluate, "
            f"compare, analyse and report take a data set with --data, and dataset.path in {run.folder / CONFIG_FILE} "
            "says where it is"
        )
    tokens = read_dataset(folder).open_split(split)
    if tokens.vocab_size != (trained := run.config["dataset"]["vocab_size"]):
        raise UserError(
            f"{run.given} was trained with a vocabulary of {trained}, and {folder} has one of {tokens.vocab_size}; "
            "prepare it as it was, or name data with that vocabulary with --data"
        )
    if tokens.checksum != run.config["dataset"]["checksums"].get(split):
        print(
            f"warning: the {split} data of {folder} is not the one that {run.given} was trained with, and may include "
            "files that it was trained on",
            file=sys.stderr,
        )
    return tokens


def score(
    run: TrainedRun,
    tokens: TokenSet,
    *,
    protocol: str,
    world: World,
    classes: Classes | None = None,
    dynamic: DynamicConfig | None = None,
    max_tokens: int | None = None,
) -> Evaluation:
    """NLL of each utterance of `tokens` under `run`, in fp32 on every device.

    protocol, world, classes: as in the engine's `evaluate`. dynamic: let a copy of the model learn from what it has
    scored. max_tokens: about how many to score, of utterances spread evenly; None: all.
    """
    tokens = run.reading(tokens)
    verb = "evaluate" if dynamic is None else "evaluate dynamically"
    chunk = run.config["train"]["chunk"]
    config = EvaluateConfig(window=run.window, protocol=protocol, chunk=chunk, max_tokens=max_tokens)
    total = min(tokens.num_tokens, max_tokens or tokens.num_tokens)
    with Progress(f"{verb} {run.name}", total=total, unit=run.unit, unit_s=run.unit_s, enabled=world.shows) as progress:
        if dynamic is not None:
            return evaluate_dynamically(
                run.model, tokens, config, dynamic, world=world, progress=progress, classes=classes
            )
        return evaluate_tokens(run.model, tokens, config, world=world, progress=progress, classes=classes)


class Opened(NamedTuple):
    """Runs that are scored on the same tokens, and by which processes."""

    runs: Sequence[TrainedRun]
    tokens: TokenSet
    data: Path | str | None  # which has the tokens, if it is not the runs' own
    world: World


def common_tokens(runs: Sequence[TrainedRun], token_sets: Sequence[TokenSet], *, split: str) -> TokenSet:
    """Choose from the token sets of runs, which must have the same tokens, the one whose labels the runs read.

    Raises UserError if tokens differ, and if two of the runs that read labels have different ones.
    """
    for run, tokens in zip(runs, token_sets, strict=True):
        if tokens.checksum != token_sets[0].checksum:
            raise UserError(
                f"{runs[0].given} and {run.given} have different {split} data, so they cannot be compared or analysed "
                "as a group; train both on one data set, or name one for all of them with --data"
            )
    labelled = [(run, tokens) for run, tokens in zip(runs, token_sets, strict=True) if any(tokens.labels)]
    reading = [(run, tokens) for run, tokens in labelled if run.labels]
    for run, tokens in reading:
        if tokens.labels != reading[0][1].labels:
            raise UserError(
                f"the data of {reading[0][0].given} and {run.given} has different labels for the same utterances; name "
                "one data set for all of them with --data"
            )
    return next((tokens for _, tokens in [*reading, *labelled]), token_sets[0])


def nll_by_label(result: Evaluation, tokens: TokenSet) -> list[dict[str, Any]]:
    """NLL of the utterances of each label of `tokens`, those with most tokens first; none if it has no labels.

    `label` is None for utterances without one.
    """
    label_of = dict(zip(tokens.names, tokens.labels, strict=True))
    wholes = [name if name in label_of else name.rpartition("#")[0] for name in result.names]  # of pieces NAME#i
    groups: dict[str | None, list[int]] = {}
    for i, whole in enumerate(wholes):
        if result.counts[i]:
            groups.setdefault(label_of[whole], []).append(i)
    if groups.keys() <= {None}:
        return []
    entries = [
        {
            "label": label,
            "num_utterances": len({wholes[i] for i in of_label}),
            "num_tokens": int(result.counts[of_label].sum()),
            "nats_per_token": float(result.nats[of_label].sum() / result.counts[of_label].sum()),
        }
        for label, of_label in groups.items()
    ]
    return sorted(entries, key=lambda entry: (-entry["num_tokens"], entry["label"] or ""))


@dataclass(frozen=True)
class EvaluateOptions:
    """What a user chooses for the evaluation of a run."""

    split: str = "test"
    # utterance | chunk | carry | clip: when state is reset; None: as `TokenDomain.protocol` says
    protocol: str | None = None
    memory: int | None = None  # memory slots; None: as in training
    compressed: int | None = None  # compressed slots; None: as in training
    dynamic: bool = False  # score again while learning from what was scored
    dynamic_optimiser: Annotated[str, one_of(*OPTIMISERS)] = "sgd"  # sgd | adam | continued: as the checkpoint left it
    # None: the optimiser's default in `DynamicConfig`; continued: that of training
    dynamic_lr: Annotated[float, NOT_NEGATIVE] | None = None
    average: Annotated[int, whole_number(1)] = 1  # newest checkpoints whose weights are averaged
    stride: int | None = None  # tokens by which the window of a model without memory moves; None: its length
    published: str | None = None  # for `compare`: a corpus of audio whose published figures are shown beside the runs
    published_words: bool = False  # word-level perplexity divides by the number of words published for the corpus
    # Number of pieces that the split is cut into, each read from empty memories; None: whole utterances
    rows: Annotated[int, whole_number(1)] | None = None

    def __post_init__(self) -> None:
        check_rules(self)
        if not self.dynamic and (self.dynamic_lr is not None or self.dynamic_optimiser != "sgd"):
            raise UserError("--dynamic-lr and --dynamic-optimiser are for dynamic evaluation; give --dynamic too")
        if self.stride is not None and (self.protocol is not None or self.dynamic):
            raise UserError(
                "--stride begins each window with empty memories, which --protocol and --dynamic do not; leave one out"
            )

    def pieces(self, tokens: TokenSet) -> TokenSet:
        """The split as it is scored: utterances longer than 1/`rows` of it are cut."""
        return tokens if self.rows is None else tokens.cut(-(-tokens.num_tokens // self.rows))

    def dynamic_config(self, run: TrainedRun) -> DynamicConfig | None:
        """Dynamic evaluation, if chosen, with the clip norm and auxiliary weight of training.

        Raises UserError if training's optimiser is to continue, but the run is still being trained.
        """
        if not self.dynamic:
            return None
        train, lr, found = run.config["train"], self.dynamic_lr, None
        if self.dynamic_optimiser == "continued":
            found = checkpoint.newest(run.folder)
            if found is None or found.step != run.step:
                raise UserError(f"{run.folder} is being trained; evaluate it dynamically when it is done")
            lr = _learning_rate(run) if lr is None else lr
        return DynamicConfig(
            optimiser=self.dynamic_optimiser,
            lr=lr,
            checkpoint=found,
            beta2=train["beta2"],
            clip_norm=train["clip_norm"],
            aux_weight=train["aux_weight"],
            rows=self.rows or DynamicConfig.rows,
        )


def _learning_rate(run: TrainedRun) -> float:
    """The learning rate with which training would go on."""
    known = {field.name for field in fields(TrainConfig)}  # speech has others too
    given = {name: value for name, value in run.config["train"].items() if name in known}
    train = TrainConfig(**given | {"log": "none"})  # a tracker may not be installed here
    return train.learning_rate(run.step, run.train_seconds)


def describe_dynamic(result: Evaluation, config: DynamicConfig, *, plain: Evaluation) -> dict[str, Any]:
    """What reports say of a dynamic evaluation, besides the plain one of the same tokens."""
    return {
        "optimiser": config.optimiser,
        "lr": config.learning_rate,
        "clip_norm": config.clip_norm,
        "nats_per_token": result.nats_per_token,
        "bits_per_token": result.bits_per_token,
        "difference_to_plain_nats": result.nats_per_token - plain.nats_per_token,
    }


def linear_prediction_nats(run: TrainedRun, tokens: TokenSet, result: Evaluation) -> float | None:
    """NLL per token of linear prediction alone, with no training, on the utterances that `result` scored of `tokens`.

    Its state is reset wherever the run's was, or at each utterance if windows overlap. None unless tokens are audio.
    """
    classes = classes_of(run.config["dataset"]["modality"])
    if classes is None:
        return None
    protocol = "utterance" if result.protocol == "window" else result.protocol
    config = EvaluateConfig(window=run.window, protocol=protocol, chunk=run.config["train"]["chunk"])
    key = (classes, tokens.checksum, tuple(tokens.lengths), protocol, config.reset_every)
    if key not in _PREDICTED:
        _PREDICTED[key] = evaluate_tokens(PredictorsAlone(classes), tokens, config)
    alone = _PREDICTED[key]
    scored = np.isin(alone.names, result.names)
    return float(alone.nats[scored].sum() / alone.counts[scored].sum())


def unigram_nats(run: TrainedRun, tokens: TokenSet, result: Evaluation) -> float | None:
    """NLL per token of a unigram model (the training histogram) on the utterances that `result` scored of `tokens`.

    None if the training data is gone.
    """
    folder = Path(run.config["dataset"]["path"])
    if not is_dataset(folder):
        return None
    counts = tokens.counts
    if len(result.names) < len(tokens):
        scored = np.flatnonzero(np.isin(tokens.names, result.names))
        read = [tokens.read(i, start=0, stop=tokens.lengths[i]) for i in scored.tolist()]
        counts = np.bincount(np.concatenate(read), minlength=tokens.vocab_size)
    return unigram_nll(read_dataset(folder).open_split("train").counts, counts)


@dataclass(frozen=True)
class ScoredRun:
    """A run, its NLL of the tokens that were scored, and how its training went."""

    run: TrainedRun
    result: Evaluation
    figures: dict[str, Any]  # what `evaluate --json` writes

    @cached_property
    def curve(self) -> LearningCurve:
        return learning_curve(self._records, self.run.config["train"])

    @cached_property
    def all_figures(self) -> dict[str, Any]:
        """What a comparison's JSON has of this run on its own."""
        return {
            **self.figures,
            "train_tokens_per_second": training_speed(self._records),
            "train_tokens_per_second_by_slice": speeds_of(self._records),
            "train_waited_share": waited_share(self._records, self.run.config["train"]),
            "learning_curve": asdict(self.curve),
            "device": str(self.run.device),
            "num_threads": torch.get_num_threads(),
        }

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        return read_metrics(self.run.folder)


def names_of(runs: Sequence[TrainedRun]) -> list[str]:
    """`display_names` of runs that need not have been scored."""
    return display_names([{"model": run.name, "run": str(run.given)} for run in runs])


def trained_on(entry: dict[str, Any]) -> str:
    """The cell of a table that says how long a run was trained."""
    after = f", after {entry['origin']}" if entry.get("origin") else ""
    return f"{entry['train_tokens_seen'] / 1e6:.3g} M {entry['unit']}s, {entry['train_seconds']:.0f} s{after}"


def display_names(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The model of each run; if several have the same model, with the run's name, or if need be its path."""
    models = [entry["model"] for entry in entries]
    named = [f"{entry['model']} ({Path(entry['run']).name})" for entry in entries]
    return [
        printable(
            model if models.count(model) == 1 else name if named.count(name) == 1 else f"{model} ({entry['run']})"
        )
        for model, name, entry in zip(models, named, entries, strict=True)
    ]
