"""What only a report on speech shows: sounds beside real recordings, symptoms, and figures of quality."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from waveform.analyses.nll_by_place import NllByPlace
from waveform.audio.audio_format import AudioFormat
from waveform.audio.decoding_child import CLIPPED_AMPLITUDE
from waveform.audio.flac import flac_bytes
from waveform.audio.plots import mel_jpeg
from waveform.engine.evaluator import Evaluation
from waveform.engine.sampler import SamplingConfig
from waveform.engine.token_set import TokenSet
from waveform.models.predictors_alone import predictors_alone_of
from waveform.quality.config import FEWEST_CLIPS, QualityConfig
from waveform.ranks.distributed import World
from waveform.report_page.contents import Figures, ReportContents
from waveform.report_page.page import Player, PlayerRow, Table, data_uri
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import Opened
from waveform.speech.data import open_split
from waveform.speech.figures import by_label_rows, note_of, rows_of
from waveform.speech.run import Run, check_amount, load
from waveform.system.console import counted, printable
from waveform.system.errors import UserError
from waveform.system.progress import Progress
from waveform.system.rules import NOT_NEGATIVE, Rule, check_rules, whole_number

REAL = "real speech"
ALONE = "linear-prediction"  # given as `listen`: sounds of linear prediction alone
_SECONDS = Rule(lambda value: value <= 3600, "it must be at most 3600, as a page holds all of its sounds")
_MOST_LABELS = 6  # for which a sound is drawn
_GIVEN_S = 0.5  # length of the beginning that runs continue; at most a quarter of a sound
_ONSET = 0.1  # share of a recording's peak at which speech has begun
_BEFORE_ONSET_S = 0.05
_SEARCHED_S = 5.0  # for the onset
# A page warns of symptoms in what a run draws from nothing
_SYMPTOM_S = 1.0  # least sound that is judged
_SYMPTOM_SILENT = 0.5  # share of frames below FLOOR_DB
_SYMPTOM_CLIPPED = 0.01  # share of samples


@dataclass(frozen=True)
class SoundContents(ReportContents):
    """What a report on runs on audio contains."""

    num: Annotated[int, NOT_NEGATIVE] = 2  # sounds of each run at each temperature, from nothing
    seconds: Annotated[float, _SECONDS] = 2.0  # length of each sound
    real: Annotated[int, NOT_NEGATIVE] = 4  # recordings, whose beginnings every run continues; 0: none
    temperatures: Sequence[float] = (1.0, 0.9)  # the first one serves for continuations too
    seed: int = 0
    split: str = "test"  # of the recordings and the NLL
    quality: int = 0  # sounds of each run for the figures of quality; 0: no such figures
    # Samples that are scored, longest utterances first; None: all
    tokens: Annotated[int, whole_number(1)] | None = None
    # More runs, on whatever data, of which only sounds are shown; linear-prediction: sounds of it alone
    listen: Sequence[Path | str] = ()

    def __post_init__(self) -> None:
        check_rules(self)
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

    @property
    def max_tokens(self) -> int | None:
        return self.tokens

    def result(self, tokens: TokenSet, places: NllByPlace, *, protocol: str) -> Evaluation:
        scored = np.flatnonzero(places.counts.sum(axis=1))
        nats, counts = places.nats[scored].sum(axis=1), places.counts[scored].sum(axis=1)
        return Evaluation([tokens.names[i] for i in scored], nats, counts, protocol)

    def others(self, runs: Sequence[TrainedRun], *, device: str) -> dict[str, TrainedRun]:
        rate = _on_audio(runs[0]).audio_format.sample_rate_hz
        others: dict[str, TrainedRun] = {}
        for run_dir in self.listen:
            name = printable(str(run_dir))
            run = _predictors_alone(runs) if name == ALONE else load(run_dir, device=device)
            if (own_rate := run.audio_format.sample_rate_hz) != rate:
                raise UserError(f"--listen {name} is at {own_rate} Hz, the others are at {rate} Hz; leave it out")
            others[name] = run
        return others

    def settings(self, run: TrainedRun) -> dict[str, Any]:
        # Of the settings of data, only the format counts: training reads a data set in the format that it has.
        return run.config | {"data": vars(_on_audio(run).audio_format)}

    def shown(self, runs: dict[str, TrainedRun], entries: Figures, of: Opened) -> tuple[dict[str, Any], dict[str, Any]]:
        heard = {name: _on_audio(run) for name, run in runs.items()}
        names, first = list(heard)[: len(entries)], entries[0]
        rate = heard[names[0]].audio_format.sample_rate_hz
        quality = table = None
        if self.quality and of.world.is_first:
            from waveform.quality.measure import measure_quality  # loads librosa and more
            from waveform.quality.report import quality_notes, quality_rows

            others = open_split(heard[names[0]], data=of.data, split="train", show_progress=False)
            scored = [(name, heard[name]) for name in names]
            quality = measure_quality(
                scored, self.of_quality(), held_out=of.tokens, others=others, show_progress=of.world.shows
            )
            table = Table(*quality_rows(quality), note=f"{'; '.join(quality_notes(quality))}.")
        rows, drawn = _player_rows(heard, of.tokens, self, of.world)
        return {
            "made_of": f"NLL and recordings are of the {self.split} split ({first['num_tokens'] / rate:.0f} s of "
            f"{counted(first['num_utterances'], 'utterance')} were scored), sounds of seed {self.seed}.",
            "players": rows,
            "symptoms": _symptoms(drawn, rate=rate),
            "tables": {
                "Comparison": Table(*rows_of(entries), note=f"{note_of(entries)}."),
                "NLL by label": _by_label(names, entries),
                "Quality": table,
            },
        }, {"quality": quality and asdict(quality)}


def _predictors_alone(runs: Sequence[TrainedRun]) -> Run:
    """The first run with linear prediction, reduced to its predictors, without labels. Raises UserError if none has."""
    for run in map(_on_audio, runs):
        if run.config["model"].get("prediction") == "linear":
            dataset = {key: value for key, value in run.config["dataset"].items() if key != "labels"}
            return replace(run, model=predictors_alone_of(run.model), config={**run.config, "dataset": dataset})
    raise UserError(f"--listen {ALONE} is for runs with model.prediction=linear; leave it out")


def _on_audio(run: TrainedRun) -> Run:
    assert isinstance(run, Run)
    return run


def _by_label(names: Sequence[str], entries: Figures) -> Table | None:
    """The NLL of each run (its name, its figures) on the utterances of each label, if they have any."""
    by_label = [entry["nll_by_label"] for entry in entries if "nll_by_label" in entry]
    if not by_label:
        return None
    note = "Nats per sample, most speech first; a run without labels reads the same utterances without them."
    return Table(["label", "utterances", *names], by_label_rows(by_label), note=note)


def _symptoms(drawn: Mapping[str, np.ndarray], *, rate: int) -> list[str]:
    """Say what is wrong with runs, judged by what they draw from nothing [n], and what helps."""
    from waveform.audio.pitch import FLOOR_DB, level_db  # loads librosa

    found = []
    for name, samples in drawn.items():
        if name == ALONE or len(samples) < _SYMPTOM_S * rate:  # predictors alone fall silent, and cannot be trained
            continue
        silent = float((level_db(samples, sample_rate_hz=rate) < FLOOR_DB).mean())
        clipped = float((np.abs(samples) >= CLIPPED_AMPLITUDE).mean())
        if silent > _SYMPTOM_SILENT:
            found.append(
                f"{name} falls silent in {silent:.0%} of what it draws: raise its temperature to 1.01 or 1.02, or "
                "train for longer"
            )
        if clipped > _SYMPTOM_CLIPPED:
            found.append(f"{name} clips in {clipped:.0%} of what it draws: lower its temperature, or train for longer")
    return found


def _player_rows(
    runs: Mapping[str, Run], tokens: TokenSet, contents: SoundContents, world: World
) -> tuple[list[PlayerRow], dict[str, np.ndarray]]:
    """Rows of players: recordings with every run's continuations of their beginnings, then sounds from nothing.

    Recordings are continued without their labels; the last rows have a sound for each of the first labels. Each rank
    draws some of the sounds. Also returns what each run drew from nothing [n], at the first temperature.
    """
    audio_format = next(iter(runs.values())).audio_format
    rate, first_temperature = audio_format.sample_rate_hz, contents.temperatures[0]
    draws: list[tuple[float, Callable[[], np.ndarray]]] = []  # seconds of sound, function that draws it [num, n]
    # Title, player of the recording, its part that runs continue [n], run -> index in `draws`, which of its sounds
    rows: list[tuple[str, list[Player], np.ndarray, dict[str, int], int]] = []

    def draw(
        some: Mapping[str, Run], temperature: float, *, num: int = 1, seconds: float = contents.seconds, **how: Any
    ) -> dict[str, int]:
        first, sampling = len(draws), contents.sampling(temperature)
        for run in some.values():
            draws.append((num * seconds, partial(run.sample, num=num, seconds=seconds, sampling=sampling, **how)))
        return {name: first + i for i, name in enumerate(some)}

    for recording, samples in _recordings(tokens, audio_format, num=contents.real, seconds=contents.seconds):
        given = samples[: min(round(_GIVEN_S * rate), -(-len(samples) // 4))]
        given_s = len(given) / rate
        # As long as the recording, which could otherwise be told by its length in blind mode.
        drawn = draw(runs, first_temperature, seconds=max(1, len(samples) - len(given)) / rate, prime=given)
        title = f"{printable(recording)}: {given_s:.2g} s of it, continued at temperature {first_temperature:g}"
        rows.append((title, [player(REAL, samples, rate)], given, drawn, 0))
    nothing, from_nothing = np.zeros(0, dtype=np.float32), dict[str, int]()
    for temperature in contents.temperatures if contents.num else ():
        drawn = draw(runs, temperature, num=contents.num)
        from_nothing = from_nothing or drawn
        for number in range(contents.num):
            title = f"From nothing, temperature {temperature:g}, number {number + 1}"
            rows.append((title, [], nothing, drawn, number))
    labelled = {name: run for name, run in runs.items() if run.labels}
    if contents.num and (labels := _first_labels(labelled.values())):
        drawn = draw(labelled, first_temperature, num=len(labels), labels=labels)
        for number, label in enumerate(labels):
            title = f"Label {printable(label)}, temperature {first_temperature:g}"
            rows.append((title, [], nothing, drawn, number))

    total_s = sum(seconds for seconds, _ in draws[world.rank :: world.size])
    with Progress("sample", total=total_s, unit="s", unit_s=1, enabled=world.shows) as progress:

        def sound(seconds: float, make: Callable[[], np.ndarray]) -> np.ndarray:
            made = make()
            progress.update(seconds)
            return made

        sounds = world.share([partial(sound, *one) for one in draws])
    shown = []
    for title, players, given, drawn, number in rows:
        for name, i in drawn.items():
            whole = np.concatenate([given, sounds[i][number]])
            players.append(player(name, whole, rate, own_from_s=len(given) / rate))
        shown.append(PlayerRow(title, players))
    return shown, {name: sounds[i].ravel() for name, i in from_nothing.items()}


def _first_labels(runs: Iterable[Run]) -> list[str]:
    """The first labels that all runs know."""
    known = [run.labels for run in runs]
    return [label for label in known[0] if all(label in labels for labels in known)][:_MOST_LABELS] if known else []


def _recordings(
    tokens: TokenSet, audio_format: AudioFormat, *, num: int, seconds: float
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the first `seconds` of speech [n] of `num` utterances, evenly spaced among those long enough.

    If too few are long enough, the longest ones are used.
    """
    rate = audio_format.sample_rate_hz
    length = round(seconds * rate)
    long = [i for i, n in enumerate(tokens.lengths) if n >= length]
    if len(long) < num:
        long = sorted(sorted(range(len(tokens)), key=lambda i: -tokens.lengths[i])[:num])
    num = min(num, len(long))
    for index in (long[i * len(long) // num] for i in range(num)):
        samples = audio_format.decode(tokens.read(index, start=0, stop=length + round(_SEARCHED_S * rate)))
        onset = int(np.argmax(np.abs(samples) >= _ONSET * np.abs(samples).max()))
        start = max(0, min(onset - round(_BEFORE_ONSET_S * rate), len(samples) - length))
        yield tokens.names[index], samples[start : start + length]


def player(label: str, samples: np.ndarray, rate_hz: int, *, own_from_s: float = 0.0) -> Player:
    """A player of samples [n], below their mel spectrogram."""
    return Player(
        label,
        audio=data_uri(flac_bytes(samples, sample_rate_hz=rate_hz), kind="audio/flac"),
        picture=data_uri(mel_jpeg(samples, sample_rate_hz=rate_hz), kind="image/jpeg"),
        duration_s=round(len(samples) / rate_hz, 4),
        own_from_s=own_from_s,
    )
