"""The search behind `tune`: Optuna's trials, each a run trained for the same time, chosen by validation NLL.

    DIR/study.db       what each trial drew, its figures and how it ended: an Optuna study in SQLite
    DIR/trial-000 ...  its runs

A search that was interrupted goes on where it stopped: the trial that had not ended is resumed, like any run. Several
machines can share a study in a database, each with a DIR of its own for the runs of its trials.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna import Study, Trial, TrialPruned
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from waveform.domain import TokenDomain, TrainRequest
from waveform.engine.interface import SequenceModel
from waveform.engine.labels import labels_checksum
from waveform.engine.metrics import MetricsLog, bits, read_metrics
from waveform.engine.nonfinite import Diverged
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import OnEvaluate, RunContext
from waveform.ranks.distributed import World, job
from waveform.runs.configured_model import num_parameters
from waveform.runs.folder import comparable
from waveform.runs.learning_curves import learning_curve
from waveform.runs.scoring import EvaluateOptions, score
from waveform.runs.settings import differing_keys, given_by, typed
from waveform.runs.space import SearchConfig, Space, short, shown, space_of
from waveform.system.atomic import explain_write_errors
from waveform.system.errors import UserError
from waveform.system.locks import locked
from waveform.system.ram import is_shortage
from waveform.system.signals import Interrupted, StopRequest

STUDY_FILE = "study.db"
_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}  # the best first
_LOCK_FILE = ".tune.lock"
_PREPARED = ".prepared"  # ending of a data set that was prepared for the search
_PATIENCE_S = 2.0
_MOST_TOKENS = 2_000_000  # about how much of the validation split a trial is judged by
_NUM_LOOKS = 5  # parts of the budget; after each but the last, a trial is looked at, and may be pruned,
_FIRST_PRUNED = 2  # but not at the first look: warm-up and a high learning rate still hide how good a trial will be
_UNPRUNED = (2, 5)  # the first third of the trials is never pruned: at least 2 trials, and at most 5
_BY_BUDGET = ("train.max_steps", "train.max_seconds", "train.evaluate_every", "train.evaluate_every_seconds")
# Settings of trials in place of their preset's, unless the user gives them. 100,000 samples take 1 or 2 s on a CPU.
_DEFAULTS = ("train.checkpoint_every=1000", "train.keep_checkpoints=1", "train.evaluate_tokens=100000")


def search(
    out_dir: Path, request: TrainRequest, domain: TokenDomain, config: SearchConfig, *, show_progress: bool = True
) -> tuple[list[dict[str, Any]], Path]:
    """Run trials in `out_dir` until `config.trials` have ended, those of earlier calls and other machines included.

    Returns an entry for every trial that has ended, the best first, and the folder of the data. request: what every
    trial trains on, with settings that are not searched. Raises UserError for settings that a run refuses, and for a
    folder with anything but a search by the same settings; Interrupted, after what was trained has been saved, if a
    signal asks to stop.
    """
    base = domain.compose(request)
    domain.refuse(request, base)
    train_config = typed(domain.train_config, base["train"], section="train")
    with job(device=train_config.device, timeout_s=train_config.timeout_s, show_progress=show_progress) as world:
        if world.size > 1:
            raise UserError("a search trains one model at a time, in one process; start it without torchrun")
        space = space_of(base["model"]["name"], packages=domain.family.packages, file=config.space)
        running = _Search(out_dir, request, base, _free(space, request.overrides), domain, config, world)
        running.check_alone()
        _require_own(out_dir)
        with (
            locked(out_dir / _LOCK_FILE, refusal=f"another process is searching in {out_dir}; wait for it"),
            _explained(out_dir, shared=config.storage is not None),
        ):
            return running.run()


def _free(space: Space, overrides: Sequence[str]) -> Space:
    """The space without what the user's settings give. Raises UserError for settings that no search can vary."""
    given = set(given_by(overrides))
    searched = {setting for dimension in space.dimensions for setting in space.settings_of(dimension)}
    for setting in sorted(given | searched):
        place = f"{space.place}: " if setting in searched else ""
        if setting in _BY_BUDGET:
            raise UserError(f"{place}{setting} follows from --budget; leave it out")
        if place and setting.partition(".")[0] not in ("model", "train"):
            raise UserError(f"{place}{setting!r} cannot be searched; only settings of model and train can")
    if not (free := space.without(given)).dimensions:
        raise UserError(f"nothing is left to search: your settings give values to all that {space.place} varies")
    return free


def _require_own(out_dir: Path) -> None:
    """Make `out_dir` if need be. Raises UserError if it contains anything but a search."""
    with explain_write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    others = [path.name for path in out_dir.iterdir() if not path.name.startswith(".") and path.suffix != _PREPARED]
    if others and STUDY_FILE not in others and not any(out_dir.glob("trial-*")):
        raise UserError(f"{out_dir} is not a search but contains other files ({others[0]}, ...); give a new folder")


@contextmanager
def _explained(out_dir: Path, *, shared: bool) -> Iterator[None]:
    """Explain in one line why a study cannot be read or written."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        if shared:
            raise UserError(f"the database of --storage cannot be used ({reason}); check its URL and access") from error
        raise UserError(
            f"{out_dir / STUDY_FILE} cannot be used ({reason}); free space on its disk if that is full, or else "
            "restore it from a copy, or search in a new folder"
        ) from error


@dataclass
class _Search:
    """One study, and the runs of its trials."""

    out_dir: Path
    request: TrainRequest  # with the settings of every trial
    base: dict[str, Any]  # the configuration that they give
    space: Space
    domain: TokenDomain
    config: SearchConfig
    world: World

    def check_alone(self) -> None:
        """Raises UserError for a choice, or an end of a range, that a run refuses even if nothing else is varied."""
        for drawn in self.space.each_alone():
            try:
                self._checked(drawn)
            except UserError as error:
                settings = " ".join(self.space.overrides(drawn))
                raise UserError(f"{self.space.place}: with {settings}: {error}") from error

    def _settings(self, drawn: dict[str, Any]) -> list[str]:
        """The settings of the trial that drew `drawn`, with which `train` trains it again."""
        limits = ("train.max_steps=null", f"train.max_seconds={self.config.budget_s:g}")
        return [*self.request.overrides, *self.space.overrides(drawn), *limits]

    def _checked(self, drawn: dict[str, Any]) -> tuple[dict[str, Any], TrainConfig]:
        """The configuration of a trial, with looks at the validation split. Raises UserError if a run refuses it."""
        looks = ("train.evaluate_every=1000000", f"train.evaluate_every_seconds={self.config.budget_s / _NUM_LOOKS:g}")
        config = self.domain.compose(replace(self.request, overrides=[*_DEFAULTS, *self._settings(drawn), *looks]))
        train_config = typed(self.domain.train_config, config["train"], section="train")
        self.domain.check(self.request.source, config, train_config, world=self.world)
        return config, train_config

    def run(self) -> tuple[list[dict[str, Any]], Path]:
        """Run trials until enough have ended or are run by other machines; return what `search` does."""
        first_run = replace(self.request, run_dir=self._run_dir(0))  # the data prepared for it serves all trials
        self._data = self.domain.open_data(first_run, self.base, world=self.world)
        self._valid = self._data.open_split("valid")
        say = self.world.say
        with self._storage() as storage:
            self._study = self._begun(storage)
            searched = ", ".join(map(short, self.space.dimensions))
            say(f"searching {searched} in {self.config.trials} trials of {self.config.budget} of training each")
            while (trial := self._next()) is not None:
                drawn = self.space.draw(trial)
                say(f"trial {trial.number} ({trial.number + 1} of {self.config.trials}): {shown(drawn)}")
                self._run_trial(trial, drawn)
            entries = [self._entry(trial) for trial in self._study.get_trials(states=tuple(_STATES))]
        entries.sort(key=lambda entry: (list(_STATES.values()).index(entry["state"]), entry["nats_per_token"] or 0))
        return entries, self._data.folder

    @contextmanager
    def _storage(self) -> Iterator[RDBStorage]:
        """The database of the study, whose connections are closed at the end."""
        own = URL.create("sqlite", database=str((self.out_dir / STUDY_FILE).absolute())).render_as_string()
        begin = partial(RDBStorage, self.config.storage or own)
        try:
            storage = begin()
        except SQLAlchemyError:
            time.sleep(_PATIENCE_S)  # another machine may be making the tables at this moment
            storage = begin()
        except ImportError as error:
            raise UserError("--storage needs a database driver that is not installed") from error
        try:
            yield storage
        finally:
            storage.engine.dispose()

    def _begun(self, storage: RDBStorage) -> Study:
        """Open the study, or begin it. Raises UserError if it was begun with other settings or other data."""
        fewest, most = _UNPRUNED
        num_unpruned = min(max(self.config.trials // 3, fewest), most)
        study = optuna.create_study(
            storage=storage,
            study_name="tune",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(num_unpruned, n_warmup_steps=_FIRST_PRUNED),
        )
        base = self.domain.compose(replace(self.request, overrides=self._settings({})))
        checksums = {split: self._data.open_split(split).checksum for split in ("train", "valid")}
        if self._data.labels:
            checksums["labels"] = labels_checksum(self._data.open_split(split) for split in ("train", "valid"))
        settings = {
            **comparable({**base, "dataset": {"checksums": checksums}}),
            "--budget": self.config.budget_s,
            "--seed": self.config.seed,
            "space": msgspec.to_builtins(self.space.dimensions),
        }
        known = study.user_attrs.get("settings", settings)
        if different := differing_keys(known, settings):
            shared = self.config.storage is not None
            place, remedy = ("--storage", "database") if shared else (self.out_dir, "folder")
            raise UserError(f"{place} contains another search: {'; '.join(different)}. Give another {remedy}")
        study.set_user_attr("settings", settings)
        if not study.trials:  # the first one is the preset's, as far as the space contains it
            study.enqueue_trial(self.space.drawn_by(base), skip_if_exists=True)
        return study

    def _next(self) -> Trial | None:
        """The trial of this folder that has not ended, or a new one; None if enough have ended or are running."""
        for begun in self._study.get_trials(states=(TrialState.RUNNING,)):
            if self.config.storage is None or self._run_dir(begun.number).exists():
                return optuna.Trial(self._study, begun._trial_id)
        if len(self._study.get_trials(states=(TrialState.RUNNING, *_STATES))) >= self.config.trials:
            return None
        trial = self._study.ask()
        if trial.number >= self.config.trials:  # another machine has begun the last one at this moment
            self._study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
            return None
        # Seeded for each trial: a search that goes on would otherwise draw its first trials once more.
        seed = random.Random(f"{self.config.seed} {trial.number}").getrandbits(32)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)
        self._run_dir(trial.number).mkdir(exist_ok=True)  # shows that the trial belongs to this folder's search
        return trial

    def _run_trial(self, trial: Trial, drawn: dict[str, Any]) -> None:
        """Train and judge what is left of a trial, and note how it ended."""
        run_dir, say = self._run_dir(trial.number), self.world.say
        try:
            config, train_config = self._checked(drawn)
        except UserError as error:
            return self._fail(trial, str(error))
        look = self._look(trial, run_dir, config)
        context = RunContext(run_dir, self.world, unit=self.domain.unit, on_evaluate=look)
        try:
            with self.domain.open_training(self._data, config, train_config, context) as trainer:
                result = trainer.run()
        except TrialPruned:
            self._study.tell(trial, state=TrialState.PRUNED)
            return say(f"trial {trial.number} is pruned: it is worse than the median of the trials before it")
        except Diverged as error:
            return self._fail(trial, str(error))
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            return self._fail(trial, "there is not enough memory for it")
        if result.asked_by:
            raise Interrupted(result.asked_by)
        run = self.domain.load(run_dir, device=self.world.device.type)
        protocol = self.domain.protocol(config["train"], EvaluateOptions())
        nats = score(run, self._valid, protocol=protocol, max_tokens=_MOST_TOKENS, world=self.world).nats_per_token
        if not math.isfinite(nats):
            return self._fail(trial, f"its validation NLL is {nats}")
        self._note(trial, run.model, run.train_seconds, run.tokens_seen)
        self._study.tell(trial, nats)
        best = self._study.best_trial.number
        so_far = "the best so far" if best == trial.number else f"the best so far is trial {best}"
        say(f"trial {trial.number}: {nats:.4f} nats = {bits(nats):.4f} bits per {self.domain.unit}; {so_far}")

    def _look(self, trial: Trial, run_dir: Path, config: dict[str, Any]) -> OnEvaluate:
        """What training calls after each evaluation: reports it to Optuna, and raises TrialPruned to end the trial."""

        def look(model: SequenceModel, step: int, log: MetricsLog, stop: StopRequest) -> None:
            curve = learning_curve(read_metrics(run_dir), config["train"])
            share = int(curve.seconds[-1] / self.config.budget_s * _NUM_LOOKS + 1e-6)  # seconds are rounded
            seen = self._study.trials[trial.number].intermediate_values
            if not 0 < share < _NUM_LOOKS or share in seen or not math.isfinite(curve.nats[-1]):
                return
            trial.report(curve.nats[-1], share)
            if trial.should_prune():
                self._note(trial, model, curve.seconds[-1], round(curve.tokens[-1]))
                raise TrialPruned

        return look

    def _note(self, trial: Trial, model: SequenceModel, seconds: float, tokens_seen: int) -> None:
        figures = {"num_parameters": num_parameters(model), "train_seconds": seconds, "train_tokens_seen": tokens_seen}
        trial.set_user_attr("figures", figures)

    def _fail(self, trial: Trial, reason: str) -> None:
        trial.set_user_attr("reason", reason)
        self._study.tell(trial, state=TrialState.FAIL)
        self.world.say(f"trial {trial.number} failed: {reason}")

    def _entry(self, trial: FrozenTrial) -> dict[str, Any]:
        """What `tune --json` says of a trial."""
        looks = trial.intermediate_values
        nats = trial.value if trial.value is not None else (looks[max(looks)] if looks else None)
        failed, run_dir = trial.state == TrialState.FAIL, self._run_dir(trial.number)
        return {
            "trial": trial.number,
            "run": str(run_dir) if self.config.storage is None or run_dir.exists() else None,  # on another machine
            "state": _STATES[trial.state],
            "drawn": trial.params,
            "settings": self._settings(trial.params),
            "nats_per_token": None if failed else nats,
            "bits_per_token": None if failed or nats is None else bits(nats),
            "nll_nats_by_share_of_budget": {f"{share / _NUM_LOOKS:g}": looks[share] for share in sorted(looks)},
            **trial.user_attrs.get("figures", {}),
            "reason": trial.user_attrs.get("reason"),
        }

    def _run_dir(self, number: int) -> Path:
        return self.out_dir / f"trial-{number:03d}"
