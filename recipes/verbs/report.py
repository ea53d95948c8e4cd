"""`python -m recipes report`: runs on text as one page: what they write, their perplexity, attention and settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.corpora.episodes import is_recall
from recipes.text import load
from recipes.text_figures import frequencies_of, rows_of
from recipes.verbs.sample import NUCLEUS, Prefixes, continue_documents
from waveform.analyses.analyse import DEFAULT_TOKENS, common_tokens
from waveform.engine.sampler import SamplingConfig
from waveform.report_page.charts import attention_chart, learning_chart, place_chart
from waveform.report_page.measures import measure_attention, measure_places
from waveform.report_page.page import Page, Table, Writing, require_each_once, require_page, write_page
from waveform.report_page.settings import settings_tables
from waveform.runs.learning_curves import read_learning_curve
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions, own_tokens
from waveform.system.atomic import require_writable
from waveform.system.console import counted, printable
from waveform.system.errors import UserError
from waveform.system.output import write_json
from waveform.verbs.compare import compare

_FIRST_TOKENS = 64  # the first stretch of NLL over the course of a document


@dataclass(frozen=True)
class ReportConfig:
    """What a report on text contains."""

    documents: int = 3  # held-out documents that every run continues; 0: none
    prefix: int = 512  # tokens of each that are read
    tokens: int = 256  # that every run makes
    temperature: float = 1.0
    seed: int = 0
    split: str = "test"
    rows: int | None = None  # pieces that the text is cut into to be scored; None: whole documents

    def __post_init__(self) -> None:
        if self.documents < 0 or self.tokens < 1:
            raise UserError(
                f"--documents is {self.documents} and --tokens is {self.tokens}; the first must be at least 0, the "
                "second at least 1"
            )
        _ = self.prefixes, self.sampling  # they raise

    @property
    def prefixes(self) -> Prefixes:
        return Prefixes(documents=self.documents or None, prefix=self.prefix, split=self.split)

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(temperature=self.temperature, top_p=NUCLEUS, seed=self.seed)


def report(
    run_dirs: Sequence[Path],
    config: ReportConfig | None = None,
    *,
    out: Path = Path("report.html"),
    json_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Write a page on one run or several, one file that loads nothing.

    Returns (and writes to `json_file`) its figures: `comparison` as `compare` has them, `by_place` and `attention`.
    Raises UserError as `compare` does.
    """
    config = config or ReportConfig()
    require_page(out)
    require_writable(json_file, option="--json")
    require_each_once(run_dirs)
    runs = [load(run_dir, device=device) for run_dir in run_dirs]  # first, because `compare` takes other kinds too
    options = EvaluateOptions(rows=config.rows, split=config.split)
    entries = compare(run_dirs, options, device=device, show_progress=show_progress)
    tokens = common_tokens(runs, [own_tokens(run, split=config.split) for run in runs], split=config.split)
    names = [run_dir.name for run_dir in run_dirs]
    labels = [printable(n if names.count(n) == 1 else str(path)) for n, path in zip(names, run_dirs, strict=True)]
    by_label = dict(zip(labels, runs, strict=True))
    places = {
        label: measure_places(run, tokens, first=_FIRST_TOKENS, max_tokens=DEFAULT_TOKENS, show_progress=show_progress)
        for label, run in by_label.items()
    }
    attention = [
        measure_attention(run, tokens, label=label, show_progress=show_progress) for label, run in by_label.items()
    ]
    curves = [(label, read_learning_curve(run.folder, run.config)) for label, run in by_label.items()]
    charts = [
        learning_chart(curves, unit="token"),
        place_chart(places, unit="token", unit_s=None),
        attention_chart(attention),
    ]
    header, rows = rows_of(entries)
    different, same = settings_tables(labels, [run.config for run in runs])
    write_page(
        out,
        Page(
            labels=labels,
            made_of=f"NLL and documents are of the {config.split} split ({entries[0]['num_tokens']:,} tokens of "
            f"{counted(entries[0]['num_utterances'], 'document')}); texts are of temperature {config.temperature:g}, "
            f"nucleus {NUCLEUS:g}, seed {config.seed}.",
            comparison=Table(header, [[label, *row[1:]] for label, row in zip(labels, rows, strict=True)]),
            writings=_writings(by_label, config) if config.documents and not is_recall(runs[0]) else (),
            frequencies=Table(*frequencies_of(entries)) if "perplexity_by_frequency" in entries[0] else None,
            charts=[chart for chart in charts if chart is not None],
            same_settings=same,
            different_settings=different,
        ),
    )
    figures = {
        "comparison": entries,
        "by_place": [{"label": label, **place.figures()} for label, place in places.items()],
        "attention": attention,
    }
    write_json(json_file, figures)
    if show_progress:
        print(f"{out}: open it in a browser")
    return figures


def _writings(runs: dict[str, TrainedRun], config: ReportConfig) -> list[Writing]:
    """How every run continues the same documents, and how they go on."""
    by_run = [
        continue_documents(run, config.prefixes, num_tokens=config.tokens, sampling=config.sampling)
        for run in runs.values()
    ]
    return [
        Writing(
            title=f"{printable(of_document[0].name)}: {of_document[0].num_read} tokens of it, continued",
            beginning=of_document[0].read,
            continuations=[
                *((label, one.made) for label, one in zip(runs, of_document, strict=True)),
                ("as it goes on", of_document[0].truth),
            ],
        )
        for of_document in zip(*by_run, strict=True)
    ]
