"""The domain of speech: what the verbs need to know of runs on audio (waveform/domain.py has the interface)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from waveform.audio.audio_format import differences, format_of
from waveform.audio.corpus.prepare import DataConfig, require_folder
from waveform.audio.corpus.published import find_published, published_rows, require_same
from waveform.audio.flac import flac_bytes
from waveform.domain import Metrics, TokenDomain, TrainRequest
from waveform.engine.dataset import Dataset, is_dataset, read_dataset
from waveform.engine.interface import SequenceModel
from waveform.engine.metrics import MetricsLog
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import BaseTrainConfig
from waveform.engine.trainer import OnEvaluate
from waveform.quality.config import QualityConfig
from waveform.ranks.distributed import World
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions, Opened, ScoredRun, names_of
from waveform.runs.settings import typed
from waveform.speech.config import SPEECH, SpeechTrainConfig, compose_config
from waveform.speech.data import data_of_training, open_split, refuse_other_data
from waveform.speech.figures import describe, format_table, metrics_of, race_scope, sampling_speed
from waveform.speech.report import SoundContents
from waveform.speech.run import Run, load
from waveform.system.errors import UserError
from waveform.system.signals import StopRequest

_EXAMPLE_S = 4.0  # of each sound on a model card


class Speech(TokenDomain):
    """Runs on speech, and on any other audio."""

    kind = "audio"
    runs = "runs on audio"
    unit = "sample"
    verbs: ClassVar[Mapping[str, str]] = {**TokenDomain.verbs, "sample": "waveform.verbs.sample:sample"}
    train_config = SpeechTrainConfig
    family = SPEECH
    race_models = ("compressive_transformer", "transformer_xl", "wavenet")
    baseline_model = race_baseline = "wavenet"
    tune_preset = "demo"  # for small models, with a schedule by time
    asked: ClassVar[Mapping[str, type[SoundContents]]] = {"contents": SoundContents}
    load = staticmethod(load)
    open_split = staticmethod(open_split)
    describe = staticmethod(describe)
    format_table = staticmethod(format_table)
    scope = staticmethod(race_scope)

    def examples(self, run: TrainedRun) -> dict[str, bytes]:
        assert isinstance(run, Run)
        rate, sounds = run.audio_format.sample_rate_hz, run.sample(num=2, seconds=_EXAMPLE_S)
        return {f"sample-{i}.flac": flac_bytes(sound, sample_rate_hz=rate) for i, sound in enumerate(sounds)}

    def compose(self, request: TrainRequest) -> dict[str, Any]:
        try:
            return request.composed(compose_config)
        except UserError as error:
            if "unknown preset" not in str(error) or is_dataset(request.source):
                raise
            require_folder(request.source)  # it may be one of texts
            guess = f"{request.source} is not a prepared data set, so this takes it as a folder of audio"
            raise UserError(f"{error}; {guess}") from error

    def refuse(self, request: TrainRequest, config: dict[str, Any]) -> None:
        require_folder(request.source)
        if is_dataset(request.source):
            refuse_other_data(request.source, config, request.overrides)

    def dataset(self, source: Path, config: dict[str, Any]) -> Mapping[str, Any]:
        data_config: DataConfig = typed(DataConfig, config["data"], section="data")
        modality = data_config.audio_format.modality()
        return {"vocab_size": modality["num_classes"], "modality": modality}

    def open_data(self, request: TrainRequest, config: dict[str, Any], *, world: World) -> Dataset:
        assert request.run_dir is not None
        return data_of_training(request.source, request.run_dir, config, world=world)

    def amount(self, data: Dataset) -> Callable[[TokenSet], str]:
        rate = data.modality["sample_rate_hz"]
        return lambda tokens: f"{tokens.num_tokens / rate / 60:.1f} minutes of audio"

    def on_evaluate(self, data: Dataset | None, train_config: BaseTrainConfig) -> OnEvaluate | None:
        assert data is not None and isinstance(train_config, SpeechTrainConfig)
        return _audio_summary(train_config, data)

    def refuse_unlike(self, runs: Sequence[TrainedRun], options: EvaluateOptions) -> None:
        formats = [format_of(run.config["dataset"]["modality"]) for run in runs]
        for run, audio_format in zip(runs, formats, strict=True):
            if options.published_words:
                raise UserError("--published-words is for runs on text; leave it out")
            if options.protocol == "clip" and audio_format.piece_samples is None:
                raise UserError(
                    f"--protocol clip is for data that is cut into clips, and that of {run.given} is not; use "
                    "utterance, or prepare with data.piece_samples=N and train on that"
                )
            if different := differences(formats[0].settings, audio_format.settings):
                raise UserError(
                    f"{runs[0].given} and {run.given} read different tokens and cannot be compared: {different}"
                )
        super().refuse_unlike(runs, options)

    def protocol(self, train: Mapping[str, Any], options: EvaluateOptions) -> str:
        as_published = options.published is not None and options.protocol is None
        return "clip" if as_published else super().protocol(train, options)

    def metrics(self, run: TrainedRun, tokens: TokenSet, options: EvaluateOptions) -> Metrics:
        return Metrics(of=partial(metrics_of, run, tokens, options.pieces(tokens)))

    def quality(self, of: Opened, config: QualityConfig | None) -> tuple[dict[str, Any], list[str]]:
        if config is None or not config.quality or not of.world.is_first:
            return {}, []
        from waveform.quality.measure import measure_quality  # loads librosa and more
        from waveform.quality.report import describe as describe_quality

        others = open_split(of.runs[0], data=of.data, split="train", show_progress=False)
        on_audio = [(name, run) for name, run in zip(names_of(of.runs), of.runs, strict=True) if isinstance(run, Run)]
        measured = measure_quality(on_audio, config, held_out=of.tokens, others=others, show_progress=of.world.shows)
        return {"quality": asdict(measured)}, [describe_quality(measured)]

    def compared(self, entries: list[dict[str, Any]], scored: Sequence[ScoredRun]) -> list[dict[str, Any]]:
        speeds = [sampling_speed(one.run) for one in scored]
        return [{**entry, "sampling_tokens_per_second": speed} for entry, speed in zip(entries, speeds, strict=True)]

    def published(self, of: Opened, options: EvaluateOptions) -> list[dict[str, Any]]:
        corpus = find_published(str(options.published))
        if options.rows is not None or options.stride is not None:
            raise UserError("--published compares clips that are scored whole; leave --rows and --stride out")
        for run in of.runs:
            folder = Path(run.config["dataset"]["path"] if of.data is None else of.data)
            tested_on = read_dataset(folder).modality if is_dataset(folder) else {}  # raw audio does not say
            protocol = self.protocol(run.config["train"], options)
            require_same(corpus, run.given, run.config, tested_on=tested_on, protocol=protocol, split=options.split)
        return published_rows(corpus)


def _audio_summary(config: SpeechTrainConfig, data: Dataset) -> OnEvaluate | None:
    """A hook that shows a generated sample, as audio and as an image, at each evaluation."""
    audio_format = format_of(data.modality)
    num_steps = int(config.sample_seconds * audio_format.sample_rate_hz)
    if num_steps == 0:
        return None

    def summarise(model: SequenceModel, step: int, log: MetricsLog, stop: StopRequest) -> None:
        from waveform.audio.plots import mel_image

        blocks: list[Tensor] = []

        def keep(block: Tensor) -> None:
            blocks.append(block[0])
            stop.check()

        sample_tokens(
            model,
            vocab_size=data.vocab_size,
            num_streams=1,
            num_steps=num_steps,
            config=SamplingConfig(classes=data.open_split("train").token_range),
            on_block=keep,
        )
        samples = audio_format.decode(torch.cat(blocks).numpy())
        rate = audio_format.sample_rate_hz
        log.tracker.add_audio("sample", torch.from_numpy(samples), step, sample_rate_hz=rate)
        log.tracker.add_image("sample/mel", mel_image(samples, sample_rate_hz=rate), step)

    return summarise
