"""The studies: which settings are trained and compared, and what the papers report of them (`python -m recipes study`).

A study of a paper's table or figure runs at any preset: what its settings change is relative to the preset.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from recipes.reinforcement import AGENTS_STUDY
from recipes.studies.report import ByDistance, BySize, Config, InTraining, Report, Row, Rows, Sizes
from recipes.text import compose_config
from waveform.system.errors import UserError

# Settings on top of the preset, or a function that finds them for the configuration that the preset gives.
Settings = Sequence[str] | Callable[[Config], Sequence[str]]


@dataclass(frozen=True)
class Study:
    """The settings to try, and what is reported of them."""

    variants: Mapping[str, Settings]  # by label
    report: Report
    title: str
    recipe: str | None = None  # the recipe of the data that it needs; None: any text
    seeds: int = 1  # runs of each setting, if no other number is asked for
    # The user's settings to which those of the variants are relative
    heeds: Sequence[str] = ("train.max_steps", "train.unroll", "train.chunk", "train.batch_size")

    def settings(self, label: str, config: Config) -> list[str]:
        """The settings of one variant, on top of those that gave `config`."""
        chosen = self.variants[label]
        return list(chosen(config) if callable(chosen) else chosen)


_COMPRESSED = ("model=compressive_transformer",)


def _through_time(config: Config) -> list[str]:
    """Train the compressor by the model's own loss: gradients pass through twice as many windows of half the rows.

    So a step has as many tokens as with the other settings, and there are as many steps.
    """
    train = config["train"]
    return [
        "model.compression_loss=none",
        f"train.unroll={2 * train['unroll']}",
        f"train.chunk={2 * train['chunk']}",
        f"train.batch_size={max(1, train['batch_size'] // 2)}",
    ]


# Row -> its name in conf/studies.yaml, and the paper's bits per character.
_TABLE_5_ROWS = {
    "convolution, through time": ("conv_bptt", 0.996),
    "max pooling": ("max", 0.986),
    "convolution, auto-encoding": ("conv_autoencode", 0.984),
    "mean pooling": ("mean", 0.982),
    "most-used": ("most_used", 0.980),
    "dilated convolutions, attention": ("dilated", 0.977),
    "convolution, attention": ("conv", 0.973),
}
_RATES = (2, 3, 4)  # for each of which a row is trained, and the best counts


def _row_of_table_5(config: Config, *, file: str, rate: int) -> list[str]:
    relative = _through_time(config) if file == "conv_bptt" else []
    return [f"study=table5_{file}", f"model.compression_rate={rate}", *relative]


def _sizes(title: str, *, compressed: Sizes, memory: Sizes, published: Sequence[float], published_as: str) -> Study:
    return Study(
        title=title,
        variants={name: (f"model={name}",) for name in ("compressive_transformer", "transformer_xl")},
        report=BySize(
            sizes={"compressive_transformer": compressed, "transformer_xl": memory},
            published=dict(zip(compressed.tried, published, strict=True)),
            published_as=published_as,
        ),
    )


_FIGURE_3 = {  # curve, `figure3_*` in conf/studies.yaml -> what becomes small or few in mid-training
    "lr_0": "the rate drops to 0",
    "lr_1e-7": "the rate drops to 1e-7",
    "lr_1e-9": "the rate drops to 1e-9",
    "lr_3e-4": "the rate stays",
    "update_period_2": "the rate stays, an update every 2 steps",
}


_MOVED = ("max_steps", "lr_change_at", "update_period_from")  # fields of `train` that are steps


def _at_the_same_share(config: Config, *chosen: str) -> list[str]:
    """`chosen`, with settings by which training changes at the same share of its steps as in the paper's preset."""
    steps, paper = config["train"]["max_steps"], compose_config("enwik8", ["preset=paper", *chosen])["train"]
    if steps is None:
        raise UserError("the study changes training at a step; limit the steps, for example train.max_steps=1000")
    at = {field: paper[field] for field in _MOVED if paper[field] is not None}
    return [*chosen, *(f"train.{field}={round(step * steps / at['max_steps'])}" for field, step in at.items())]


def _curve_of_figure_3(config: Config, *, label: str) -> list[str]:
    chosen, steps, paper = f"study=figure3_{label}", config["train"]["max_steps"], "preset=paper"
    if config["preset"] == "paper" and steps == compose_config(config["recipe"], [paper])["train"]["max_steps"]:
        return [chosen]  # at the paper's steps, unless the user says how many
    return _at_the_same_share(config, chosen)


def _rarely_late(config: Config) -> list[str]:
    return [*_at_the_same_share(config, "model=transformer_xl"), "train.update_period=4"]


_TXL_ROWS = {  # row of Dai et al. 2019 -> its name in conf/studies.yaml, its perplexities in Tables 6 and 7
    "as published": ("none", (27.02, 26.77), (25.2,)),
    "Shaw's encodings": ("txl_shaw", (27.94, 27.94), (25.7,)),
    "half loss": ("txl_half_loss", (28.69, 28.33), ()),
    "no recurrence": ("txl_no_recurrence", (29.59, 29.02), (27.1,)),
    "no recurrence, half loss": ("txl_no_recurrence_half_loss", (30.10, 30.10), ()),
    "no recurrence, Shaw's encodings": ("txl_shaw_no_recurrence", (29.75, 29.75), ()),
    "no recurrence, Shaw's, half loss": ("txl_shaw_no_recurrence_half_loss", (30.50, 30.50), ()),
    "no recurrence, absolute encodings, half loss": ("txl_transformer", (30.97, 30.97), ()),
    "no recurrence, learned positions, half loss": ("txl_learned_positions", (31.16, 31.16), ()),
}


def _ablations(title: str, *, table: int, published_as: str) -> Study:
    """The rows of one of the tables of `_TXL_ROWS`, 6 or 7."""
    rows = {row: (study, found[table - 6]) for row, (study, *found) in _TXL_ROWS.items() if found[table - 6]}
    labels = {study: "transformer_xl" if study == "none" else study.removeprefix("txl_") for study, _ in rows.values()}
    return Study(
        title=title,
        variants={label: ("model=transformer_xl", f"study={study}") for study, label in labels.items()},
        report=Rows(
            {row: Row({labels[study]: ""}, published) for row, (study, published) in rows.items()},
            published_as=published_as,
            by_attention=True,
        ),
    )


STUDIES = {
    "recall": Study(
        title="what the parts of the Compressive Transformer do for recall",
        recipe="recall",
        seeds=3,
        variants={
            "transformer_xl": ("model=transformer_xl",),
            "transformer_xl_reach": ("model=transformer_xl", "model.memory=288"),
            **{f"rate_{rate}": (*_COMPRESSED, f"model.compression_rate={rate}") for rate in (1, 2, 4, 8)},
            **{name: (*_COMPRESSED, f"model.compression={name}") for name in ("max", "mean", "most_used", "dilated")},
            "autoencode": (*_COMPRESSED, "model.compression_loss=autoencode"),
            "through_time": _through_time,
            **{
                name: (*_COMPRESSED, "model.num_layers=2", f"model.local_layers={share}")
                for name, share in (("none_local", 0), ("lower_local", 0.5), ("all_local", 1))
            },
        },
        report=ByDistance(
            {
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
            }
        ),
    ),
    "table5": Study(
        title="Rae et al. 2019, Table 5: compression functions and losses, each at its best rate",
        variants={
            f"{file}-rate_{rate}": partial(_row_of_table_5, file=file, rate=rate)
            for file, _ in _TABLE_5_ROWS.values()
            for rate in _RATES
        },
        report=Rows(
            {
                row: Row({f"{file}-rate_{rate}": f"c = {rate}" for rate in _RATES}, (published,))
                for row, (file, published) in _TABLE_5_ROWS.items()
            },
            published_as="bits per character on enwik8, at its preset=paper",
        ),
    ),
    "table8": _sizes(
        "Rae et al. 2019, Table 8: compressed memory at evaluation, characters",
        compressed=Sizes("compressed", trained=1152, tried=(512, 1024, 2048, 3072, 4096)),
        # The paper chose 4,096 and does not say from which sizes.
        memory=Sizes("memory", trained=2304, tried=(1024, 2304, 3072, 4096, 5120)),
        published=(1.01, 0.99, 0.98, 0.97, 1.00),
        published_as="bits per character on enwik8, test",
    ),
    "table9": _sizes(
        "Rae et al. 2019, Table 9: compressed memory at evaluation, words",
        compressed=Sizes("compressed", trained=512, tried=(256, 512, 1024, 1536, 2048)),
        # From no paper.
        memory=Sizes("memory", trained=1024, tried=(512, 1024, 1600, 2048, 2560)),
        published=(18.2, 17.9, 17.6, 17.1, 17.7),
        published_as="perplexity on WikiText-103, test",
    ),
    "figure3": Study(
        title="Rae et al. 2019, Figure 3: smaller learning rates, or fewer updates, from mid-training on",
        variants={label: partial(_curve_of_figure_3, label=label) for label in _FIGURE_3},
        report=InTraining(labels=_FIGURE_3, published_as="smaller rates raise the training loss, fewer updates do not"),
    ),
    "rare_updates": Study(
        title="Rae et al. 2019, section 5.5.1: rare updates late in training, Transformer-XL",
        variants={"every_step": ("model=transformer_xl", "train.update_period=1"), "every_4_steps": _rarely_late},
        report=Rows(
            {
                "an update at every step": Row({"every_step": "-"}, (0.995,)),
                "every 4 steps, late in training": Row({"every_4_steps": "-"}, (0.984,)),
            },
            published_as="bits per character on enwik8, test",
        ),
    ),
    "txl_table6": _ablations(
        "Dai et al. 2019, Table 6: recurrence, encodings and half loss",
        table=6,
        published_as="perplexity on WikiText-103 as trained, and at the best length of attention",
    ),
    "txl_table7": _ablations(
        "Dai et al. 2019, Table 7: encodings and recurrence on text without context",
        table=7,
        published_as="perplexity on One Billion Word",
    ),
}


def find_study(name: str) -> Study:
    """Return the study of that name. Raises UserError if there is none."""
    if name not in STUDIES:
        raise UserError(f"there is no study {name!r}; choose one of {', '.join([*STUDIES, AGENTS_STUDY])}")
    return STUDIES[name]
