"""`export`: writes a trained run as one file, or as a folder for a model hub; every verb can read either."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from waveform.domain import domain_of_runs
from waveform.engine.checkpoint import Checkpoint
from waveform.runs.archive import write_archive
from waveform.runs.configured_model import num_parameters
from waveform.runs.hub import write_hub
from waveform.runs.named import is_bundled
from waveform.runs.opened import TrainedRun, use_saved
from waveform.runs.settings import differing_keys
from waveform.system.errors import UserError


class _Figures(msgspec.Struct):
    """The part of what `evaluate --json` writes that a card shows."""

    step: int
    num_parameters: int
    train_seconds: float
    nats_per_token: float
    bits_per_token: float
    split: Literal["train", "valid", "test"]
    num_tokens: int
    num_utterances: int
    state: str
    averaged_checkpoints: int
    linear_prediction_nats_per_token: float | None = None
    quality: dict[str, Any] | None = None


@dataclass(frozen=True)
class CardOptions:
    """What only the user knows about a run, for its card on a hub."""

    licence: str | None = None  # its identifier, for example cc-by-sa-3.0
    language: str | None = None  # its code, for example en
    trained_on: str | None = None  # the data, in words
    figures: Path | None = None  # what `evaluate --json` wrote


_OF_BUNDLED = CardOptions(
    licence="cc-by-sa-3.0",
    language="en",
    trained_on="recordings by Allison Smith in the Debian package asterisk-core-sounds-en-g722 (Digium, Inc.)",
)
_OF_BUNDLED_VOICES = CardOptions(
    licence="gpl-2.0", language="nl", trained_on="recordings in the Debian package fillets-ng-data-nl"
)


def export(
    run_dir: Path | str,
    file: Path | str,
    card: CardOptions | None = None,
    *,
    format: str = "zip",
    optimiser: bool = False,
    show_progress: bool = True,
) -> Path:
    """Write a run to `file`: settings, log, newest weights and its vocabulary, without its data; return the path.

    format: `zip`, one file, or `hub`, a folder with `model.safetensors`, example sounds and a model card. card: what
    that says besides. optimiser: also what only training needs. Raises UserError as `load` does, if the vocabulary is
    gone, if `file` exists, if the figures are of another run, and if the run itself was exported without its optimiser.
    """
    file, domain = Path(file), domain_of_runs([run_dir])
    if format == "hub" and optimiser:
        raise UserError("--format hub is for trained weights alone; leave out --optimiser")
    if format != "hub" and card not in (None, CardOptions()):
        raise UserError("--licence, --language, --trained-on and --figures are for --format hub")
    run = domain.load(run_dir, device="cpu")  # what cannot be opened should not be handed on
    with domain.exported(run) as files:
        if format == "hub":
            about = partial(_about, card or CardOptions(), run, name=file.name)
            how: dict[str, Any] = {"data_files": files, "examples": partial(domain.examples, run), "unit": domain.unit}
            use_saved(run_dir, lambda saved: write_hub(saved, file, about(saved.checkpoint), **how))
        else:
            use_saved(run_dir, lambda saved: write_archive(saved, file, optimiser=optimiser, data_files=files))
    if show_progress:
        num_bytes = sum(path.stat().st_size for path in (file.iterdir() if file.is_dir() else [file]))
        print(f"{file}: {num_bytes / 1e6:.1f} MB")
    return file


def _about(card: CardOptions, run: TrainedRun, found: Checkpoint, *, name: str) -> dict[str, Any]:
    """What the card's template needs. Raises UserError for figures of another run, or of another checkpoint."""
    if is_bundled(run.given):
        given = {name: value for name, value in asdict(card).items() if value is not None}
        card = replace(_OF_BUNDLED_VOICES if run.labels else _OF_BUNDLED, **given)
    figures, quality, size = None, [], num_parameters(run.model)
    if card.figures is not None:
        try:
            figures = msgspec.json.decode(card.figures.read_bytes(), type=_Figures)
            if figures.quality is not None:
                from waveform.quality.figures import Quality  # loads librosa and more
                from waveform.quality.report import quality_rows

                header, rows = quality_rows(msgspec.convert(figures.quality, Quality))
                quality = [header, *rows]
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise UserError(
                f"--figures {card.figures} is not a file that `waveform evaluate RUN_DIR --json` wrote ({error})"
            ) from error
        own = {"step": found.step, "train_seconds": found.progress.seconds}
        own |= {"num_parameters": size, "averaged_checkpoints": 1}
        if different := differing_keys({name: getattr(figures, name) for name in own}, own):
            raise UserError(
                f"--figures {card.figures} is not of this run: {'; '.join(different)}; evaluate it again, without "
                "--average"
            )
    about = {"card": card, "name": name, "origin": run.origin, "num_parameters": size}
    return {**about, "figures": figures, "quality": quality}
