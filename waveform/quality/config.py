"""How the quality of samples is measured."""

from dataclasses import dataclass, fields

from waveform.engine.sampler import SamplingConfig
from waveform.system.errors import UserError

FEWEST_CLIPS = 3  # for an interval


@dataclass(frozen=True)
class QualityConfig:
    """How quality is measured."""

    quality: bool = False  # whether to measure it
    num: int = 16  # samples of each run
    seconds: float = 2.0  # of each
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num < FEWEST_CLIPS:
            raise UserError(f"--num is {self.num}; quality needs at least {FEWEST_CLIPS} samples for an interval")
        if not 1 <= self.seconds <= 60:
            raise UserError(f"--seconds is {self.seconds}; quality is measured in pieces of a second: give 1 to 60")
        SamplingConfig(temperature=self.temperature, seed=self.seed)  # refuses what is out of range
        given = [field.name for field in fields(QualityConfig) if getattr(self, field.name) != field.default]
        if given and not self.quality:
            raise UserError(f"--{given[0]} is only for --quality; add --quality, or leave it out")
