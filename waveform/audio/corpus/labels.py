"""Labels of utterances (speakers, words, classes): read from folders, a CSV or the paths of a published corpus."""

import csv
import os
from collections.abc import Collection
from pathlib import Path

from waveform.audio.corpus.catalogue import Corpus
from waveform.engine.labels import LABELS_ARE, is_label
from waveform.system.console import printable
from waveform.system.errors import UserError

FOLDER, CORPUS, NONE = "folder", "corpus", "none"


def source_of(labels: str | None) -> str | None:
    """Return `data.labels` as a data set keeps it: with the path of a CSV made absolute."""
    return labels if labels in (None, NONE, FOLDER, CORPUS) else os.path.abspath(labels)


def find_labels(
    source: str | None, *, paths: Collection[str], layout: str = "", corpus: Corpus | None = None
) -> dict[str, str]:
    """Find the labels of the audio files `paths`. source: `folder`, `corpus`, a CSV file, or None for no labels.

    A file that the source leaves out has no label. layout: the folders, such as train/, that divide the files and are
    not labels. corpus: the published corpus of the files. Raises UserError if the source cannot be read, labels no file
    at all or one that is not in `paths`, or has a name that cannot be a label.
    """
    if source in (None, NONE):
        return {}
    if source == CORPUS:
        labels = _of_corpus(paths, corpus)
    else:
        labels = _by_folder(paths, layout) if source == FOLDER else _from_csv(Path(source))
    if not labels:
        raise UserError(f"data.labels={source} labels no file; leave it out")
    known = set(paths)
    for path, label in labels.items():
        if path not in known:
            raise UserError(
                f"data.labels={source}: there is no audio file {printable(path)}; paths are relative to the audio "
                f"folder, such as {printable(min(known))}"
            )
        if not is_label(label):
            cannot = f"'{printable(label)}' ({printable(path)}) cannot be a label, which is {LABELS_ARE}"
            raise UserError(f"data.labels={source}: {cannot}")
    return labels


def _of_corpus(paths: Collection[str], corpus: Corpus | None) -> dict[str, str]:
    if corpus is None:
        raise UserError("data.labels=corpus, but no --corpus is given; give folder or a CSV of path,label")
    return {path: label for path in paths if (label := corpus.label_of(path)) is not None}


def _by_folder(paths: Collection[str], layout: str) -> dict[str, str]:
    """The name of the first folder in each path, below those of `layout`; files above it have no label."""
    depth = 1 if layout else 0
    return {path: folders[depth] for path in paths if len(folders := path.split("/")[:-1]) > depth}


def _from_csv(file: Path) -> dict[str, str]:
    """The columns `path` (relative to the audio folder) and `label` of a CSV file."""
    given, labels = f"data.labels={file}", {}
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            rows = csv.DictReader(content, strict=True)
            for row in rows:
                path, label = ((row[name] or "").strip() for name in ("path", "label"))
                line, shown = f"{given}, line {rows.line_num}", printable(path)
                if path in labels:
                    raise UserError(f"{line}: {shown} is listed twice; give it one label")
                if any(row.get(None, [])):  # values beyond the last column
                    raise UserError(f"{line}: there are more values than columns; quote a value that has a comma")
                if not label:
                    raise UserError(f"{line}: the label of {shown} is empty; give it one, or leave the line out")
                labels[path] = label
    except OSError as error:
        raise UserError(f"cannot read {given} ({error.strerror}); give folder, or a CSV of path,label") from error
    except KeyError as error:
        raise UserError(f"{given} has no column {error}; its first line must name the columns path,label") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{given} is not a CSV in UTF-8 ({error}); give folder, or one of path,label") from error
    return labels
