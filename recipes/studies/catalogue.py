"""Studies: many settings of one recipe that are trained and compared as one (`python -m recipes study`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waveform.system.errors import UserError


@dataclass(frozen=True)
class Study:
    """The settings to try, and which of them a panel of the picture shows beside each other."""

    variants: Mapping[str, Sequence[str]]  # label -> settings on top of the preset
    panels: Mapping[str, Mapping[str, str]]  # title -> label -> what the panel calls it


_COMPRESSED = ("model=compressive_transformer",)
# Twice as many windows in a chunk, half as many rows: as many tokens and steps as the others.
_THROUGH_TIME = ("model.compression_loss=none", "train.unroll=2", "train.chunk=64", "train.batch_size=16")

STUDIES = {
    "recall": Study(
        variants={
            "transformer_xl": ("model=transformer_xl",),
            "transformer_xl_reach": ("model=transformer_xl", "model.memory=288"),
            **{f"rate_{rate}": (*_COMPRESSED, f"model.compression_rate={rate}") for rate in (1, 2, 4, 8)},
            **{name: (*_COMPRESSED, f"model.compression={name}") for name in ("max", "mean", "most_used", "dilated")},
            "autoencode": (*_COMPRESSED, "model.compression_loss=autoencode"),
            "through_time": (*_COMPRESSED, *_THROUGH_TIME),
            **{
                name: (*_COMPRESSED, "model.num_layers=2", f"model.local_layers={share}")
                for name, share in (("none_local", 0), ("lower_local", 0.5), ("all_local", 1))
            },
        },
        panels={
            "what compressed memory buys": {
                "transformer_xl": "Transformer-XL, as many slots",
                "transformer_xl_reach": "Transformer-XL, as far a reach",
                "rate_4": "Compressive Transformer, c = 4",
            },
            "compression rate": {f"rate_{rate}": f"c = {rate}" for rate in (1, 2, 4, 8)},
            "compression function, c = 4": {
                "rate_4": "convolution",
                "dilated": "dilated convolutions",
                "mean": "mean pooling",
                "max": "max pooling",
                "most_used": "most-used",
            },
            "loss of the convolution": {
                "rate_4": "attention reconstruction",
                "autoencode": "auto-encoding",
                "through_time": "none: trained through time",
            },
            "two layers: which start local": {
                "none_local": "none, as published",
                "lower_local": "the lower",
                "all_local": "both",
            },
        },
    ),
}


def find_study(recipe: str) -> Study:
    """Return the study of a recipe. Raises UserError if there is none."""
    if recipe not in STUDIES:
        raise UserError(f"there is no study of {recipe!r}; there is one of {', '.join(STUDIES)}")
    return STUDIES[recipe]
