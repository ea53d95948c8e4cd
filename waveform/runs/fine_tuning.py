"""Fine-tuning (`train --from`): a new run begins with another's settings and weights, on its own data and schedule.

The section `origin` of a run's configuration says what it began from. The weights are kept as its checkpoint of step 0,
so that resuming it does not need the other run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waveform.engine import checkpoint
from waveform.engine.learner import Learner
from waveform.runs.configured_model import labels_of
from waveform.runs.folder import CONFIG_FILE, Saved, comparable, read_config, with_defaults
from waveform.runs.named import full_name
from waveform.runs.opened import find_saved, use_saved
from waveform.runs.settings import differing_keys, given_by
from waveform.system.errors import UserError

# Settings that depend on the machine, which a run does not take over.
_OF_THE_MACHINE = {"train.device", "train.sharding", "train.checkpoint_activations", "train.compile"}
# Fields that may change from run to run: how far a model looks back, how it learns and began, how wide filters are.
_MAY_DIFFER = {
    "window", "memory", "compressed", "attention", "compression_loss", "dropout", "attention_dropout", "dropout_mask",
    "local_layers", "initial_values", "compression_init", "prediction_widening",
}  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """The run that training goes on from, as a user names it."""

    run: Path | str | None = None  # None: it begins from scratch
    optimiser: bool = False  # take over its optimiser's state too

    def __post_init__(self) -> None:
        if self.optimiser and self.run is None:
            raise UserError("--from-optimiser takes the optimiser of the run that --from names; give both")


def compose_from(
    origin: Origin, run_dir: Path | None, overrides: Sequence[str], *, compose: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Compose the configuration of a run in `run_dir` from `overrides` and what it takes over from its origin.

    It takes over the settings of the model and, unless `overrides` choose a preset, of training. If `run_dir` already
    contains a run, they are read there, because the origin may be gone. Raises UserError if there is no such run, if
    the run in `run_dir` began in another way, for a study, whose settings would give way to those of the origin, and
    for fields of the model with which the weights would not fit.
    """
    begun = run_dir if run_dir is not None and (run_dir / CONFIG_FILE).exists() else None
    before, record = _new(origin) if begun is None else _begun(begun, origin)
    if record is None:
        return compose(overrides)
    before = with_defaults(before)  # refuses a model named by a path, where Hydra would look for a file
    given = set(given_by(overrides))
    if "study" in given:
        raise UserError("the settings of a study would give way to those that --from takes over; give them one by one")
    own_model = [] if "model" in given else [f"model={before['model']['name']}"]
    config = compose([*own_model, *overrides], any_model=True)
    kept = {"model": config["model"]["name"] == before["model"]["name"], "train": "preset" not in given}
    for section in (name for name in kept if kept[name]):
        for key in config[section].keys() & before[section].keys():  # settings that both versions have
            if f"{section}.{key}" not in given | _OF_THE_MACHINE:
                config[section][key] = before[section][key]
    if "preset" not in given:
        config |= {key: before[key] for key in ("preset", "study") if key in before}
    if begun is None:
        _refuse_other_model(record["run"], before, config)
    return {**config, "origin": record}


def load_origin(config: dict[str, Any], learner: Learner) -> None:
    """Give a new learner the weights, and if asked for the optimiser, of its origin; errors as for `find_origin`."""
    _, before, found = find_origin(config)
    new = None if labels_of(before) == labels_of(config) else "label_embedding.table"
    checkpoint.restore_weights(found, learner.module, new=new)
    if config["origin"]["optimiser"]:
        checkpoint.restore_optimiser(found, learner.optimiser)


def find_origin(config: dict[str, Any]) -> Saved:
    """Find the run that a run with the configuration `config`, its section `dataset` included, begins from.

    Raises UserError if that run is gone or no longer the one that the configuration names, was trained on another kind
    of tokens or with other labels, or has no optimiser that fits, if that is asked for.
    """
    record = config["origin"]
    saved = find_saved(record["run"])
    _, before, found = saved
    # A run without labels may go on with labels, but its optimiser's state has no place for them.
    labels = bool(labels_of(before) or record["optimiser"])
    if different := differing_keys(_tokens(before, labels=labels), _tokens(config, labels=labels)):
        without = "--from or --from-optimiser" if record["optimiser"] else "--from"
        raise UserError(
            f"{record['run']} was trained on different tokens: {'; '.join(different)}; begin without {without}"
        )
    if found.weights_digest() != record["weights"]:
        raise UserError(
            f"{record['run']} has been trained since, to step {found.step}, and this run begins from its step "
            f"{record['step']}; give another RUN_DIR"
        )
    if record["optimiser"] and found.progress.weights_only:
        raise UserError(f"{record['run']} was exported without its optimiser; leave out --from-optimiser")
    return saved


def _new(origin: Origin) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The configuration of the run that a new one begins from, and what the new one records of it; None: no origin."""
    if origin.run is None:
        return {}, None
    (_, before, found), weights = use_saved(origin.run, lambda saved: (saved, saved.checkpoint.weights_digest()))
    return before, {"run": full_name(origin.run), "step": found.step, "weights": weights, "optimiser": origin.optimiser}


def _begun(run_dir: Path, origin: Origin) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The configuration of the run in `run_dir`, and what it records of its origin, if it has one."""
    own = read_config(run_dir)
    record = own.get("origin")
    if origin.run is not None:
        if record is None:
            raise UserError(
                f"the run in {run_dir} did not begin from another one; leave out --from, or give another RUN_DIR"
            )
        asked = {"run": full_name(origin.run), "optimiser": origin.optimiser}
        different = differing_keys({key: record[key] for key in asked}, asked)
        if different:
            raise UserError(
                f"the run in {run_dir} has a different origin: {'; '.join(different)}; leave out --from to resume it, "
                "or give another RUN_DIR"
            )
    return own, record


def _refuse_other_model(run: str, before: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises UserError, naming the fields, if the weights of `run` do not fit the model of `config`."""
    keys = differing_keys(comparable(before)["model"], comparable(config)["model"])
    if different := [f"model.{key}" for key in keys if key.partition(" ")[0] not in _MAY_DIFFER]:
        raise UserError(
            f"the weights of {run} do not fit this model: {'; '.join(different)}; leave these settings out, or "
            "begin without --from"
        )


def _tokens(config: dict[str, Any], *, labels: bool) -> dict[str, Any]:
    """What gives tokens their meaning: not a text's recipe, how recordings were cut, or which corpus they are from."""
    data = config["dataset"]
    modality = {key: value for key, value in data["modality"].items() if key not in ("recipe", "pieces", "corpus")}
    known = {"labels": labels_of(config)} if labels else {}
    return {"dataset": {"vocab_size": data["vocab_size"], "modality": modality, **known}}
