"""How the tokens of a data set stand for sound: rate, quantiser, scale, pieces; kept in the data set and in its runs.

Only this module chooses sample rates. All others take them from a data set's format, or from the header of a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from waveform.audio import quantiser
from waveform.engine.sound_classes import NUM_CLASSES
from waveform.system.errors import UserError
from waveform.system.rules import Rule, check_rules, one_of, whole_number

CD_RATE_HZ = 44_100  # of the audio files that `bench` synthesises
WIDEBAND_HZ = 16_000  # of the speech on which networks that predict opinions were trained
LOOKS_AHEAD = " (each clip scaled by its own range, which looks ahead)"
_RATE = Rule(lambda value: 1_000 <= value <= 192_000, "it must be from 1,000 to 192,000")
_QUANTISERS = ("mu_law", "linear", "mu_law_floor", "linear_floor")
_LEAST_RANGE = float(np.finfo(np.float32).tiny)  # below it, samples are denormal, and 2 / range may overflow fp32
_PIECE = whole_number(100)  # samples; a smaller number is probably meant as a duration


@dataclass
class AudioFormat:
    """How audio becomes utterances of 256 classes, which models read.

    The defaults are those of the paper (Rae et al. 2019, section 5.6). Raises UserError for a rate or pieces out of
    range, for a quantiser or a scale that does not exist, and for `drop_rest` without pieces.
    """

    sample_rate_hz: Annotated[int, _RATE] = 24_000  # the rate to which all audio is resampled
    # mu_law | linear, to the nearest of 256 values; mu_law_floor | linear_floor: rounded down, as for published figures
    quantiser: Annotated[str, one_of(*_QUANTISERS)] = "mu_law"
    # none; clip: each utterance is scaled by its own range to -1..1, which looks ahead
    normalise: Annotated[str, one_of("none", "clip")] = "none"
    # recordings are cut into utterances of this many samples, each with a fresh state; null: one utterance each
    piece_samples: Annotated[int, _PIECE] | None = None
    drop_rest: bool = False  # leave out what remains of a recording after its last whole piece

    def __post_init__(self) -> None:
        check_rules(self, section="data")
        if self.drop_rest and self.piece_samples is None:
            raise UserError(
                "data.drop_rest is True, but data.piece_samples is None: recordings are not cut, and nothing remains; "
                "set data.piece_samples, or leave data.drop_rest out"
            )

    @property
    def _stored(self) -> str:
        """The quantiser's name in dataset.json."""
        return self.quantiser.replace("_", "-")

    @property
    def looks_ahead(self) -> bool:
        """Whether the first sample of an utterance depends on all of it, so that its NLL is not that of a stream."""
        return self.normalise == "clip"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that ask for this format: `data.NAME` -> value."""
        return {f"data.{name}": value for name, value in vars(self).items()}

    def encode(self, samples: np.ndarray) -> np.ndarray:
        """Quantise float samples [...] in -1..1 (others are clipped) to classes [...] uint8."""
        return quantiser.encode(samples, self._stored)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Turn classes [...] (any integer dtype) into samples [...] float32 in -1..1."""
        return quantiser.decode(tokens, self._stored)

    def scale(self, samples: np.ndarray) -> np.ndarray:
        """Scale a whole utterance [n] as `normalise` says; if its samples are all but equal, it becomes zeros."""
        if self.normalise == "none" or not len(samples):
            return samples
        low, high = float(samples.min()), float(samples.max())
        if high - low < _LEAST_RANGE:
            return np.zeros_like(samples)
        return ((samples - low) * (2 / (high - low)) - 1).astype(np.float32)

    def modality(self) -> dict[str, Any]:
        """The entry `modality` of dataset.json and of a run's config.yaml."""
        described = {
            "kind": "audio",
            "sample_rate_hz": self.sample_rate_hz,
            "quantiser": self._stored,
            "num_classes": NUM_CLASSES,
        }
        if self.normalise != "none":
            described["normalise"] = self.normalise
        if self.piece_samples is not None:
            described["pieces"] = {"samples": self.piece_samples, "drop_rest": self.drop_rest}
        return described


def format_of(modality: Mapping[str, Any]) -> AudioFormat:
    """Read the format of a data set or a run. Raises UserError if this version does not know it."""
    stored = modality.get("quantiser", "mu-law")
    known = next((name for name in _QUANTISERS if name.replace("_", "-") == stored), None)
    if known is None:
        raise UserError(f"the quantiser {stored!r} comes from a newer version of waveform; update waveform")
    if type(modality.get("sample_rate_hz")) is not int:
        raise UserError("a data set of audio has no sample_rate_hz; prepare it again")
    pieces = modality.get("pieces", {"samples": None, "drop_rest": False})
    normalise = str(modality.get("normalise", "none"))
    return AudioFormat(modality["sample_rate_hz"], known, normalise, pieces["samples"], bool(pieces["drop_rest"]))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say which settings of two preparations differ, and from what to what; empty if none do."""
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in changed)
