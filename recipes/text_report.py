"""What a report shows of runs on text: how they continue held-out documents, and perplexity by frequency."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from recipes.continuations import NUCLEUS, Prefixes, continue_documents
from recipes.corpora.episodes import is_recall
from recipes.text_figures import frequencies_of, rows_of
from waveform.analyses.layers import DEFAULT_TOKENS
from waveform.engine.sampler import SamplingConfig
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.report_page.contents import Figures, Making, ReportContents
from waveform.report_page.page import Table, Writing
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions
from waveform.system.console import counted, printable
from waveform.system.rules import NOT_NEGATIVE, check_rules, whole_number

_FIRST_TOKENS = 64  # the first stretch of NLL over the course of a document


@dataclass(frozen=True)
class TextContents(ReportContents):
    """What a report on text contains."""

    documents: Annotated[int, NOT_NEGATIVE] = 3  # held-out documents that every run continues; 0: none
    prefix: int = 512  # tokens of each that are read
    tokens: Annotated[int, whole_number(1)] = 256  # that every run makes
    temperature: float = 1.0
    seed: int = 0
    split: str = "test"
    rows: int | None = None  # pieces that the text is cut into to be scored; None: whole documents

    def __post_init__(self) -> None:
        check_rules(self)
        _ = self.prefixes, self.sampling  # they raise

    @property
    def prefixes(self) -> Prefixes:
        return Prefixes(documents=self.documents or None, prefix=self.prefix, split=self.split)

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(temperature=self.temperature, top_p=NUCLEUS, seed=self.seed)

    @property
    def options(self) -> EvaluateOptions:
        return EvaluateOptions(rows=self.rows, split=self.split)

    @property
    def max_tokens(self) -> int:
        return DEFAULT_TOKENS

    def first(self, run: TrainedRun) -> int:
        return _FIRST_TOKENS

    def made_of(self, tokens: TokenSet, entries: Figures) -> str:
        shown = self.documents and "bits_by_distance" not in entries[0]  # recall is not read
        texts = f"; texts are of temperature {self.temperature:g}, nucleus {NUCLEUS:g}, seed {self.seed}"
        return (
            f"NLL and documents are of the {self.split} split ({entries[0]['num_tokens']:,} tokens of "
            f"{counted(entries[0]['num_utterances'], 'document')}){texts if shown else ''}."
        )

    def comparison(self, names: Sequence[str], entries: list[dict[str, Any]]) -> Table:
        header, rows = rows_of(entries)
        return Table(header, [[name, *row[1:]] for name, row in zip(names, rows, strict=True)])

    def shown(
        self, runs: dict[str, TrainedRun], tokens: TokenSet, entries: list[dict[str, Any]], making: Making
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return {
            "writings": self._writings(runs, making.world),
            "frequencies": Table(*frequencies_of(entries)) if "perplexity_by_frequency" in entries[0] else None,
        }, {}

    def _writings(self, runs: dict[str, TrainedRun], world: World) -> list[Writing]:
        """How every run continues the same documents, and how they go on; none of recall, which is not read."""
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
