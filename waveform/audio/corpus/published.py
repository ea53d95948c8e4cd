"""NLL that others published for a corpus, and the conditions for comparing a run with it (`compare --published`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from waveform.audio.audio_format import AudioFormat, format_of
from waveform.audio.corpus.catalogue import Corpus, corpora
from waveform.system.errors import UserError

_PROTOCOL, _SPLIT = "clip", "test"


def find_published(name: str) -> Corpus:
    """Return the corpus called `name`. Raises UserError, which lists those with published figures, if it has none."""
    known = {each.name: each for each in corpora().values() if each.published}
    if name not in known:
        raise UserError(f"--published {name}: there are figures for {', '.join(known)}")
    return known[name]


def published_rows(corpus: Corpus) -> list[dict[str, Any]]:
    """Return the published figures of a corpus, each with its source."""
    return [{**row._asdict(), "source": source} for source, rows in corpus.published.items() for row in rows]


def require_same(
    corpus: Corpus, run: Path, config: Mapping[str, Any], *, tested_on: Mapping[str, Any], protocol: str, split: str
) -> None:
    """Raises UserError, which lists all differences, unless a run is trained and scored as the published models were.

    run: its name; config: its configuration; tested_on: the modality of the data set that it is scored on.
    """
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
    reasons += [f"data.{name} is {here[name]}, not {value}" for name, value in published.items() if here[name] != value]
    reasons += [f"protocol {protocol} is not {_PROTOCOL}"] * (protocol != _PROTOCOL)
    reasons += [f"split {split} is not {_SPLIT}"] * (split != _SPLIT)
    if reasons:
        raise UserError(
            f"{run} cannot be compared with the figures published for {corpus.title}: {'; '.join(reasons)}; prepare "
            f"all of the corpus with --corpus {corpus.name} and its settings, train on it, or leave --published out"
        )


def _other_data(modality: Mapping[str, Any], corpus: Corpus) -> str:
    """Say what a data set holds instead of a whole corpus; empty if it holds the whole corpus."""
    recorded = modality.get("corpus")
    if not isinstance(recorded, dict) or recorded.get("name") != corpus.name:
        return f"other data than {corpus.title}"
    here, published = int(recorded["here"]), int(recorded["published"])
    return "" if here == published else f"{here:,} of its {published:,} recordings"
