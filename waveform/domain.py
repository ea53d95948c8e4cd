"""What verbs need to know about a kind of data: its settings, data sets, trained runs and terms.

Speech, text and agents each register one `Domain`, by the entry-point group `waveform.domains`, under the `kind` that
is in the modality of their data sets. A verb asks for the domain of what the user names, a source or a run, and is
otherwise the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from waveform.engine.dataset import DATASET_FILE, Dataset, is_dataset, read_dataset
from waveform.engine.evaluator import Classes, Evaluation
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import BaseTrainConfig, TrainConfig
from waveform.engine.trainer import OnEvaluate, RunContext, Trainer
from waveform.quality.config import QualityConfig
from waveform.ranks.distributed import World
from waveform.report_page.contents import ReportContents
from waveform.runs.configured_model import num_parameters
from waveform.runs.fine_tuning import Origin, compose_from
from waveform.runs.folder import CONFIG_FILE, read_config
from waveform.runs.learning_curves import save_learning_curves
from waveform.runs.named import find_run
from waveform.runs.opened import TrainedRun, average_weights
from waveform.runs.scoring import EvaluateOptions, Opened, ScoredRun, describe_dynamic, display_names, score
from waveform.runs.settings import ConfigFamily
from waveform.runs.sliding import evaluate_sliding
from waveform.runs.training import check_fits, open_training
from waveform.system.errors import UserError
from waveform.system.plugins import entry_points

_GROUP = "waveform.domains"
_DEFAULT = "audio"  # of a folder that is not a data set
SCHEMA = 1  # of the JSON that `evaluate`, `compare` and `race` write (docs/evaluation.md)


class Metrics(NamedTuple):
    """What a domain reports of a run's NLL."""

    of: Callable[[Evaluation], dict[str, Any]]
    classes: Classes | None = None  # of the tokens: NLL is also summed for each class


@dataclass(frozen=True)
class TrainRequest:
    """What a user asks `train` for."""

    source: Path
    run_dir: Path | None = None  # None: only the configuration is wanted
    overrides: Sequence[str] = ()
    origin: Origin = field(default_factory=Origin)  # the run whose weights and settings this one begins with
    config_dir: Path | str | None = None  # a folder of the user's own Hydra configs

    def composed(self, compose: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """The configuration that `compose` makes of it; arguments and errors as for `compose_from`."""
        compose = partial(compose, config_dir=self.config_dir)
        return compose_from(self.origin, self.run_dir, self.overrides, compose=compose)


class Domain(ABC):
    """One kind of run: its settings, and how it is trained."""

    kind: ClassVar[str]
    runs: ClassVar[str]  # what messages call its runs
    unit: ClassVar[str] = "token"  # what users call a token
    # Verb -> `module:function`, for the verbs of its runs that differ by domain
    verbs: ClassVar[Mapping[str, str]] = {}
    # Parameter of such a function -> dataclass of what users choose, if the parameter's annotation does not say which
    asked: ClassVar[Mapping[str, type]] = {}
    train_config: ClassVar[type[BaseTrainConfig]] = TrainConfig

    def knows(self, name: str) -> bool:
        """Whether `name`, which is not a path, names something to train on."""
        return False

    @abstractmethod
    def compose(self, request: TrainRequest) -> dict[str, Any]:
        """The resolved configuration. Raises UserError."""

    # Training

    def refuse(self, request: TrainRequest, config: dict[str, Any]) -> None:
        """Raises UserError for a source that is not what the settings, or the run that it begins from, need."""
        return None

    def check(self, source: Path, config: dict[str, Any], train_config: BaseTrainConfig, *, world: World) -> None:
        """Raises UserError, before anything is prepared or written, for sizes that do not fit, if they are known."""
        return None

    def open_data(self, request: TrainRequest, config: dict[str, Any], *, world: World) -> Dataset | None:
        """The data set of the source, prepared first if need be; None for a domain without data."""
        return None

    def on_evaluate(self, data: Dataset | None, train_config: BaseTrainConfig) -> OnEvaluate | None:
        """What the first rank calls after each evaluation in training."""
        return None

    @abstractmethod
    def open_training(
        self, data: Dataset | None, config: dict[str, Any], train_config: BaseTrainConfig, context: RunContext
    ) -> AbstractContextManager[Trainer]:
        """Claim the run folder of `context` for a trainer, new or resumed. Raises UserError."""


class TokenDomain(Domain):
    """One kind of run on a data set: also how the data is opened, and how runs are scored on it."""

    verbs: ClassVar[Mapping[str, str]] = {
        "evaluate": "waveform.verbs.evaluate:evaluate",
        "compare": "waveform.verbs.compare:compare",
        "report": "waveform.verbs.report:report",
    }
    family: ClassVar[ConfigFamily]
    tune_preset: ClassVar[str] = "cpu"  # small models, for which the search spaces are made

    def check(self, source: Path, config: dict[str, Any], train_config: BaseTrainConfig, *, world: World) -> None:
        check_fits(config, train_config, dataset=self.dataset(source, config), world=world)

    def dataset(self, source: Path, config: dict[str, Any]) -> Mapping[str, Any]:
        """`vocab_size` and `modality` of what training will read."""
        return vars(read_dataset(source))

    def open_data(self, request: TrainRequest, config: dict[str, Any], *, world: World) -> Dataset:
        return read_dataset(request.source)

    @abstractmethod
    def amount(self, data: Dataset) -> Callable[[TokenSet], str]:
        """Return a function that says how much data a split has."""

    def open_training(
        self, data: Dataset | None, config: dict[str, Any], train_config: BaseTrainConfig, context: RunContext
    ) -> AbstractContextManager[Trainer]:
        assert data is not None and isinstance(train_config, TrainConfig)
        return open_training(data, config, train_config, context, amount=self.amount(data))

    # Trained runs

    @abstractmethod
    def load(self, run_dir: Path | str, *, device: str | None = None, **model_fields: int | None) -> TrainedRun:
        """Open the newest checkpoint of a run. Raises UserError."""

    def load_to_score(self, run_dir: Path | str, options: EvaluateOptions, *, world: World) -> TrainedRun:
        """Open a run with the memories, and the mean of its newest weights, that options ask for. Raises UserError."""
        sizes = {"memory": options.memory, "compressed": options.compressed}
        run = self.load(run_dir, device=world.device.type, **sizes)
        if sum(world.largest(run.step, -run.step)):  # ranks opened different steps: training has just saved one
            return self.load_to_score(run_dir, options, world=world)
        if options.average != 1:
            average_weights(run, options.average)
        return run

    @abstractmethod
    def open_split(self, run: TrainedRun, *, data: Path | str | None, split: str, show_progress: bool) -> TokenSet:
        """The tokens of a split of the run's own data set, or of another. Raises UserError."""

    def distances(self, run: TrainedRun, split: str) -> TokenSet | None:
        """How many steps ago each answer of a recall task was last seen; None for other data."""
        return None

    # Scores

    def protocol(self, train: Mapping[str, Any], options: EvaluateOptions) -> str:
        """When state is reset while a run is scored, as asked for or as it was trained. Raises UserError."""
        if options.rows is not None and options.protocol == "carry":
            raise UserError("--protocol=carry reads one stream, and --rows cuts it into pieces; leave one of them out")
        return options.protocol or ("chunk" if train["state"] == "chunk" else "utterance")

    @abstractmethod
    def metrics(self, run: TrainedRun, tokens: TokenSet, options: EvaluateOptions) -> Metrics:
        """What is reported of a run besides its NLL. Raises UserError."""

    def measure(self, run: TrainedRun, tokens: TokenSet, options: EvaluateOptions, *, world: World) -> ScoredRun:
        """Score a run on `tokens`, those of a split; each rank of `world` a share of them.

        Raises UserError for options that do not suit the run or the data.
        """
        dynamic, protocol = options.dynamic_config(run), self.protocol(run.config["train"], options)
        metrics = self.metrics(run, tokens, options)
        whole, classes = tokens, metrics.classes
        tokens = options.pieces(tokens)
        classes = options.pieces(classes) if isinstance(classes, TokenSet) else classes
        how: dict[str, Any] = {"world": world, "classes": classes}
        if options.stride is None:
            result = score(run, tokens, protocol=protocol, **how)
        else:
            if isinstance(classes, TokenSet):
                raise UserError("--stride does not score recall; leave it out")
            result = evaluate_sliding(run, tokens, stride=options.stride, **how)
        apart = {}
        if dynamic is not None:
            learned = score(run, tokens, protocol=protocol, dynamic=dynamic, **how)
            apart["dynamic"] = {**describe_dynamic(learned, dynamic, plain=result), **metrics.of(learned)}
        return ScoredRun(run, result, self.figures(run, whole, result, options, metrics) | apart)

    def figures(
        self, run: TrainedRun, tokens: TokenSet, result: Evaluation, options: EvaluateOptions, metrics: Metrics
    ) -> dict[str, Any]:
        """What `evaluate --json` writes of a result on `tokens`, or on pieces of them (docs/evaluation.md)."""
        pieces = f"{len(result.names)} pieces" + " and of each chunk" * (result.protocol == "chunk")
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "unit": self.unit,
            "model": run.name,
            "run": str(run.given),
            "split": options.split,
            "nats_per_token": result.nats_per_token,
            "bits_per_token": result.bits_per_token,
            **metrics.of(result),
            "num_tokens": int(result.counts.sum()),
            "num_utterances": len(result.names) if options.rows is None else len(tokens),
            "protocol": result.protocol,
            "chunk": run.config["train"]["chunk"] if result.protocol == "chunk" else None,
            "rows": options.rows,
            "stride": options.stride,
            "state": f"by {result.protocol}" if options.rows is None else f"reset at the start of {pieces}",
            "memory": run.config["model"].get("memory"),
            "compressed": run.config["model"].get("compressed"),
            "num_parameters": num_parameters(run.model),
            "step": run.step,
            "averaged_checkpoints": options.average,
            "train_seconds": run.train_seconds,
            "train_tokens_seen": run.tokens_seen,
            "origin": run.origin,
            "data_checksum": tokens.checksum,
            "model_config": dict(run.config["model"]),
        }

    @abstractmethod
    def describe(self, figures: dict[str, Any]) -> str:
        """Figures of one run as text."""

    def quality(self, of: Opened, config: QualityConfig | None) -> tuple[dict[str, Any], list[str]]:
        """What to add to the figures of runs, and lines to print below, if config asks how their samples sound.

        They are compared with clips of `of.tokens`, by the first rank. Raises UserError.
        """
        if config is not None and config.quality and of.world.is_first:
            raise UserError("--quality is for runs on audio; leave it out")
        return {}, []

    # Comparisons

    # Others are compared with the first run of this model; if there is none, with the first run
    baseline_model: ClassVar[str | None] = None
    race_models: ClassVar[Sequence[str]] = ("compressive_transformer", "transformer_xl")
    race_baseline: ClassVar[str] = "transformer_xl"  # with which the others are compared
    # Metrics that a race shows besides NLL, of runs that have them, and what their columns are called
    race_metrics: ClassVar[Mapping[str, str]] = {}

    def refuse_unlike(self, runs: Sequence[TrainedRun], options: EvaluateOptions) -> None:
        """Raises UserError for runs that would not be scored alike."""
        self.refuse_other_resets([run.config["train"] for run in runs], options)

    def refuse_other_resets(self, trained: Sequence[Mapping[str, Any]], options: EvaluateOptions) -> None:
        """Raises UserError unless state is reset at the same places in all runs; trained: the `train` of each."""
        resets = set()
        for train in trained:
            protocol = self.protocol(train, options)
            resets.add(f"chunk of {train['chunk']}" if protocol == "chunk" else protocol)
        if options.stride is None and len(resets) > 1:
            raise UserError(
                f"the state of these runs would be reset at different places, by {' and by '.join(sorted(resets))}; "
                "give --protocol utterance, or --rows for text, which report takes too, or train them with the same "
                "train.state and train.chunk"
            )

    def compared(self, entries: list[dict[str, Any]], scored: Sequence[ScoredRun]) -> list[dict[str, Any]]:
        """The figures of a comparison, with what the domain adds."""
        return entries

    @abstractmethod
    def format_table(self, entries: Sequence[dict[str, Any]]) -> str:
        """A comparison as text."""

    def published(self, of: Opened, options: EvaluateOptions) -> list[dict[str, Any]]:
        """What others published for options.published, to be shown beside runs.

        Raises UserError if the runs were not trained, or would not be scored, as those of others were.
        """
        raise UserError("--published is for runs on audio; leave it out")

    def save_plot(self, path: Path, scored: Sequence[ScoredRun], entries: Sequence[dict[str, Any]]) -> None:
        """Draw a comparison: validation NLL in training. Raises UserError if it cannot be written."""
        save_learning_curves(
            path,
            [(label, one.curve) for label, one in zip(display_names(entries), scored, strict=True)],
            unit=self.unit,
        )

    @abstractmethod
    def scope(self, entry: dict[str, Any]) -> str:
        """Say what the figures of a run were measured on."""

    # Reports

    asked: ClassVar[Mapping[str, type[ReportContents]]]

    def examples(self, run: TrainedRun) -> dict[str, bytes]:
        """Files of what a run draws, by name, for its model card on a hub."""
        return {}

    @contextmanager
    def exported(self, run: TrainedRun) -> Iterator[Sequence[Path]]:
        """Files of its data set that the archive of a run contains. Raises UserError if they are gone."""
        yield ()


def _domain_named(kind: str, place: Path | str = "waveform") -> Domain:
    """The domain that is registered for a kind of data, which was found at `place`. Raises UserError if none is."""
    found = entry_points(group=_GROUP, name=kind)
    if not found:
        known = ", ".join(sorted(entry_points(group=_GROUP).names))
        raise UserError(f"{place}: no installed package handles data of the kind {kind!r}; known kinds are {known}")
    domain: Domain = next(iter(found)).load()()
    return domain


def domain_of(source: Path | str) -> Domain:
    """The domain of what a user trains on: a data set, a folder of audio, or a name that a domain knows."""
    path = Path(source)
    if is_dataset(path):
        return _domain_named(str(read_dataset(path).modality.get("kind")), path / DATASET_FILE)
    if not path.exists():
        for kind in sorted(entry_points(group=_GROUP).names - {_DEFAULT}):
            if (domain := _domain_named(kind)).knows(str(source)):
                return domain
    return _domain_named(_DEFAULT)


def token_domain_of(source: Path | str) -> TokenDomain:
    """The same for what needs a data set. Raises UserError for agents."""
    domain = domain_of(source)
    if not isinstance(domain, TokenDomain):
        raise UserError(f"{source} has no data to score models on; name a data set")
    return domain


def any_domain_of_runs(run_dirs: Sequence[Path | str]) -> Domain:
    """The domain of several runs. Raises UserError if none is named, or if their kinds differ or are not registered."""
    if not run_dirs:
        raise UserError("name at least one run folder")
    first, *others = (
        _domain_named(str(read_config(run)["dataset"]["modality"].get("kind")), run / CONFIG_FILE)
        for run in map(find_run, run_dirs)
    )
    for run_dir, domain in zip(run_dirs[1:], others, strict=True):
        if domain.kind != first.kind:
            raise UserError(
                f"{run_dirs[0]} is one of the {first.runs}, and {run_dir} one of the {domain.runs}: they cannot be "
                "compared"
            )
    return first


def domain_of_runs(run_dirs: Sequence[Path | str]) -> TokenDomain:
    """The same for runs on data sets. Raises UserError for runs of agents."""
    domain = any_domain_of_runs(run_dirs)
    if not isinstance(domain, TokenDomain):
        raise UserError(
            f"{run_dirs[0]} is one of the {domain.runs}, which only evaluate, compare and `python -m recipes play` take"
        )
    return domain
