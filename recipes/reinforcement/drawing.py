"""Draws an episode: a picture of its steps side by side, and a GIF; after evaluation, or of an untrained agent."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from waveform.system.output import write_bytes
from waveform.system.panels import panels

_COLUMNS = 12
_FRAME_MS = 160  # of a GIF
_ENLARGED_TO = 96  # pixels that a frame of a GIF is at least high


def save_gif(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames [height, width, 3], uint8, as an endless GIF. Raises UserError if it cannot be written."""
    from PIL import Image  # matplotlib brings it

    factor = max(1, -(-_ENLARGED_TO // frames[0].shape[0]))
    images = [Image.fromarray(frame.repeat(factor, axis=0).repeat(factor, axis=1)) for frame in frames]
    content = io.BytesIO()
    images[0].save(content, "GIF", save_all=True, append_images=images[1:], duration=_FRAME_MS, loop=0)
    write_bytes(path, content.getvalue())


def save_steps(path: Path, frames: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Draw frames with a caption each, in reading order, as a PNG. Raises UserError if it cannot be written."""
    with panels(path, len(frames), columns=_COLUMNS, size=(1.0, 1.5)) as every:
        for axes, frame, caption in zip(every, frames, captions, strict=True):
            axes.imshow(frame, interpolation="nearest")
            axes.set_title(caption, fontsize=7, loc="center")
            axes.set_axis_off()
