"""Two and a half minutes of speech to try the toolkit on, in train/, valid/ and test/ (README.md: whose it is)."""

from pathlib import Path


def demo_speech_dir() -> Path:
    """The folder of the bundled recordings, for `prepare`."""
    return Path(__file__).parent / "recordings"
