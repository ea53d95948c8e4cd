"""NLL that others published, from published.yaml, and what a run beside it must be like (`compare --published`)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from waveform.audio.audio_format import AudioFormat, format_of
from waveform.audio.corpus.catalogue import Corpus, described_in, find_corpus
from waveform.system.errors import UserError

_PROTOCOL, _SPLIT = "clip", "test"


class _Row(NamedTuple):
    """One model of a published table."""

    model: str
    parameters: float | None
    bits: float
    source: str  # a key of `sources`


class PublishedFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The NLL of several models on one corpus, in bits a sample."""

    corpus: str
    sources: dict[str, str]
    rows: list[_Row]

    def as_json(self) -> list[dict[str, Any]]:
        """The rows, each with its source in full."""
        return [{**row._asdict(), "source": self.sources[row.source]} for row in self.rows]

    def require_same(
        self, run: Path, config: Mapping[str, Any], *, tested_on: Mapping[str, Any], protocol: str, split: str
    ) -> None:
        """Raises UserError, with all that differs, unless a run is trained and scored as the published models were.

        run: its name; config: its configuration; tested_on: the modality of the data set that it is scored on.
        """
        corpus = find_corpus(self.corpus)
        trained_on = config["dataset"]["modality"]
        trained, tested = _other_data(trained_on, corpus), _other_data(tested_on, corpus)
        reasons = [f"it was trained on {trained}"] if trained else []
        if tested and tested != trained:
            reasons.append(f"it would be tested on {tested}")
        if "origin" in config:
            reasons.append(f"it began with the weights of {config['origin']['run']}")
        if config["dataset"].get("labels"):
            reasons.append("it reads labels (train with data.labels=none)")
        here, published = vars(format_of(trained_on)), vars(AudioFormat(**corpus.data))
        reasons += [
            f"data.{name} is {here[name]}, not {value}" for name, value in published.items() if here[name] != value
        ]
        reasons += [f"protocol {protocol} is not {_PROTOCOL}"] * (protocol != _PROTOCOL)
        reasons += [f"split {split} is not {_SPLIT}"] * (split != _SPLIT)
        if reasons:
            raise UserError(
                f"{run} cannot stand beside the figures published for {corpus.title}: {'; '.join(reasons)}; prepare "
                f"all of the corpus with --corpus {self.corpus} and its settings, train on it, or leave --published out"
            )


def _other_data(modality: Mapping[str, Any], corpus: Corpus) -> str:
    """Say which data that is not all of a corpus a data set has; empty if it is all of it."""
    recorded = modality.get("corpus")
    if not isinstance(recorded, dict) or recorded.get("name") != corpus.name:
        return f"other data than {corpus.title}"
    here, published = int(recorded["here"]), int(recorded["published"])
    return "" if here == published else f"{here:,} of its {published:,} recordings"


@cache
def _all() -> Mapping[str, PublishedFigures]:
    return described_in("published.yaml", PublishedFigures, name="corpus")


def find_published(name: str) -> PublishedFigures:
    """The figures published for a corpus. Raises UserError, with the names, if we know none."""
    if name not in _all():
        raise UserError(f"--published {name}: there are figures for {', '.join(_all())}")
    return _all()[name]
