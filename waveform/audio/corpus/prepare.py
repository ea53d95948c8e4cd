"""Prepares a folder of audio for training: scan -> split -> decode, resample, mu-law -> token shards -> report.

`prepare` brings a data set up to date with its folder of audio. A data set is

    dataset.json    what training reads; replaced in one step at the very end
    shards/         tokens: one file for each group of audio files, named by its content and never changed
    report.json     what was found in the audio
    unfinished/     records of finished groups, while a preparation is running or after it was interrupted
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from waveform.audio.audio_format import AudioFormat, differences, format_of
from waveform.audio.corpus.catalogue import Corpus
from waveform.audio.corpus.groups import FORMAT, SHARDS, UNFINISHED, Records, cut_into_groups, finished_records
from waveform.audio.corpus.labels import CORPUS, NONE, find_labels, source_of
from waveform.audio.corpus.report import build_report, format_report, others_of
from waveform.audio.corpus.scan import FoundFile, Scan, scan_folder
from waveform.audio.corpus.splits import SPLITS, Division, SplitConfig, divide, find_layout, require_all_splits
from waveform.audio.corpus.workers import run_groups
from waveform.audio.files import AUDIO_SUFFIXES
from waveform.engine.dataset import DATASET_FILE, Dataset, is_dataset, read_dataset, write_dataset
from waveform.engine.shards import Shard
from waveform.engine.sound_classes import NUM_CLASSES
from waveform.system.atomic import drop_leftovers, explain_write_errors, write_file
from waveform.system.console import counted, printable, say
from waveform.system.errors import UserError
from waveform.system.locks import locked
from waveform.system.rules import whole_number

REPORT_FILE = "report.json"
_LOCK_FILE = ".prepare.lock"
_MAX_SHARDS = 768  # each update adds some, and training keeps all open; new data sets have at most 515


@dataclass
class DataConfig(AudioFormat):
    """Settings of `waveform prepare`."""

    # which files train, validate and test
    split: SplitConfig = field(default_factory=SplitConfig)
    # labels of utterances (speakers, words, classes), which models read and samples can be asked for: folder (the first
    # folder's name), a CSV file of path,label, corpus (from the paths of `--corpus`), or none; null: those that the
    # data set has
    labels: str | None = None
    # processes that decode; null: one for each core that this process may use
    num_workers: Annotated[int, whole_number(1)] | None = None

    @property
    def audio_format(self) -> AudioFormat:
        """The settings that decide the tokens, without those of splits, labels and processes."""
        return AudioFormat(**{known.name: getattr(self, known.name) for known in fields(AudioFormat)})


def prepare(
    audio_dir: Path,
    data_dir: Path,
    *,
    config: DataConfig | None = None,
    corpus: Corpus | None = None,
    partial: bool = False,
    executor: Executor | None = None,
    show_progress: bool = True,
) -> Dataset:
    """Bring `data_dir` up to date with the audio under `audio_dir`, and report what was found.

    Only files that are new or have changed (in relative path, size or modification time) are decoded, and files that
    share a shard with a changed or removed one; removed files leave the data set. After hundreds of updates, all files
    are decoded again into fewer shards. The same files give the same shards, byte for byte, whether or not earlier runs
    were killed. The report is written to `data_dir`/report.json, and printed if `show_progress`.

    corpus: the published corpus in `audio_dir`; only its recordings are used, divided as its authors did. partial:
    accept a part of it. executor: does the work on files, in processes that see both folders; None: this machine does.
    Raises UserError for anything that a user can fix: no usable audio, a split that would be empty, settings that
    differ from those of the data set, an incomplete corpus, another preparation that is running, a full disk.
    """
    config = config or DataConfig()
    audio_dir, data_dir = Path(audio_dir), Path(data_dir)
    audio_format = config.audio_format
    require_folder(audio_dir)
    if data_dir.resolve() == audio_dir.resolve():
        raise UserError(f"{data_dir} is the audio folder itself; give another folder for the prepared data")
    layout = find_layout(audio_dir, config.split)  # refuses bad settings before a long scan
    scan = scan_folder(audio_dir, skip=data_dir)
    if not scan.files:
        raise UserError(_explain_no_audio(audio_dir, scan))
    found = [file.path for file in scan.files]
    if corpus is None:
        division = divide(found, config.split, layout=layout)
    else:
        corpus.require(audio_dir, found, partial=partial)
        division = corpus.divide(audio_dir, found, config.split)
    wanted = _wanted(scan, division, corpus)
    asked = CORPUS if config.labels is None and corpus is not None and corpus.has_labels else source_of(config.labels)
    now = _settings(audio_format, division.rule)
    _read_previous(data_dir, now, asked, wanted)  # before the next checks, so that a wrong folder is refused as such
    require_all_splits(division, [file.path for file in wanted])
    paths = [*(file.path for file in wanted), *scan.refused]
    # Before anything is written, because a mistake in labels must leave no folder behind.
    labels = find_labels(asked, paths=paths, layout=division.layout, corpus=corpus)
    with _locked(data_dir):
        old = _read_previous(data_dir, now, asked, wanted)
        if asked is None and old is not None:
            asked = old.sources.get("labels")
            labels = find_labels(asked, paths=paths, layout=division.layout, corpus=corpus)
        records, counts = _prepare_files(
            old, wanted, config, audio_dir=audio_dir, data_dir=data_dir, executor=executor, show=show_progress
        )
        usable = {path: record for path, record in records.items() if "refused" not in record}
        lacking = {*SPLITS} - {record["split"] for record in usable.values()}
        lost = {path: record for path, record in records.items() if path not in usable and record["split"] in lacking}
        refused = _first_reasons({path: record["refused"] for path, record in lost.items()})
        if not usable:
            raise UserError(f"no usable audio in {audio_dir}: {refused}")
        require_all_splits(division, usable, refused=refused)
        dataset = Dataset(
            folder=data_dir,
            vocab_size=NUM_CLASSES,
            modality=audio_format.modality() | (corpus.modality(usable) if corpus is not None else {}),
            splits={
                split: sorted({record["shard"] for record in usable.values() if record["split"] == split})
                for split in SPLITS
            },
            sources={
                "format": FORMAT,
                "split": division.rule,
                "files": records,
                **({"labels": asked} if asked not in (None, NONE) else {}),
            },
            labels={path: labels[path] for path in usable if path in labels},
        )
        dataset = old if old is not None and dataset == replace(old, digests={}) else write_dataset(dataset)
        _clean(dataset)
        report = build_report(dataset, scan=scan, split=division.said)
        content, report_file = json.dumps(report, indent=1).encode(), data_dir / REPORT_FILE
        if not report_file.is_file() or report_file.read_bytes() != content:
            write_file(report_file, content)
    if show_progress:
        notes = [f"{counted(count, 'file')} {what}" for what, count in counts.items() if count]
        say(format_report(report, title=f"{printable(str(data_dir))}: {', '.join(notes)}"))
    return dataset


def _wanted(scan: Scan, division: Division, corpus: Corpus | None) -> dict[FoundFile, str]:
    """Return the split of each file that is used, and note the other files in `scan`."""
    wanted: dict[FoundFile, str] = {}
    for file in scan.files:
        if file.path in division.splits:
            wanted[file] = division.splits[file.path]
        elif corpus is not None:  # Speech Commands has 25 other words: too many to list
            scan.other[os.path.splitext(file.path)[1].lower()] += 1
        else:
            scan.refused[file.path] = f"it lies outside the folders {division.layout.replace('/', ', ')}"
    return wanted


def _explain_no_audio(audio_dir: Path, scan: Scan) -> str:
    suffixes = ", ".join(sorted(suffix[1:] for suffix in AUDIO_SUFFIXES))
    if scan.refused:
        return f"no usable audio in {audio_dir}: {_first_reasons(scan.refused)}"
    held = others_of(scan.other) if scan.other else "nothing"
    hint = "; ffmpeg -i FILE FILE.flac converts others" if scan.other else ""
    if scan.other[".txt"]:
        hint = "; for text: python -m recipes prepare folder"
    return f"no audio in {audio_dir}: it holds {held}; audio is {suffixes}{hint}"


def require_folder(source: Path) -> None:
    """Raises UserError unless `source` is a folder."""
    if not source.exists():
        raise UserError(f"no such folder: {source}; give a folder of audio or a prepared data set")
    if not source.is_dir():
        raise UserError(f"{source} is a file; give a folder of audio or a prepared data set")


def _first_reasons(refused: dict[str, str]) -> str:
    first = "; ".join(f"{printable(path)}: {reason}" for path, reason in list(refused.items())[:3])
    return f"{first}; and {len(refused) - 3} more" if len(refused) > 3 else first


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Hold the data set's lock, which the system releases if the process dies. Refuses a folder of other files."""
    with explain_write_errors(data_dir):
        # `_clean` may only remove what a preparation made, and that makes its lock file before anything else.
        ours = {REPORT_FILE, SHARDS, UNFINISHED} if (data_dir / _LOCK_FILE).exists() else set()
        if data_dir.is_dir() and not is_dataset(data_dir):
            foreign = sorted(name for name in os.listdir(data_dir) if name not in ours and not name.startswith("."))
            if foreign:
                raise UserError(
                    f"{data_dir} is not empty ({printable(foreign[0])}) and holds no prepared data; "
                    "give a new folder for the prepared data"
                )
        data_dir.mkdir(parents=True, exist_ok=True)
    refusal = f"another waveform prepare is running on {data_dir}; wait until it is done"
    with locked(data_dir / _LOCK_FILE, refusal=refusal):
        with explain_write_errors(data_dir):
            for folder in (SHARDS, UNFINISHED):
                (data_dir / folder).mkdir(exist_ok=True)
        yield


def prepared_with(data: Dataset) -> dict[str, Any]:
    """The settings, besides labels, that a data set of audio was prepared with; empty for other data."""
    if data.modality.get("kind") != "audio" or "files" not in data.sources:
        return {}
    return _settings(format_of(data.modality), data.sources["split"])


def _settings(audio_format: AudioFormat, rule: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"data.{name}" if name.startswith("split.") else name: value for name, value in rule.items()}
    return audio_format.settings | named


def _read_previous(
    data_dir: Path, now: dict[str, Any], labels: str | None, wanted: dict[FoundFile, str]
) -> Dataset | None:
    """Return the existing data set, or None. Raises UserError if an update would change what it means."""
    if not is_dataset(data_dir):
        return None
    old = read_dataset(data_dir)
    if not (before := prepared_with(old)):
        raise UserError(f"{data_dir} holds a data set that is not audio; give another folder")
    if labelled := old.sources.get("labels"):  # runs that began with its labels could not be resumed with others
        moved = os.path.isabs(labels or "") and os.path.isabs(labelled) and not os.path.exists(labelled)  # a CSV
        before["data.labels"], now = labelled, {**now, "data.labels": labelled if moved or not labels else labels}
    # Moving files between splits would put yesterday's test files into today's training data.
    if different := differences(before, now):
        raise UserError(
            f"{data_dir} was prepared differently: {different}; use the same settings, or `waveform prepare` the audio "
            "into another folder and name that"
        )
    known = {(path, record["size"]) for path, record in old.sources["files"].items() if "refused" not in record}
    if known and not known & {(file.path, file.size) for file in wanted}:
        raise UserError(
            f"{data_dir} was prepared from different audio (none of its {len(known)} files is there now); "
            "give another folder for this audio, or delete that one"
        )
    return old


def _prepare_files(
    old: Dataset | None,
    wanted: dict[FoundFile, str],
    config: DataConfig,
    *,
    audio_dir: Path,
    data_dir: Path,
    executor: Executor | None,
    show: bool,
) -> tuple[Records, dict[str, int]]:
    """Prepare what is new or changed. Returns the records of all files by path, and how many there are of each sort."""
    kept = _still_valid(old, wanted) if old else {}
    pending = [(file, split) for file, split in wanted.items() if file.path not in kept]
    records, todo = dict(kept), []
    for group in cut_into_groups(pending, config.audio_format):
        if (finished := finished_records(group, data_dir)) is None:
            todo.append(group)
        else:
            records |= finished
    num_taken = len(records) - len(kept)
    if todo:
        records |= run_groups(
            todo, audio_dir=audio_dir, data_dir=data_dir, num_workers=config.num_workers, executor=executor, show=show
        )
    return dict(sorted(records.items())), {
        "read": sum(len(group.files) for group in todo),
        "taken from an interrupted run": num_taken,
        "unchanged": len(kept),
        "no longer there": len(old.sources["files"].keys() - records.keys()) if old else 0,
    }


def _still_valid(old: Dataset, wanted: dict[FoundFile, str]) -> Records:
    """Return the records of files that need no work: unchanged, and in a shard in which nothing else has changed."""
    if old.sources["format"] != FORMAT:
        return {}
    unchanged = {
        file.path: record
        for file, split in wanted.items()
        if (record := old.sources["files"].get(file.path)) is not None
        and "died" not in record
        and (record["size"], record["mtime_ns"], record["split"]) == (file.size, file.mtime_ns, split)
    }
    stale = {
        record["shard"]
        for path, record in old.sources["files"].items()
        if path not in unchanged and "refused" not in record
    }
    in_use = sorted({record["shard"] for record in unchanged.values() if "refused" not in record} - stale)
    if len(in_use) > _MAX_SHARDS:
        return {}
    with ThreadPoolExecutor() as pool:  # reading and hashing release the GIL
        whole = list(pool.map(lambda shard: _is_whole(old, shard), in_use))
    stale |= {shard for shard, is_whole in zip(in_use, whole, strict=True) if not is_whole}
    return {path: record for path, record in unchanged.items() if record.get("shard") not in stale}


def _is_whole(dataset: Dataset, shard: str) -> bool:
    """Whether a shard still holds what it did. If it was deleted, cut or changed, it is made again."""
    try:
        opened = Shard(dataset.folder / shard)
        opened.verify()
        return opened.digest == dataset.digests.get(shard)
    except UserError:
        return False


def _clean(dataset: Dataset) -> None:
    """Remove what this data set does not name: shards of earlier states, and what interrupted runs left."""
    named = {name for names in dataset.splits.values() for name in names}
    for path in (dataset.folder / SHARDS).iterdir():
        if f"{SHARDS}/{path.name}" not in named:
            path.unlink()
    shutil.rmtree(dataset.folder / UNFINISHED)
    for file in (DATASET_FILE, REPORT_FILE):
        drop_leftovers(dataset.folder / file)
