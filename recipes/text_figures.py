"""What tables, JSON and reports say of runs on text and on recall: the metrics that papers quote, and continuations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from recipes.corpora.catalogue import find_recipe
from recipes.corpora.episodes import is_recall, read_distances
from recipes.metrics import UNITS, frequency_bucket, recall_metrics, text_metrics
from recipes.verbs.sample import NUCLEUS, Prefixes, continue_documents
from waveform.domain import Metrics
from waveform.engine.dataset import DATASET_FILE, Dataset, read_dataset
from waveform.engine.evaluator import Classes, Evaluation
from waveform.engine.sampler import SamplingConfig
from waveform.ranks.distributed import World
from waveform.report_page.contents import Figures, ReportContents
from waveform.report_page.page import Table, Writing
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions, Opened, display_names, trained_on
from waveform.runs.statistics import with_intervals
from waveform.system.console import counted, printable, table
from waveform.system.errors import UserError
from waveform.system.rules import NOT_NEGATIVE, check_rules, whole_number

_NEVER_PUBLISHED = ("folder", "recall")


def metrics_of(run: TrainedRun, options: EvaluateOptions) -> Metrics:
    """The metrics of the scored data's recipe. Raises UserError if its data set does not say how large a split is."""
    data, split = read_dataset(Path(run.config["dataset"]["path"])), options.split
    modality = data.modality
    recipe = find_recipe(modality["recipe"])
    about: dict[str, Any] = {
        "recipe": recipe.name,
        "headline": recipe.headline,
        "published_corpus": None if recipe.name in _NEVER_PUBLISHED else data.sources.get("checked") is True,
    }
    if options.published_words and split not in recipe.num_words:
        raise UserError(f"the words of {recipe.name}'s {split} split were not published; leave --published-words out")
    metrics: Callable[[Evaluation], dict[str, Any]]
    classes: Classes | None = None
    if is_recall(run):
        metrics, classes = partial(recall_metrics, chance_bits=modality["chance_bits"]), read_distances(data, split)
    else:
        tokens, num_bytes, num_words = modality["tokens"], _size("bytes", data, split), _size("words", data, split)
        words_are = data.sources.get("words_are")
        if isinstance(words_are, dict):  # by split; earlier versions wrote one text for all
            words_are = words_are.get(split)
        if options.published_words:
            num_words, words_are = recipe.num_words[split], f"as published; this text has {num_words:,}"
        about |= {"num_bytes": num_bytes, "num_words": num_words, "words_are": str(words_are)}
        metrics = partial(text_metrics, recipe=recipe, tokens=tokens, num_bytes=num_bytes, num_words=num_words)
        if tokens == "words":
            classes = frequency_bucket(data.open_split("train").counts)
    return Metrics(of=lambda result: {**about, **metrics(result)}, classes=classes)


def _size(unit: str, data: Dataset, split: str) -> int:
    """The bytes or words of a split. Raises UserError if dataset.json does not contain them."""
    counts = data.sources.get(unit)
    count = counts.get(split) if isinstance(counts, dict) else None
    if type(count) is not int or not 0 < count < 1 << 62:
        raise UserError(f"{data.folder / DATASET_FILE} has no count of {unit} of {split!r}; prepare the data again")
    return count


def rows_of(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return one or several runs as a table's header and rows, in the order given."""
    first = entries[0]
    # Runs of several recipes with one vocabulary may have no metric in common.
    by_rank = dict.fromkeys([first["headline"], *UNITS])
    metrics = [name for name in by_rank if all(name in entry for entry in entries)]
    rows = []
    for label, entry in zip(display_names(entries), entries, strict=True):
        row = {"run": label}
        row |= {UNITS[name]: f"{entry[name]:{',.2f' if name.endswith('perplexity') else '.4f'}}" for name in metrics}
        row["nats/token"] = f"{entry['nats_per_token']:.4f}"
        if len(entries) > 1:
            difference = with_intervals(entry["difference_nats"], entry["interval_95"], sign="+")
            row["to the first [95% interval]"] = "-" if entry is first else difference
        row["parameters"] = f"{entry['num_parameters'] / 1e6:.2f} M"
        row["trained on"] = trained_on(entry)
        rows.append(row)
    return list(rows[0]), [list(row.values()) for row in rows]


def format_table(entries: Sequence[dict[str, Any]]) -> str:
    """Return one or several runs as text, in the order given."""
    first = entries[0]
    headline = first["headline"]
    lines = table(*rows_of(entries))
    if "perplexity_by_frequency" in first:
        lines += ["", "perplexity by occurrences in training:", *table(*frequencies_of(entries))]
    if "bits_by_distance" in first:
        lines += ["", f"bits per answer by distance, chance {first['chance_bits']:.2f}:", *_distances(entries)]
    lines.append(scope_of(first))
    if "word_perplexity" in first:
        lines.append(f"word-level: {first['num_words']:,} words, {first['words_are']}")
    if len(entries) == 1:
        sizes = [f"{name} {first[name]}" for name in ("memory", "compressed") if first[name] is not None]
        lines.append(", ".join([first["recipe"], f"step {first['step']:,}", *sizes]))
    if "dynamic" in first:
        dynamic = first["dynamic"]
        lines.append(
            f"dynamic, {dynamic['optimiser']} at {dynamic['lr']:g}: {dynamic[headline]:.4f} {UNITS[headline]}, "
            f"{dynamic['nats_per_token']:.4f} nats per token ({dynamic['difference_to_plain_nats']:+.4f})"
        )
    if first["averaged_checkpoints"] > 1:
        lines.append(f"with the mean weights of the last {first['averaged_checkpoints']} checkpoints")
    if first["rows"]:
        lines.append(f"cut for speed, state {first['state']}: worse than in one piece")
    if first["published_corpus"] is False:
        lines.append("not the published corpus: not comparable with the papers' figures")
    return "\n".join(lines)


def scope_of(entry: dict[str, Any]) -> str:
    """Say what the figures of runs were measured on."""
    documents = counted(entry["num_utterances"], "document")
    return f"{entry['split']} split: {entry['num_tokens']:,} tokens of {documents}, state {entry['state']}"


def with_gain(entry: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return `entry` with the share by which the first run's perplexity exceeds its own, by bucket and in total.

    Rae et al. 2019, Table 7: 61.2 against 55.9 is a gain of 9.5%. If the training splits of the runs put different
    words in a bucket, nothing is added.
    """
    before, after = (each.get("perplexity_by_frequency", {}) for each in (first, entry))
    sizes = [{bucket: figures["num_tokens"] for bucket, figures in each.items()} for each in (before, after)]
    if not before or sizes[0] != sizes[1]:
        return entry
    gains = {bucket: before[bucket]["perplexity"] / after[bucket]["perplexity"] - 1 for bucket in before}
    return {**entry, "relative_gain_over_first": {**gains, "all": first["perplexity"] / entry["perplexity"] - 1}}


def frequencies_of(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return Table 7 as header and rows: a line of perplexities for each run, then one of its gain, if it has one."""
    buckets = list(entries[0]["perplexity_by_frequency"])
    rows = []
    for label, entry in zip(display_names(entries), entries, strict=True):
        own = entry["perplexity_by_frequency"]
        by_bucket = [f"{own[bucket]['perplexity']:,.2f}" if bucket in own else "-" for bucket in buckets]
        rows.append([label, *by_bucket, f"{entry['perplexity']:,.2f}"])
        if "relative_gain_over_first" in entry:
            gains = entry["relative_gain_over_first"]
            rows.append(["  gain over the first", *(f"{gain:+.1%}" for gain in gains.values())])
    return ["run", *buckets, "all"], rows


def _distances(entries: Sequence[dict[str, Any]]) -> list[str]:
    buckets = entries[0]["bits_by_distance"]
    rows = [
        [label, *(f"{bucket['bits']:.3f}" for bucket in entry["bits_by_distance"])]
        for label, entry in zip(display_names(entries), entries, strict=True)
    ]
    return table(["run", *(f"to {bucket['to']}" for bucket in buckets)], rows)


@dataclass(frozen=True)
class TextContents(ReportContents):
    """What a report on text contains."""

    documents: Annotated[int, NOT_NEGATIVE] = 3  # held-out documents that every run continues; 0: none
    prefix: int = 512  # tokens of each that are read
    tokens: Annotated[int, whole_number(1)] = 256  # that every run generates
    temperature: float = 1.0
    seed: int = 0
    split: str = "test"
    rows: int | None = None  # pieces that the text is cut into to be scored; None: whole documents

    def __post_init__(self) -> None:
        check_rules(self)
        _ = self.prefixes, self.sampling  # raise UserError

    @property
    def prefixes(self) -> Prefixes:
        return Prefixes(documents=self.documents or None, prefix=self.prefix, split=self.split)

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(temperature=self.temperature, top_p=NUCLEUS, seed=self.seed)

    def shown(self, runs: dict[str, TrainedRun], entries: Figures, of: Opened) -> tuple[dict[str, Any], dict[str, Any]]:
        writings = self._writings(runs, of.world)
        texts = f"; texts are of temperature {self.temperature:g}, nucleus {NUCLEUS:g}, seed {self.seed}"
        by_frequency = Table(*frequencies_of(entries)) if "perplexity_by_frequency" in entries[0] else None
        return {
            "made_of": f"NLL and documents are of the {self.split} split ({entries[0]['num_tokens']:,} tokens of "
            f"{counted(entries[0]['num_utterances'], 'document')}){texts if writings else ''}.",
            "writings": writings,
            "tables": {"Comparison": Table(*rows_of(entries)), "Perplexity by frequency": by_frequency},
        }, {}

    def _writings(self, runs: dict[str, TrainedRun], world: World) -> list[Writing]:
        """How every run continues the same documents, and how they really go on; none for recall."""
        if not self.documents or is_recall(next(iter(runs.values()))):
            return []
        how: dict[str, Any] = {"num_tokens": self.tokens, "sampling": self.sampling}
        by_run = world.share([partial(continue_documents, run, self.prefixes, **how) for run in runs.values()])
        return [
            Writing(
                title=f"{printable(of_document[0].name)}: {of_document[0].num_read} tokens of it, continued",
                beginning=of_document[0].read,
                continuations=[
                    *((name, one.made) for name, one in zip(runs, of_document, strict=True)),
                    ("as it goes on", of_document[0].truth),
                ],
            )
            for of_document in zip(*by_run, strict=True)
        ]
