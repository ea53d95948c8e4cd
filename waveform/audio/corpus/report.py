"""Reports what is in a corpus, as JSON and as text: the last step of preparing.

Definitions. A file's *duration* is its number of tokens / the data set's rate. The *clipped share* is the share of
decoded samples with |x| >= 0.999, over all channels, before mixing and resampling. The *silent share* is the share of
whole 20-ms frames of the mono signal, at the data set's rate, whose RMS is below -60 dBFS (0.001). *Quantiles* are
those of the durations of the files used, interpolated linearly. *Shared audio* means files of different splits that
have the same tokens, sample for sample: copies, which make test results look better than they are.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from waveform.audio.corpus.scan import Scan
from waveform.audio.corpus.splits import SPLITS
from waveform.engine.dataset import Dataset
from waveform.system.console import counted, printable

_MAX_LINES = 20  # printed of a list; the JSON has them all
_QUANTILES = {"min": 0, "5%": 5, "50%": 50, "95%": 95, "max": 100}


def build_report(dataset: Dataset, *, scan: Scan, split: str) -> dict[str, Any]:
    """Sum up a data set's records of files and what the scan refused (see the module for definitions).

    The result depends only on the audio folder, so an unchanged folder gives an unchanged report.
    """
    files, labels, sample_rate_hz = dataset.sources["files"], dataset.labels, dataset.modality["sample_rate_hz"]
    used = {path: record for path, record in files.items() if "refused" not in record}
    refused = {path: record["refused"] for path, record in files.items() if "refused" in record} | scan.refused
    durations_s = [record["duration_s"] for record in used.values()]
    by_split = {name: [record["duration_s"] for record in used.values() if record["split"] == name] for name in SPLITS}
    dropped_s = round(sum(record.get("dropped_s", 0) for record in used.values()), 6)
    low = {path: record["sample_rate_hz"] for path, record in used.items() if record["sample_rate_hz"] < sample_rate_hz}
    return {
        "hours": sum(durations_s) / 3600,
        "files": len(used),
        "split": split,
        "splits": {name: {"files": len(part), "hours": sum(part) / 3600} for name, part in by_split.items()},
        "sample_rates_hz": _counts(record["sample_rate_hz"] for record in used.values()),
        "channels": _counts(record["channels"] for record in used.values()),
        "duration_s": {
            name: round(float(np.percentile(durations_s, percent)), 3) for name, percent in _QUANTILES.items()
        },
        "clipped_share": _share(used, "clipped", "samples"),
        "silent_share": _share(used, "silent", "frames"),
        "sample_rate_hz": sample_rate_hz,
        "below_sample_rate": low,
        "shared_by_splits": _shared_by_splits(used),
        "refused": dict(sorted(refused.items())),
        "other_files": dict(sorted(scan.other.items())),
        **({"dropped_s": dropped_s} if dropped_s else {}),
        **({"files_by_label": _counts(labels.values()), "unlabelled": len(used) - len(labels)} if labels else {}),
    }


def _shared_by_splits(used: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return, for each recording that is in more than one split, the paths of its copies."""
    paths = defaultdict(list)
    for path, record in used.items():
        paths[record["digest"]].append(path)
    return sorted(sorted(same) for same in paths.values() if len({used[path]["split"] for path in same}) > 1)


def _counts(values: Any) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def _share(used: dict[str, dict[str, Any]], part: str, whole: str) -> float:
    total = sum(record[whole] for record in used.values())
    return sum(record[part] for record in used.values()) / total if total else 0.0


def format_report(report: dict[str, Any], *, title: str) -> str:
    """Lay out a report as text for a terminal."""
    lines = [
        title,
        f"  total       {_hours(report['hours'])} in {counted(report['files'], 'file')}"
        + (f"; {len(report['refused'])} refused" if report["refused"] else "")
        + (f"; {others_of(report['other_files'])}" if report["other_files"] else ""),
        *(
            f"  {name:<11} {_hours(part['hours'])} in {counted(part['files'], 'file')}"
            for name, part in report["splits"].items()
        ),
        f"  split       {report['split']}",
        f"  rates       {_list_counts(report['sample_rates_hz'], 'Hz')}",
        f"  channels    {_list_counts(report['channels'], '')}",
        "  durations   " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["duration_s"].items()) + " s",
        f"  clipped     {100 * report['clipped_share']:.3f}% of samples (|x| >= 0.999)",
        f"  silent      {100 * report['silent_share']:.1f}% of 20-ms frames (RMS below -60 dBFS)",
    ]
    if "dropped_s" in report:
        lines.append(f"  dropped     {_hours(report['dropped_s'] / 3600)} after the last whole pieces of recordings")
    if by_label := report.get("files_by_label"):
        fewest = min(by_label, key=lambda label: by_label[label])
        lines.append(
            f"  labels      {len(by_label):,} (fewest files: {by_label[fewest]}, of {printable(fewest)}); "
            f"{counted(report['unlabelled'], 'file')} unlabelled"
        )
    low, copies, refused = report["below_sample_rate"], report["shared_by_splits"], report["refused"]
    below = f"below {report['sample_rate_hz']:,} Hz: {counted(len(low), 'file')}; an empty upper band lowers the NLL"
    copied = f"copies: {counted(len(copies), 'recording')} in more than one split; remove the copies"
    for title, entries in (
        (below, [f"{printable(path)} ({low[path]} Hz)" for path in sorted(low, key=lambda path: low[path])]),
        (copied, [" = ".join(map(printable, same)) for same in copies]),
        (f"refused: {counted(len(refused), 'file')}", [f"{printable(path)}: {refused[path]}" for path in refused]),
    ):
        if entries:
            lines += [f"  {title}", *(f"    {entry}" for entry in entries[:_MAX_LINES])]
        if len(entries) > _MAX_LINES:
            lines.append(f"    and {len(entries) - _MAX_LINES} more (report.json lists them all)")
    return "\n".join(lines)


def _hours(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.2f} min"


def others_of(other: Mapping[str, int]) -> str:
    """`3 other files (2 .txt, 1 without suffix)`: how many files of which suffixes, the most frequent ones first."""
    common = Counter(other).most_common(3)
    kinds = ", ".join(f"{count} {printable(suffix) or 'without suffix'}" for suffix, count in common)
    return f"{counted(sum(other.values()), 'other file')} ({kinds})"


def _list_counts(counts: dict[str, int], unit: str) -> str:
    return ", ".join(f"{value} {unit} x {count}".replace("  ", " ") for value, count in counts.items())
