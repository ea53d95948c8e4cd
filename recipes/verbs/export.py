"""`python -m recipes export`: a trained run on text as one file, with its vocabulary but without its texts."""

from pathlib import Path
from tempfile import TemporaryDirectory

from recipes.corpora.tokenizers import TOKENIZER_FILE, load_tokenizer, save_tokenizer
from recipes.text import load
from waveform.engine.dataset import DATASET_FILE, Dataset, is_dataset, write_dataset
from waveform.runs.archive import write_archive
from waveform.runs.opened import use_saved
from waveform.system.errors import UserError


def export(run_dir: Path | str, file: Path | str, *, optimiser: bool = False, show_progress: bool = True) -> Path:
    """Write a run to `file`: settings, log, vocabulary and newest weights, without its texts; returns the path.

    optimiser: also what only training needs. Raises UserError as `load` does, if the vocabulary is gone, and if `file`
    exists.
    """
    file = Path(file)
    dataset = load(run_dir, device="cpu").config["dataset"]
    folder = Path(dataset["path"])
    if not is_dataset(folder):
        raise UserError(f"the data set of {run_dir}, {folder}, which contains its vocabulary, is gone; put it back")
    with TemporaryDirectory() as place:
        data = Path(place)
        save_tokenizer(load_tokenizer(folder), data)
        write_dataset(Dataset(data, dataset["vocab_size"], dataset["modality"], splits={}, sources={}))
        files = [data / TOKENIZER_FILE, data / DATASET_FILE]
        use_saved(run_dir, lambda saved: write_archive(*saved, file, optimiser=optimiser, data_files=files))
    if show_progress:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return file
