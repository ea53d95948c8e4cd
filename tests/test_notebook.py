"""The notebook under examples/ runs from top to bottom, and what it shows plays."""

from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import waveform
from tests.calling import write_speech

_NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_hour.ipynb"


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    settings, training, drawn, continued, tuned = (notebook.cells[i] for i in (1, 5, 8, 9, 13))
    for cell, given, short in (
        (settings, "SECONDS = 25", "SECONDS = 0.5"),
        (settings, "SECONDS =", "from waveform.speech import figures\nfigures._SPEED_SECONDS = 0.01\nSECONDS ="),
        (settings, "demo_speech_dir()  # or", 'Path("audio")  # or'),
        (training, "settings = [", 'settings = ["train.log_every=1", '),
        (drawn, "seconds=2", "seconds=0.1"),
        (continued, "seconds=1.5", "seconds=0.1"),
        (tuned, "seconds=2", "seconds=0.1"),
    ):
        assert given in cell.source
        cell.source = cell.source.replace(given, short)
    write_speech(tmp_path / "audio")
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [str(output.get("data", {})) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("data:audio/flac;base64," in one for one in shown) == 3  # cells that play something
    assert any("parameters" in one and "<table>" in one for one in shown)
    assert any("image/png" in one for one in shown)
    assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", ()))


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(_NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


def test_listen_takes_one_sound_or_several() -> None:
    one = np.sin(np.arange(2400, dtype=np.float32) / 5)
    assert waveform.listen(one)._repr_html_().count("<audio") == 1
    assert waveform.listen(np.stack([one, one]), sample_rate_hz=16_000)._repr_html_().count("<audio") == 2
    for wrong in (np.zeros(0), np.zeros((1, 2, 3))):
        with pytest.raises(waveform.UserError, match=r"give \[n\] or \[num, n\]"):
            waveform.listen(wrong)
    for rate in (0, -5, 99, 16_000.5, 655_351, float("nan")):
        with pytest.raises(waveform.UserError, match="give a whole number from 100 to 655350"):
            waveform.listen(one, sample_rate_hz=rate)
    with pytest.raises(waveform.UserError, match="give floats in"):
        waveform.listen(np.ones(9, dtype=np.int16))
