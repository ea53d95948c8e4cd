"""Whether a folder is still the one that it was: its path may come to lead to another, or to none."""

from pathlib import Path


class FolderIdentity:
    """Remembers which folder a path leads to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = self._now()

    def changed(self) -> str | None:
        """What has become of the folder, to follow its name in a sentence; None if it is the same."""
        now = self._now()
        if now == self._known:
            return None
        return "is gone" if now is None else "is another folder now"

    def _now(self) -> tuple[int, int] | None:
        try:
            status = self._folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino
