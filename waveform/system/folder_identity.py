"""Whether a folder is still the one that it was: its path may come to lead to another, or to none."""

from pathlib import Path

from waveform.system.errors import UserError


class FolderIdentity:
    """Remembers which folder a path leads to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = self._now()

    def require_same(self, *, step: int) -> None:
        """Raises UserError, for a training at `step`, if the folder is no longer the one that it was."""
        now = self._now()
        if now != self._known:
            changed = "is gone" if now is None else "is another folder now"
            raise UserError(
                f"{self._folder} {changed}: it was moved or removed during training, at step {step}; put it back, and "
                "the same command continues from its last checkpoint"
            )

    def _now(self) -> tuple[int, int] | None:
        try:
            status = self._folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino
