"""Files that a user named."""

from pathlib import Path

import pytest

from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("figures.json")
    write_json(tmp_path / "link.json", [1])
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "figures.json").read_text() == "[\n 1\n]\n"
    (tmp_path / "plot.png").symlink_to("figures.json")
    with pytest.raises(UserError, match="would be one file"):
        check_files(json_file=tmp_path / "link.json", plot_file=tmp_path / "plot.png")
