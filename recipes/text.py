"""The domain of text: the configuration of its runs, and how they are opened (waveform/domain.py has the interface).

    config = { recipe, preset, seed, model: {name, ...}, train: {...} }

Presets are in `conf/preset`, with sections for single models and recipes. A `study` is a row of the papers' tables, on
top of everything else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from recipes.corpora.catalogue import RECIPES, find_recipe, recipe_names
from recipes.corpora.episodes import is_recall, read_distances
from recipes.corpora.tokenizers import TOKENIZER_FILE, load_tokenizer, save_tokenizer
from recipes.metrics import UNITS
from recipes.plots import save_recall
from recipes.text_figures import TextContents, format_table, metrics_of, scope_of, with_gain
from recipes.verbs.sample import tokenizer_of
from waveform.domain import Metrics, TokenDomain, TrainRequest
from waveform.engine.dataset import DATASET_FILE, Dataset, is_dataset, read_dataset, write_dataset
from waveform.engine.token_set import TokenSet
from waveform.runs.folder import CONFIG_FILE, read_config
from waveform.runs.named import find_run
from waveform.runs.opened import TrainedRun, open_run
from waveform.runs.scoring import EvaluateOptions, ScoredRun, display_names, own_tokens
from waveform.runs.settings import ConfigFamily, compose_family
from waveform.system.errors import UserError

_TEXT = ConfigFamily(module="recipes.conf", root="text", command="python -m recipes train ... --print-config")


@cache
def _family(recipe: str, state: str) -> ConfigFamily:
    """The family of the recipes of this package and `recipe`, perhaps another package's; state: its train.state."""
    states = {**{name: known.state for name, known in RECIPES.items()}, recipe: state}
    return replace(_TEXT, groups={"recipe": {name: {"train": {"state": each}} for name, each in states.items()}})


def compose_config(
    recipe: str, overrides: Sequence[str] = (), *, config_dir: Path | str | None = None, any_model: bool = False
) -> dict[str, Any]:
    """Return the resolved configuration as plain dicts; arguments and errors as for `compose_family`.

    Also raises UserError for an unknown recipe.
    """
    family = _family(recipe, find_recipe(recipe).state)
    config = compose_family(family, [f"recipe={recipe}", *overrides], config_dir=config_dir, any_model=any_model)
    if config["recipe"] != recipe:
        raise UserError(f"recipe is {config['recipe']}, but the data is of {recipe}; leave the setting out")
    return config


def load(run_dir: Path | str, *, device: str | None = None, **model_fields: int | None) -> TrainedRun:
    """Open the newest checkpoint of a run on text; arguments and errors as for `open_run`.

    Also raises UserError for a run on audio, or of an agent.
    """
    require_text(run_dir)
    return open_run(run_dir, device=device, **model_fields)


def require_text(run_dir: Path | str, *, remedy: str = "this verb is for text") -> dict[str, Any]:
    """What the configuration of a run says of its data set. Raises UserError for a run on audio, or of an agent."""
    dataset: dict[str, Any] = read_config(find_run(run_dir))["dataset"]
    if (kind := dataset["modality"].get("kind")) != "text":
        raise UserError(f"{run_dir} is a run of the kind {kind}, not on text; {remedy}")
    return dataset


def _refuse_other_vocabulary(
    origin: Path, data_dir: Path, *, remedy: str = "begin without --from, or use data prepared with that vocabulary"
) -> None:
    """Raises UserError if the run at `origin` is not on text, or has another vocabulary than that of `data_dir`."""
    known = Path(require_text(origin, remedy="name one on text, or begin without --from")["path"])
    read_dataset(data_dir)
    if load_tokenizer(known).content() != load_tokenizer(data_dir).content():
        raise UserError(
            f"{data_dir} has a different vocabulary from {known}, with which {origin} was trained, so its tokens mean "
            f"something else; {remedy}"
        )


class Text(TokenDomain):
    """Runs on text, and on recall."""

    kind = "text"
    runs = "runs on text"
    verbs: ClassVar[Mapping[str, str]] = {**TokenDomain.verbs, "sample": "recipes.verbs.sample:sample"}
    asked: ClassVar[Mapping[str, type[TextContents]]] = {"contents": TextContents}
    family = _TEXT
    race_metrics = UNITS
    load = staticmethod(load)
    format_table = staticmethod(format_table)
    scope = staticmethod(scope_of)

    def knows(self, name: str) -> bool:
        return name in recipe_names()

    def compose(self, request: TrainRequest) -> dict[str, Any]:
        source = request.source
        if self.knows(str(source)) and request.run_dir is not None and is_dataset(request.run_dir):  # an old command
            raise UserError(f"a data set knows its recipe; leave out {source}, and name {request.run_dir} first")
        recipe = str(read_dataset(source).modality["recipe"]) if is_dataset(source) else str(source)
        return request.composed(partial(compose_config, recipe))

    def refuse(self, request: TrainRequest, config: dict[str, Any]) -> None:
        read_dataset(request.source)
        load_tokenizer(request.source)  # now rather than when the run is scored
        begun = request.run_dir is not None and (request.run_dir / CONFIG_FILE).exists()
        if request.origin.run is not None and not begun:
            _refuse_other_vocabulary(Path(request.origin.run), request.source)

    def amount(self, data: Dataset) -> Callable[[TokenSet], str]:
        return lambda tokens: f"{tokens.num_tokens:,} {data.modality['tokens']} of {data.modality['recipe']}"

    def open_split(self, run: TrainedRun, *, data: Path | str | None, split: str, show_progress: bool) -> TokenSet:
        if data is not None:
            _refuse_other_vocabulary(
                Path(run.given), Path(data), remedy="name data that was prepared with that vocabulary"
            )
            run.config["dataset"]["path"] = str(Path(data).resolve())  # counts of words and bytes are read there too
        return own_tokens(run, split=split)

    def distances(self, run: TrainedRun, split: str) -> TokenSet | None:
        folder = Path(run.config["dataset"]["path"])
        return read_distances(read_dataset(folder), split) if is_recall(run) else None

    @contextmanager
    def exported(self, run: TrainedRun) -> Iterator[Sequence[Path]]:
        dataset, tokenizer = run.config["dataset"], tokenizer_of(run)
        with TemporaryDirectory() as place:
            data = Path(place)
            save_tokenizer(tokenizer, data)
            write_dataset(Dataset(data, dataset["vocab_size"], dataset["modality"], splits={}, sources={}))
            yield [data / TOKENIZER_FILE, data / DATASET_FILE]

    def protocol(self, train: Mapping[str, Any], options: EvaluateOptions) -> str:
        if options.protocol == "clip":
            raise UserError("--protocol clip is for runs on audio; leave it out")
        if options.rows is None:
            return options.protocol or str(train["state"])
        return super().protocol(train, options)

    def metrics(self, run: TrainedRun, tokens: TokenSet, options: EvaluateOptions) -> Metrics:
        return metrics_of(run, options)

    def compared(self, entries: list[dict[str, Any]], scored: Sequence[ScoredRun]) -> list[dict[str, Any]]:
        first, *others = entries
        return [first, *(with_gain(entry, first) for entry in others)]

    def describe(self, figures: dict[str, Any]) -> str:
        return format_table([figures])

    def save_plot(self, path: Path, scored: Sequence[ScoredRun], entries: Sequence[dict[str, Any]]) -> None:
        if not is_recall(scored[0].run):
            return super().save_plot(path, scored, entries)
        names = display_names(entries)
        save_recall(path, {"recall": {name: [entry] for name, entry in zip(names, entries, strict=True)}})
