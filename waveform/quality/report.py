"""The figures of quality as text: a row for each figure, a column for each set of clips."""

from waveform.quality.figures import Figure, Quality
from waveform.runs.statistics import with_intervals
from waveform.system.console import table


def describe(quality: Quality) -> str:
    """The figures as a table, and how they were made."""
    return "\n".join([*table(*quality_rows(quality)), *quality_notes(quality)])


def quality_rows(quality: Quality) -> tuple[list[str], list[list[str]]]:
    """The figures as a table's header and rows."""
    header = ["quality [95% interval]", *(f"{one.name} ({one.num_clips})" for one in quality.sets)]
    return header, [
        [f"{every[0].name}, {every[0].unit}", *map(shown, every)]
        for every in zip(*(one.figures for one in quality.sets), strict=True)
    ]


def quality_notes(quality: Quality) -> list[str]:
    """How the figures were made, and what their bias is."""
    return [
        f"clips of {quality.seconds:g} s, samples at temperature {quality.temperature:g} from seed {quality.seed}; "
        f"distances are to {quality.num_reference} other real clips",
        f"as many real clips, drawn at random, have a Frechet distance of {shown(quality.by_chance)} to the rest: this "
        "is its bias",
    ]


def shown(figure: Figure) -> str:
    """A figure with its interval, or a dash."""
    if figure.value is None:
        return "-"
    digits = 3 if figure.unit == "share" else 2 if abs(figure.value) < 10 else 1
    interval = None if figure.low is None or figure.high is None else (figure.low, figure.high)
    return with_intervals(figure.value, interval, decimals=digits)
