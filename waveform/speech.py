"""What makes a run one of speech: its configuration, its data, and a trained model opened for NLL and sampling.

    config = { preset, seed, model: {name, ...}, data: {...}, train: {...} }

A preset is a YAML file `preset/NAME.yaml`, with what it sets for one model in `preset_model/NAME_MODEL.yaml`.
Packages that hold such files are found by the entry-point group `waveform.configs`.
"""

import hashlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from waveform.audio.audio_format import AudioFormat, format_of
from waveform.audio.corpus.labels import NONE
from waveform.audio.corpus.prepare import DataConfig, prepare
from waveform.audio.resample import resample_blocks
from waveform.engine.dataset import Dataset, is_dataset, read_dataset
from waveform.engine.inputs import shift_right
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.runs.folder import read_config
from waveform.runs.named import find_run
from waveform.runs.opened import TrainedRun, open_run
from waveform.runs.origin import Origin, compose_from
from waveform.runs.settings import ConfigFamily, compose_family
from waveform.runs.sources import annotated
from waveform.runs.space import Space, space_of
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.rules import Rule

_PLUGINS = "waveform.configs"  # entry-point group of the packages that hold configs
_SAMPLE_SECONDS = Rule(lambda value: 0 <= value <= 600, "it must be from 0 to 600")  # training waits for the sample


@dataclass
class SpeechTrainConfig(TrainConfig):
    """Fields of `train` for speech: those of every run, plus the length of audio samples."""

    # Length of the TensorBoard sample at each evaluation; 0: none
    sample_seconds: Annotated[float, _SAMPLE_SECONDS] = 1.0


_SPEECH = ConfigFamily(
    module="waveform.conf",
    root="config",
    command="waveform train ... --print-config",
    train=SpeechTrainConfig,
    groups={"data": ("audio", DataConfig)},
    plugins=_PLUGINS,
)


def compose_config(
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    origin: Origin | None = None,
    run_dir: Path | None = None,
) -> dict[str, Any]:
    """The resolved configuration as plain dicts, for a run in `run_dir` with what it takes over from its origin.

    Raises UserError for an unknown key, choice or type, and for an origin that does not fit.
    """
    compose = partial(compose_family, _SPEECH, config_dir=config_dir)
    return compose(overrides) if run_dir is None else compose_from(origin, run_dir, overrides, compose=compose)


def print_config(
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    origin: Origin | None = None,
    run_dir: Path | None = None,
) -> None:
    """Print the resolved configuration as YAML, with what states each value; arguments as those of `compose_config`."""
    config = compose_config(overrides, config_dir=config_dir, origin=origin, run_dir=run_dir)
    print(annotated(config, domain="speech", overrides=overrides), end="")


def search_space(model: str, *, file: Path | None = None) -> Space:
    """What `tune` searches of a model on speech; arguments and errors as of `space_of`."""
    return space_of(model, packages=[entry.value for entry in entry_points(group=_PLUGINS)], file=file)


def cache_of(source: Path, *, run_dir: Path) -> Path:
    """Where the data set of a folder of raw audio is kept: next to the run, named after the folder and its path."""
    resolved = source.resolve()
    name = f"{resolved.name}-{hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()}.prepared"
    return run_dir.absolute().parent / name


def open_data(source: Path, *, run_dir: Path, config: DataConfig, world: World, show_progress: bool = True) -> Dataset:
    """The data set at `source`; raw audio is first prepared into a folder next to the run, which is then printed.

    Its labels are those that `config` asks for; if it does not say, those of a data set, and none of raw audio. Raises
    UserError as `prepare` does.
    """
    if is_dataset(source):
        return as_asked(read_dataset(source), config, prepared=True)
    cache = cache_of(source, run_dir=run_dir)
    with world.first_alone():
        if world.is_first:
            if show_progress:
                say(f"preparing {source} into {cache} (once; later runs reuse it)")
            # Other runs may read the labels that it has.
            prepared_as = replace(config, labels=None) if config.labels == NONE else config
            prepare(source, cache, config=prepared_as, show_progress=show_progress)
    return as_asked(read_dataset(cache), config, prepared=False)


def as_asked(data: Dataset, config: DataConfig, *, prepared: bool) -> Dataset:
    """A data set with the labels that a run with these settings reads, as `open_data` returns it.

    prepared: the user named the data set itself, and not the audio that it is of.
    """
    reads_labels = prepared if config.labels is None else config.labels != NONE
    return data if reads_labels else replace(data, labels={})


class Run(TrainedRun):
    """A trained run on speech, opened."""

    @property
    def unit(self) -> str:
        return "sample"

    @property
    def audio_format(self) -> AudioFormat:
        """Rate, quantiser and scale of what it was trained on."""
        return format_of(self.config["dataset"]["modality"])

    @property
    def unit_s(self) -> float:
        return 1 / self.audio_format.sample_rate_hz

    def nll(self, audio: np.ndarray | Tensor, *, sample_rate_hz: int, label: str | None = None) -> np.ndarray:
        """NLL in nats of each sample of one utterance, at the run's rate.

        audio: mono [n], floats in [-1, 1], at `sample_rate_hz` (resampled to the run's rate if that differs, and scaled
        as its data was). label: one of the run's; None: unknown. Returns [n'], fp32, n' samples at the run's rate.
        Raises UserError for other shapes, values that are not finite, a rate that is no whole number, and a label that
        the run does not know.
        """
        if sample_rate_hz < 1 or not float(sample_rate_hz).is_integer():
            raise UserError(f"sample_rate_hz is {sample_rate_hz}; give a whole number of at least 1")
        samples = np.asarray(audio, dtype=np.float32)
        if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
            raise UserError(f"audio of shape {samples.shape}: give finite mono samples [n], n at least 1")
        audio_format = self.audio_format
        blocks = resample_blocks([samples], from_hz=sample_rate_hz, to_hz=audio_format.sample_rate_hz)
        samples = audio_format.scale(np.concatenate(list(blocks)))
        tokens = audio_format.encode(torch.from_numpy(samples)).to(torch.int64)
        vocab_size = int(self.config["dataset"]["vocab_size"])
        inputs = shift_right(tokens, vocab_size=vocab_size, label=self.label_number(label))
        state = self.model.init_state(1, device=self.device, dtype=torch.float32)
        parts = []
        with torch.inference_mode():
            for x, y in zip(inputs.split(self.window), tokens.split(self.window), strict=True):
                step = self.model.forward(x[None].to(self.device), state)
                state = step.state
                parts.append(self.model.head.nll(step.hidden, y[None].to(self.device))[0].cpu())
        return torch.cat(parts).numpy()

    def sample(
        self,
        *,
        num: int = 1,
        seconds: float = 1.0,
        sampling: SamplingConfig | None = None,
        prime: np.ndarray | Tensor | None = None,
        on_block: Callable[[np.ndarray], None] | None = None,
        labels: Sequence[str | None] | None = None,
    ) -> np.ndarray:
        """Generate audio [num, seconds x rate], fp32 in [-1, 1]; [num, 0] if `on_block` gets it instead.

        prime: mono audio [n] at the run's rate that every sample continues (not part of the result). on_block is called
        with [num, n] samples as they come; with it, `seconds` may be inf, and the call ends when on_block raises.
        labels [num]: that of each sample, one of the run's; None: unknown. `waveform.decoding.int8` measures what
        `sampling.int8` costs. Raises UserError for an amount out of range, for a label that the run does not know, and
        for int8 if the model or the device does not have it.
        """
        audio_format = self.audio_format
        check_amount(num, seconds, endless=on_block is not None)
        num_steps = sys.maxsize if seconds == math.inf else max(1, round(seconds * audio_format.sample_rate_hz))
        prompt = None if prime is None else audio_format.encode(torch.as_tensor(np.asarray(prime, dtype=np.float32)))

        def sound(tokens: Tensor) -> np.ndarray:
            return audio_format.decode(tokens.to(torch.uint8)).numpy()

        if labels is not None and len(labels) != num:
            raise UserError(f"{len(labels)} labels for num={num} samples; give one for each")
        tokens = sample_tokens(
            self.model,
            vocab_size=int(self.config["dataset"]["vocab_size"]),
            num_streams=num,
            num_steps=num_steps,
            config=sampling or SamplingConfig(),
            prompt=prompt,
            on_block=None if on_block is None else lambda block: on_block(sound(block)),
            labels=None if labels is None else [self.label_number(label) for label in labels],
        )
        return sound(tokens)


def check_amount(num: int, seconds: float, *, endless: bool) -> None:
    """Raises UserError unless `num` samples of `seconds` can be drawn; inf needs `endless`."""
    if num < 1:
        raise UserError(f"num is {num}; it must be at least 1")
    if seconds == math.inf and not endless:
        raise UserError("seconds is inf, which is for --play and --out - only; give a number")
    if not seconds > 0:
        raise UserError(f"seconds is {seconds}; it must be above 0")


def load(run_dir: Path | str, *, device: str | None = None, **model_fields: int) -> Run:
    """Open the newest checkpoint of a run for `nll` and `sample`.

    device: cpu, cuda, or None for a GPU if there is one. model_fields: fields that do not change the parameters, for
    example a longer `memory` or `compressed` than in training. Raises UserError if there is no run on audio or no
    complete checkpoint.
    """
    require_audio(read_config(find_run(run_dir))["dataset"]["modality"], run_dir)
    return Run(**vars(open_run(run_dir, device=device, **model_fields)))


def require_audio(modality: dict[str, Any], place: Path | str) -> None:
    """Raises UserError for a data set, or a run on one, of another kind, for example text."""
    kind = modality.get("kind")
    if kind != "audio":
        what = "is a run of an agent, not on audio" if kind == "environment" else f"contains {kind}, not audio"
        raise UserError(f"{place} {what}; use python -m recipes")
