"""`python -m recipes play`: an agent plays an episode, which is drawn as a GIF and as a picture of its steps."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.reinforcement.evaluation import open_agent
from waveform.system.atomic import require_writable
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_bytes
from waveform.system.panels import panels

_ROW = 1 << 41  # beyond those of training and of evaluation
_COLUMNS = 12
_FRAME_MS = 160  # of a GIF
_ENLARGED_TO = 96  # pixels that a frame of a GIF is at least high


def draw_episode(
    run_dir: Path,
    *,
    gif_file: Path | None = None,
    plot_file: Path | None = None,
    num_steps: int = 60,
    env: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Let the agent play at most `num_steps` steps of one episode, and draw them as a GIF, a PNG or both.

    The episode is not one of those in training. env: as in `open_agent`. Prints and returns the reward of each step.
    Raises UserError if there is nothing to write, no run of an agent, or no picture of the environment.
    """
    agent = open_agent(run_dir, env=env, device=device)
    if gif_file is None and plot_file is None:
        raise UserError("nothing would be drawn; give --gif FILE.gif, --plot FILE.png or both")
    if gif_file is not None and gif_file.suffix.lower() != ".gif":
        raise UserError(f"--gif {gif_file} is not a .gif")
    if num_steps < 1:
        raise UserError(f"--steps is {num_steps}; it must be at least 1")
    check_files(json_file=None, plot_file=plot_file)
    require_writable(gif_file, option="--gif")
    actors = agent.actors(1, first_row=_ROW)
    frames, rewards = [actors.environments.picture()], [0.0]
    with torch.inference_mode():
        for _ in range(num_steps):
            outcome, ended = actors.step()
            rewards.append(float(outcome.reward[0]))
            # At the end the picture would be of another episode.
            frames.append(np.zeros_like(frames[-1]) if ended else actors.environments.picture())
            if ended:
                break
    if gif_file is not None:
        save_gif(gif_file, frames)
    if plot_file is not None:
        captions = [f"{i}" + (f": {reward:+g}" if reward else "") for i, reward in enumerate(rewards)]
        save_steps(plot_file, frames, captions)
    paid = [f"{reward:+g} at step {i}" for i, reward in enumerate(rewards) if reward]
    say(f"{len(frames) - 1} steps of {run_dir}: {', '.join(paid) or 'no rewards'}")
    return {"run": str(run_dir), "steps": len(frames) - 1, "rewards": rewards[1:]}


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
