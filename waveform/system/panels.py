"""Every picture's common part: a figure of panels in one style, without pyplot, so that it depends on no display."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from waveform.system.output import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#30578f", "#8a3b12", "#d98a2b", "#4a7c59", "#7a4b8c", "#777777", "#1b9e9e", "#b5527a")


@contextmanager
def drawing(path: Path | str | None, *, size: tuple[float, float], dpi: int = 110) -> Iterator["Figure"]:
    """A figure of `size` inches, drawn within the `with` block and then written as PNG; not if `path` is None.

    Raises UserError if it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(
        {
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.labelsize": 9,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "grid.color": "0.9",
            "grid.linewidth": 0.6,
            "legend.fontsize": 8,
            "legend.frameon": False,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
        }
    ):
        figure = Figure(figsize=size, dpi=dpi, layout="constrained")
        yield figure
        if path is not None:
            content = io.BytesIO()
            figure.savefig(content, format="png")
            write_bytes(Path(path), content.getvalue())


@contextmanager
def panels(
    path: Path | str | None,
    num: int,
    *,
    columns: int = 3,
    size: tuple[float, float] = (4.4, 3.6),
    dpi: int = 110,
    sharey: bool = False,
) -> Iterator[list["Axes"]]:
    """`drawing` of `num` panels of `size` inches each, in rows of `columns`."""
    columns = min(num, columns)
    rows = -(-num // columns)
    with drawing(path, size=(size[0] * columns, size[1] * rows), dpi=dpi) as figure:
        every = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
        for axes in every[num:]:
            axes.set_axis_off()
        yield every[:num]
