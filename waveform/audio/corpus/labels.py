"""Labels of a corpus's utterances (speakers, words, classes): read from folders, a CSV or a published corpus's paths.

Each source gives a mapping from the paths of audio files to names of labels, which `check_labels` checks before
anything is prepared; a file that it leaves out has no label.
"""

import csv
from collections.abc import Collection, Mapping
from pathlib import Path

from waveform.audio.corpus.catalogue import Corpus
from waveform.engine.labels import why_no_label
from waveform.system.console import printable
from waveform.system.errors import UserError

FOLDER = "folder"
CORPUS = "corpus"
NONE = "none"
_COLUMNS = ("path", "label")


def find_labels(
    source: str | None, *, paths: Collection[str], layout: str = "", corpus: Corpus | None = None
) -> dict[str, str]:
    """Labels of the audio files `paths` from `data.labels`: `folder`, `corpus` or a CSV file; none if it is not set.

    layout: the folders train/... of a corpus that has them, which are not labels. corpus: the published one that the
    files are of. Raises UserError.
    """
    if source in (None, NONE):
        return {}
    if not source:
        raise UserError("data.labels is empty; give folder, a CSV of path,label, or none")
    if source == CORPUS:
        labels = labels_of_corpus(paths, corpus)
    else:
        labels = labels_by_folder(paths, layout=layout) if source == FOLDER else labels_from_csv(Path(str(source)))
    return check_labels(labels, paths=paths, source=f"data.labels={source}")


def labels_of_corpus(paths: Collection[str], corpus: Corpus | None) -> dict[str, str]:
    """What the paths of a published corpus say. Raises UserError if it is not one, or if they say nothing."""
    if corpus is None or not corpus.has_labels:
        what = "no --corpus is given" if corpus is None else f"{corpus.title} has no labels"
        raise UserError(f"data.labels=corpus, but {what}; leave it out, or give folder or a CSV of path,label")
    return {path: label for path in paths if (label := corpus.label_of(path)) is not None}


def labels_by_folder(paths: Collection[str], *, layout: str = "") -> dict[str, str]:
    """The name of the first folder in each path, below those of `layout`; files above it have no label.

    Raises UserError if all are above it.
    """
    depth = 1 if layout else 0
    labels = {path: folders[depth] for path in paths if len(folders := path.split("/")[:-1]) > depth}
    if not labels:
        where = f"{layout.replace('/', ', ')} have" if layout else "the audio folder has"
        raise UserError(
            f"data.labels=folder, but {where} no folders with audio; leave it out, or give a CSV of path,label"
        )
    return labels


def labels_from_csv(file: Path) -> dict[str, str]:
    """The columns `path` (relative to the audio folder) and `label` of a CSV file. Raises UserError."""
    labels: dict[str, str] = {}
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            rows = csv.DictReader(content, strict=True)
            missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise UserError(
                    f"data.labels={file} has no column {' and no column '.join(missing)}; its first line must name the "
                    f"columns {','.join(_COLUMNS)}"
                )
            for row in rows:
                path, label = ((row[name] or "").strip() for name in _COLUMNS)
                if path in labels:
                    raise UserError(
                        f"data.labels={file}, line {rows.line_num}: {printable(path)} is there twice; give it one label"
                    )
                if not label:
                    raise UserError(
                        f"data.labels={file}, line {rows.line_num}: the label of {printable(path)} is empty; give it "
                        "one, or leave the line out"
                    )
                labels[path] = label
    except OSError as error:
        raise UserError(
            f"cannot read data.labels={file} ({error.strerror}); give folder, or a CSV of path,label"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"data.labels={file} is not a CSV in UTF-8 ({error}); give folder, or one of path,label"
        ) from error
    return labels


def check_labels(labels: Mapping[str, str], *, paths: Collection[str], source: str) -> dict[str, str]:
    """Return `labels`, of some of the files `paths`, if they can be prepared; source: what messages call their origin.

    Raises UserError for no labels, a path that is not among the files, and a name that cannot be a label.
    """
    known = set(paths)
    unknown = next((path for path in labels if path not in known), None)
    if unknown is not None:
        raise UserError(
            f"{source}: there is no audio file {printable(unknown)}; paths are relative to the audio folder, such as "
            f"{printable(min(known))}"
        )
    if not labels:
        raise UserError(f"{source} labels no file; leave it out")
    for path, label in labels.items():
        if (reason := why_no_label(label)) is not None:
            raise UserError(f"{source}: '{printable(label)}' ({printable(path)}) cannot be a label: {reason}")
    return dict(labels)
