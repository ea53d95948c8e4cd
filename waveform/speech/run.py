"""A trained run on speech, opened for NLL and sampling."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from waveform.audio.audio_format import AudioFormat, format_of
from waveform.audio.resample import resample_blocks
from waveform.engine.interface import shift_right
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.runs.configured_model import num_parameters
from waveform.runs.folder import read_config
from waveform.runs.named import find_run
from waveform.runs.opened import TrainedRun, open_run
from waveform.speech.data import require_audio
from waveform.system.errors import UserError


class Run(TrainedRun):
    """A trained run on speech, opened."""

    unit = "sample"

    @property
    def audio_format(self) -> AudioFormat:
        """Rate, quantiser and scale of what it was trained on."""
        return format_of(self.config["dataset"]["modality"])

    @property
    def unit_s(self) -> float:
        return 1 / self.audio_format.sample_rate_hz

    @property
    def _heard(self) -> tuple[int, int] | None:
        """The classes of the lowest and the highest sample that it was trained on; None: unknown, in an older run.

        Nothing that a model reads in training makes louder samples likely, so it hardly learns to rule them out. Its
        own samples do now and then, and it then bursts into full scale (results/voice).
        """
        found = self.config["dataset"].get("token_range")
        return None if found is None else (found[0], found[1])

    def _repr_html_(self) -> str:
        """What a notebook shows of the run."""
        facts = {
            "model": self.name,
            "parameters": f"{num_parameters(self.model):,}",
            "trained for": f"{self.train_seconds / 60:.1f} minutes, {self.tokens_seen:,} samples, {self.step:,} steps",
            "began from": self.origin or "nothing",
            "sound": f"{self.audio_format.sample_rate_hz:,} Hz, {self.audio_format.quantiser}",
            "labels": ", ".join(self.labels[:20]) or "none",
        }
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
        return f"<b>{escape(str(self.given))}</b><table>{rows}</table>"

    def nll(self, audio: np.ndarray | Tensor, *, sample_rate_hz: int, label: str | None = None) -> np.ndarray:
        """NLL in nats of each sample of one utterance, at the run's rate.

        audio: mono [n], floats in [-1, 1], at `sample_rate_hz`; it is resampled to the run's rate if that differs, and
        scaled as the run's data was. label: one of the run's; None: unknown. Returns [n'], fp32, at the run's rate.
        Raises UserError for other shapes, integers, values that are not finite, a rate that is not a whole number, and
        a label that the run does not know.
        """
        if sample_rate_hz < 1 or not float(sample_rate_hz).is_integer():
            raise UserError(f"sample_rate_hz is {sample_rate_hz}; give a whole number of at least 1")
        audio_format = self.audio_format
        blocks = resample_blocks([_mono(audio)], from_hz=int(sample_rate_hz), to_hz=audio_format.sample_rate_hz)
        samples = audio_format.scale(np.concatenate(list(blocks)))
        tokens = torch.from_numpy(audio_format.encode(samples)).long()
        vocab_size = int(self.config["dataset"]["vocab_size"])
        inputs = shift_right(tokens, vocab_size=vocab_size, label=self.label_number(label))
        state = self.model.init_state(1, device=self.device, dtype=torch.float32)
        parts = []
        with torch.inference_mode():
            for x, y in zip(inputs.split(self.window), tokens.split(self.window), strict=True):
                hidden, state, _ = self.model.forward(x[None].to(self.device), state)
                parts.append(self.model.head.nll(hidden, y[None].to(self.device))[0].cpu())
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

        prime: mono audio [n] that every sound continues (it is not part of the result), at the run's rate, and scaled
        as its data was (`audio_format.scale`). on_block is called with [num, n] samples as they come; with it,
        `seconds` may be inf, and the call ends when on_block raises.
        labels [num]: one of the run's for each sound; None: unknown. `waveform.decoding.int8_cost` measures what
        `sampling.int8` costs. Raises UserError for an amount out of range, for a prime as `nll` does, for a label that
        the run does not know, and for int8 if the model or the device does not support it.
        """
        sampling = sampling or SamplingConfig()
        audio_format = self.audio_format
        check_amount(num, seconds, endless=on_block is not None)
        num_steps = max(1, round(min(seconds * audio_format.sample_rate_hz, sys.maxsize)))
        prompt = None if prime is None else torch.from_numpy(audio_format.encode(_mono(prime)))

        def sound(tokens: Tensor) -> np.ndarray:
            return audio_format.decode(tokens.numpy())

        if labels is not None and (isinstance(labels, str) or len(labels) != num):
            raise UserError(f"labels is {labels!r}; give a list of {num}, one for each sample")
        tokens = sample_tokens(
            self.model,
            vocab_size=int(self.config["dataset"]["vocab_size"]),
            num_streams=num,
            num_steps=num_steps,
            config=replace(sampling, classes=sampling.classes or self._heard),
            prompt=prompt,
            on_block=None if on_block is None else lambda block: on_block(sound(block)),
            labels=None if labels is None else [self.label_number(label) for label in labels],
        )
        return sound(tokens)


def _mono(audio: np.ndarray | Tensor) -> np.ndarray:
    """The samples [n] in fp32. Raises UserError if they are not mono, and as `finite_floats` does."""
    samples = finite_floats(audio)
    if samples.ndim != 1 or not len(samples):
        raise UserError(f"audio of shape {samples.shape}: give mono samples [n], n at least 1")
    return samples


def finite_floats(audio: np.ndarray | Tensor) -> np.ndarray:
    """The samples in fp32. Raises UserError for integers, in which 1 is not full scale, and for inf and NaN."""
    if isinstance(audio, Tensor):  # numpy cannot read one that is in bf16, on a GPU, or has a gradient
        audio = (audio.float() if audio.is_floating_point() else audio).detach().cpu()
    samples = np.asarray(audio)
    if not np.issubdtype(samples.dtype, np.floating):
        raise UserError(f"audio of type {samples.dtype}; give floats in [-1, 1]")
    with np.errstate(over="ignore"):
        samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        raise UserError("audio has samples that are not finite")
    return samples


def check_amount(num: int, seconds: float, *, endless: bool) -> None:
    """Raises UserError unless `num` samples of `seconds` can be drawn; inf needs `endless`."""
    if num < 1:
        raise UserError(f"num is {num}; it must be at least 1")
    if seconds == math.inf and not endless:
        raise UserError("seconds is inf, which is for --play and --out - only; give a number")
    if not seconds > 0:
        raise UserError(f"seconds is {seconds}; it must be above 0")


def load(run_dir: Path | str, *, device: str | None = None, **model_fields: int | None) -> Run:
    """Open the newest checkpoint of a run for `nll` and `sample`.

    device: cpu, cuda, mps, or None for a CUDA GPU if there is one. model_fields: fields that change no parameter, for
    example a longer `memory` or `compressed` than in training. Raises UserError if there is no run on audio or no
    complete checkpoint.
    """
    require_audio(read_config(find_run(run_dir))["dataset"]["modality"], run_dir)
    return Run(**vars(open_run(run_dir, device=device, **model_fields)))
