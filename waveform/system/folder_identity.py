"""Whether a folder is still the one that it was: its path may come to lead to another, or to none."""

import os
from pathlib import Path

from waveform.system.errors import UserError


class FolderIdentity:
    """Remembers which folder a path leads to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, folder.stat()

    def require_same(self, *, step: int) -> None:
        """Raises UserError, for a training at `step`, if the folder is no longer the one that it was."""
        try:
            if os.path.samestat(self._folder.stat(), self._known):
                return
            changed = "is another folder now"
        except (FileNotFoundError, NotADirectoryError):
            changed = "is gone"
        raise UserError(
            f"{self._folder} {changed}: it was moved or removed during training, at step {step}; put it back, and "
            "the same command continues from its last checkpoint"
        )
