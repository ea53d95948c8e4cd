"""32 s of speech in two voices, on whose test/ bundled runs with labels are scored (README.md: whose it is)."""

from pathlib import Path


def demo_voices_dir() -> Path:
    """The folder of the recordings, whose labels are the names of the innermost folders (`data.labels=folder`)."""
    return Path(__file__).parent / "recordings"
