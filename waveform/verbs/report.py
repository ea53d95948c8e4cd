"""`waveform report`: runs on speech beside real recordings, as one page to listen to and to read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from waveform.analyses.by_place import NllByPlace
from waveform.audio.audio_format import AudioFormat
from waveform.audio.embedded import flac_bytes, mel_jpeg
from waveform.domain import display_names
from waveform.engine.evaluator import Evaluation
from waveform.engine.sampler import SamplingConfig
from waveform.engine.token_set import TokenSet
from waveform.quality.config import FEWEST_CLIPS, QualityConfig
from waveform.quality.measure import measure_quality
from waveform.quality.report import quality_notes, quality_rows
from waveform.report_page.charts import attention_chart, learning_chart, place_chart
from waveform.report_page.measures import measure_attention, measure_places
from waveform.report_page.page import (
    Page,
    Player,
    PlayerRow,
    Table,
    data_uri,
    require_each_once,
    require_page,
    write_page,
)
from waveform.report_page.settings import settings_tables
from waveform.runs.race import ScoredRun
from waveform.runs.scoring import EvaluateOptions
from waveform.speech.domain import Speech
from waveform.speech.figures import by_label_rows, note_of, rows_of
from waveform.speech.run import Run, check_amount, load
from waveform.system.atomic import require_writable
from waveform.system.console import counted, printable
from waveform.system.errors import UserError
from waveform.system.output import write_json
from waveform.system.progress import Progress
from waveform.verbs.compare import entries_of, open_runs

REAL = "real speech"
_FIRST_S = 0.01  # the first stretch of NLL over the course of an utterance
_MOST_LABELS = 6  # of which a sound is drawn
_GIVEN_S = 0.5  # of real speech that runs continue, at most a quarter of a sound
_ONSET = 0.1  # share of a recording's peak at which speech has begun
_BEFORE_ONSET_S = 0.05
_SEARCHED_S = 5.0  # for the onset


@dataclass(frozen=True)
class ReportConfig:
    """What a report contains."""

    num: int = 2  # sounds of each run at each temperature, from nothing
    seconds: float = 2.0  # length of each sound
    real: int = 4  # recordings, whose beginnings every run continues; 0: none
    temperatures: Sequence[float] = (1.0, 0.9)  # the first one serves for continuations too
    seed: int = 0
    split: str = "test"  # of the recordings and the NLL
    quality: int = 0  # sounds of each run by which figures of quality are measured; 0: none are
    tokens: int | None = None  # samples that are scored, longest utterances first; None: all

    def __post_init__(self) -> None:
        for name, value in {"num": self.num, "real": self.real}.items():
            if value < 0:
                raise UserError(f"--{name} is {value}; it must be 0 or more")
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"--tokens is {self.tokens}; it must be at least 1")
        check_amount(1, self.seconds, endless=False)
        if self.quality:
            if self.quality < FEWEST_CLIPS:
                raise UserError(f"--quality is {self.quality}; it must be at least {FEWEST_CLIPS}, or 0 for none")
            self.of_quality()
        for temperature in self.temperatures:
            self.sampling(temperature)
            if list(self.temperatures).count(temperature) > 1:
                raise UserError(f"--temperatures has {temperature:g} twice; give each once")

    def of_quality(self) -> QualityConfig:
        """How quality is measured. Raises UserError."""
        return QualityConfig(
            quality=True, num=self.quality, seconds=self.seconds, temperature=self.temperatures[0], seed=self.seed
        )

    def sampling(self, temperature: float) -> SamplingConfig:
        """How sounds are drawn at a temperature. Raises UserError."""
        return SamplingConfig(temperature=temperature, seed=self.seed)


def report(
    run_dirs: Sequence[Path | str] | Path | str = (),
    config: ReportConfig | None = None,
    *,
    out: Path | str = "report.html",
    listen: Sequence[Path | str] = (),
    data: Path | str | None = None,
    json_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Write a page on one run or several: sounds, NLL, attention and settings, beside real recordings.

    The page is one file that loads nothing. listen: further runs, of which only sounds are shown: they may have been
    trained on other data, these recordings included. Returns (and writes to `json_file`) its figures: `comparison` as
    `compare` has them, `by_place`, `attention` and, if measured, `quality`. Raises UserError as `compare` does.
    """
    run_dirs = [run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs)
    config, out = config or ReportConfig(), Path(out)
    require_page(out)
    require_writable(json_file, option="--json")
    require_each_once([*run_dirs, *listen])
    domain, options = Speech(), EvaluateOptions(split=config.split)
    opened, tokens = open_runs(domain, run_dirs, options, data=data, device=device, show_progress=show_progress)
    runs = [run for run in opened if isinstance(run, Run)]
    audio_format = runs[0].audio_format
    rate = audio_format.sample_rate_hz
    heard = {printable(str(run_dir)): load(run_dir, device=device) for run_dir in listen}
    for name, run in heard.items():
        if (own_rate := run.audio_format.sample_rate_hz) != rate:
            raise UserError(f"--listen {name} is at {own_rate} Hz, the others are at {rate} Hz; leave it out")
    places = [
        measure_places(
            run,
            tokens,
            first=round(_FIRST_S * rate),
            max_tokens=config.tokens,
            show_progress=show_progress,
        )
        for run in runs
    ]
    scored = []
    for run, place in zip(runs, places, strict=True):
        result = _evaluation(tokens, place)
        scored.append(ScoredRun.of(run, tokens, result, domain.figures(run, tokens, result, options)))
    entries = entries_of(domain, scored)
    if show_progress:
        print(domain.format_table(entries))
    names = display_names(entries)
    by_name = dict(zip(names, places, strict=True))
    attention = [
        measure_attention(run, tokens, label=name, show_progress=show_progress)
        for run, name in zip(runs, names, strict=True)
    ]
    quality = None
    if config.quality:
        others = domain.open_split(runs[0], data=data, split="train", show_progress=False)
        named = list(zip(names, runs, strict=True))
        quality = measure_quality(
            named, config.of_quality(), held_out=tokens, others=others, show_progress=show_progress
        )
    heard = dict(zip(names, runs, strict=True)) | heard
    players = list(_rows(heard, tokens, config, show_progress=show_progress))
    different, same = settings_tables(names, [_settings_of(run) for run in runs])
    charts = [
        learning_chart([(name, one.curve) for name, one in zip(names, scored, strict=True)], unit="sample"),
        place_chart(by_name, unit="sample", unit_s=1 / rate),
        attention_chart(attention),
    ]
    write_page(
        out,
        Page(
            labels=list(heard),
            made_of=f"NLL and recordings are of the {config.split} split ({tokens.num_tokens / rate:.0f} s, "
            f"{counted(len(tokens), 'utterance')}), sounds of seed {config.seed}.",
            comparison=Table(*rows_of(entries), note=f"{note_of(entries)}."),
            players=players,
            by_label=_by_label(names, entries),
            charts=[chart for chart in charts if chart is not None],
            same_settings=same,
            different_settings=different,
            quality=None
            if quality is None
            else Table(*quality_rows(quality), note=f"{'; '.join(quality_notes(quality))}."),
        ),
    )
    figures = {
        "comparison": entries,
        "by_place": [{"label": name, **place.figures()} for name, place in by_name.items()],
        "attention": attention,
        "quality": None if quality is None else quality.as_json(),
    }
    write_json(json_file, figures)
    if show_progress:
        print(f"{out}: open it in a browser")
    return figures


def _settings_of(run: Run) -> dict[str, Any]:
    """A run's settings, with the format that its data set was prepared with: training reads that, whatever is set."""
    config = run.config
    prepared_with = {name: value for name, value in vars(run.audio_format).items() if name in config.get("data", {})}
    return config | {"data": {**config.get("data", {}), **prepared_with}}


def _by_label(names: Sequence[str], entries: Sequence[dict[str, Any]]) -> Table | None:
    """The NLL of each run (its name, its figures) on the utterances of each label, if they have any."""
    by_label = [entry["nll_by_label"] for entry in entries if "nll_by_label" in entry]
    if not by_label:
        return None
    note = "Nats per sample, most speech first; a run without labels reads the same utterances without them."
    return Table(["label", "utterances", *names], by_label_rows(by_label), note=note)


def _evaluation(tokens: TokenSet, place: NllByPlace) -> Evaluation:
    """The NLL of the utterances that were scored."""
    scored = np.flatnonzero(place.counts.sum(axis=1))
    nats, counts = place.nats[scored].sum(axis=1), place.counts[scored].sum(axis=1)
    return Evaluation([tokens.names[i] for i in scored], nats, counts, "utterance")


def _rows(runs: dict[str, Run], tokens: TokenSet, config: ReportConfig, *, show_progress: bool) -> Iterator[PlayerRow]:
    """Rows of players: recordings with every run's continuations of their beginnings, then sounds from nothing.

    Recordings are continued without their labels; the last rows have a sound of each of the first labels.
    """
    audio_format = next(iter(runs.values())).audio_format
    rate = audio_format.sample_rate_hz
    recordings = list(_recordings(tokens, audio_format, num=config.real, seconds=config.seconds))
    given_s = min(_GIVEN_S, config.seconds / 4)
    labels = _first_labels(list(runs.values())) if config.num else []
    total_s = len(runs) * (len(recordings) + config.num * len(config.temperatures)) * config.seconds
    total_s += sum(len(labels) for run in runs.values() if run.labels) * config.seconds
    with Progress("sample", total=total_s, unit="s", unit_s=1, enabled=show_progress) as progress:
        for recording, samples in recordings:
            temperature = config.temperatures[0]
            players = [_player(REAL, samples, rate)]
            given = samples[: round(given_s * rate)]
            for name, run in runs.items():
                own = run.sample(seconds=config.seconds - given_s, sampling=config.sampling(temperature), prime=given)
                players.append(_player(name, np.concatenate([given, own[0]]), rate, own_from_s=given_s))
                progress.update(config.seconds)
            title = f"{printable(recording)}: {given_s:g} s of it, continued at temperature {temperature:g}"
            yield PlayerRow(title, players)
        for temperature in config.temperatures if config.num else ():
            sounds = {}
            for name, run in runs.items():
                sounds[name] = run.sample(num=config.num, seconds=config.seconds, sampling=config.sampling(temperature))
                progress.update(config.num * config.seconds)
            for i in range(config.num):
                players = [_player(name, sound[i], rate) for name, sound in sounds.items()]
                yield PlayerRow(f"From nothing, temperature {temperature:g}, number {i + 1}", players)
        temperature = config.temperatures[0]
        sounds = {}
        for name, run in runs.items() if labels else ():
            if run.labels:
                sounds[name] = run.sample(
                    num=len(labels), seconds=config.seconds, sampling=config.sampling(temperature), labels=labels
                )
                progress.update(len(labels) * config.seconds)
        for i, label in enumerate(labels):
            players = [_player(name, sound[i], rate) for name, sound in sounds.items()]
            yield PlayerRow(f"Label {printable(label)}, temperature {temperature:g}", players)


def _first_labels(runs: Sequence[Run]) -> list[str]:
    """The first labels that all runs with labels know."""
    known = [run.labels for run in runs if run.labels]
    return [label for label in known[0] if all(label in labels for labels in known)][:_MOST_LABELS] if known else []


def _recordings(
    tokens: TokenSet, audio_format: AudioFormat, *, num: int, seconds: float
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and first `seconds` of speech [n] of `num` utterances, evenly spaced among those that are long enough.

    If too few are, the longest ones serve, as far as they go.
    """
    rate = audio_format.sample_rate_hz
    length = round(seconds * rate)
    long = [i for i, n in enumerate(tokens.lengths) if n >= length]
    if len(long) < num:
        long = sorted(sorted(range(len(tokens)), key=lambda i: -tokens.lengths[i])[:num])
    for index in (long[i * len(long) // num] for i in range(min(num, len(long)))):
        read = tokens.read(index, start=0, stop=length + round(_SEARCHED_S * rate))
        samples = audio_format.decode(torch.from_numpy(read.astype(np.int64))).numpy()
        onset = int(np.argmax(np.abs(samples) >= _ONSET * np.abs(samples).max()))
        start = max(0, min(onset - round(_BEFORE_ONSET_S * rate), len(samples) - length))
        yield tokens.names[index], samples[start : start + length]


def _player(label: str, samples: np.ndarray, rate_hz: int, *, own_from_s: float = 0.0) -> Player:
    return Player(
        label,
        audio=data_uri(flac_bytes(samples, sample_rate_hz=rate_hz), kind="audio/flac"),
        picture=data_uri(mel_jpeg(samples, sample_rate_hz=rate_hz), kind="image/jpeg"),
        duration_s=round(len(samples) / rate_hz, 4),
        own_from_s=own_from_s,
    )
