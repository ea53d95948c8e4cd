"""37 s of speech in two voices, divided: what bundled runs with labels are scored on (README.md)."""

from pathlib import Path


def demo_voices_dir() -> Path:
    """The folder of the recordings, whose labels are the names of its inner folders (`data.labels=folder`)."""
    return Path(__file__).parent / "recordings"
