"""Compares trained runs on the same test tokens: NLL, its difference to WaveNet, size and speed."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from waveform.audio.audio_format import LOOKS_AHEAD, differences
from waveform.audio.corpus.published import find_published
from waveform.engine.dataset import is_dataset, read_dataset
from waveform.engine.drawing import DrawConfig
from waveform.engine.inputs import begin_of_utterance
from waveform.engine.interface import decoder
from waveform.engine.metrics import bits, read_metrics
from waveform.engine.token_set import TokenSet
from waveform.quality.measure import QualityConfig, measure_quality
from waveform.quality.report import describe as describe_quality
from waveform.runs.learning_curves import save_learning_curves
from waveform.runs.opened import TrainedRun
from waveform.runs.race import ScoredRun
from waveform.runs.scoring import bootstrap_interval, score, with_labels
from waveform.runs.speeds import warnings_of
from waveform.speech import Run, load
from waveform.system.console import counted, printable, table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.verbs.evaluate import describe, open_split, require_clips

BASELINE = "wavenet"
_SPEED_SECONDS = 2.0  # of measuring how fast a run samples


@torch.inference_mode()
def sampling_speed(run: TrainedRun) -> float:
    """Samples per second of one stream that `run` generates on its device, from empty memories."""
    vocab_size = int(run.config["dataset"]["vocab_size"])
    tokens = torch.tensor([begin_of_utterance(vocab_size)], device=run.device)
    state = run.model.init_state(1, device=run.device, dtype=torch.float32)
    stepper = decoder(run.model, state)
    uniform = torch.full((32, 1), 0.5, device=run.device)
    stepper.draw(tokens, uniform, DrawConfig())  # may wait for a compiler, or a capture
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SPEED_SECONDS:
        tokens = stepper.draw(tokens, uniform, DrawConfig())[-1]
        tokens.cpu()  # wait for the device
        steps += len(uniform)
    return steps / (time.perf_counter() - began)


def training_speed(run_dir: Path) -> float | None:
    """Median training speed in samples per second, as logged; None before the first record."""
    rates = [record.get("tokens_per_second") for record in read_metrics(run_dir) if record["kind"] == "train"]
    numbers = [rate for rate in rates if isinstance(rate, int | float) and 0 < rate < math.inf]
    return statistics.median(numbers) if numbers else None


@dataclass(frozen=True)
class CompareConfig(QualityConfig):
    """How runs are compared, and with `quality` how that of their samples is measured."""

    # utterance | chunk | carry | clip: when state is reset; None: utterance, or clip beside published figures
    protocol: str | None = None
    published: str | None = None  # corpus whose published figures are shown beside


def compare(
    run_dirs: Sequence[Path | str] | Path | str,
    config: CompareConfig | None = None,
    *,
    data: Path | str | None = None,
    split: str = "test",
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate runs on the same tokens under config.protocol; print a table, return (and write) a list of figures.

    Each entry contains what `evaluate` gives, `difference_to_wavenet_nats` with its `interval_95` (None if no run is a
    WaveNet; the interval also for fewer than five utterances), `train_samples_per_second`, in all and by slice,
    `sampling_samples_per_second` and the `learning_curve`, validation NLL in training, which `plot_file` shows; with
    config.quality also `quality`, the figures of all runs' samples, which are the same in each entry, and with
    config.published `published`, the figures of others. Raises UserError as `load` does, if the runs' test tokens
    differ, and for published figures that were not measured as those of the runs would be.
    """
    run_dirs = [run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs)
    config = config or CompareConfig()
    check_files(json_file=json_file, plot_file=plot_file)
    published = None if config.published is None else find_published(config.published)
    protocol = config.protocol or ("utterance" if published is None else "clip")
    runs, tokens = open_runs(run_dirs, data=data, split=split, device=device, show_progress=show_progress)
    if published is not None:
        for run in runs:
            published.require_same(
                run.given, run.config, tested_on=_modality(run, data), protocol=protocol, split=split
            )
    scored = score_runs(runs, tokens, protocol=protocol, show_progress=show_progress)
    entries = entries_of(scored, split=split)
    if published is not None:
        entries = [{**entry, "published": published.as_json()} for entry in entries]
    if show_progress:
        print(format_table(entries))
    if config.quality:
        measured = measure_quality(
            list(zip(labels_of(entries), runs, strict=True)),
            config,
            held_out=tokens,
            others=open_split(runs[0], data=data, split="train", show_progress=False),
            show_progress=show_progress,
        )
        entries = [{**entry, "quality": measured.as_json()} for entry in entries]
        if show_progress:
            print(describe_quality(measured))
    write_json(json_file, entries)
    if plot_file is not None:
        curves = [one.curve for one in scored]
        save_learning_curves(plot_file, list(zip(labels_of(entries), curves, strict=True)), unit="sample")
    return entries


def score_runs(
    runs: Sequence[Run], tokens: TokenSet, *, protocol: str = "utterance", show_progress: bool = True
) -> list[ScoredRun]:
    """Score runs on `tokens` under one protocol.

    Raises UserError if it would reset them at different chunks, and if it needs clips that the data does not have.
    """
    for run in runs:
        require_clips(run, protocol)
    chunks = {run.config["train"]["chunk"] for run in runs}
    if protocol == "chunk" and len(chunks) > 1:
        raise UserError(f"protocol chunk would reset these runs at different chunks, {sorted(chunks)}; use utterance")
    return [
        ScoredRun.of(run, tokens, score(run, tokens, protocol=protocol, show_progress=show_progress)) for run in runs
    ]


def open_runs(
    run_dirs: Sequence[Path | str],
    *,
    data: Path | str | None = None,
    split: str = "test",
    device: str | None = None,
    show_progress: bool = True,
) -> tuple[list[Run], TokenSet]:
    """Open runs, and the tokens that all are scored on, with labels if the data set of one of them has any.

    Raises UserError as `load` does, and if theirs differ.
    """
    if not run_dirs:
        raise UserError("name at least one run folder")
    runs = [load(run_dir, device=device) for run_dir in run_dirs]
    token_sets = [open_split(run, data=data, split=split, show_progress=show_progress) for run in runs]
    for run in runs:
        if different := differences(runs[0].audio_format, run.audio_format):
            raise UserError(
                f"{runs[0].given} and {run.given} read different tokens and cannot be compared: {different}"
            )
    for run, tokens in zip(runs, token_sets, strict=True):
        if tokens.checksum != token_sets[0].checksum:
            raise UserError(
                f"{runs[0].given} and {run.given} have different {split} data, so their NLL cannot be compared; "
                "name one data set for all of them with --data"
            )
    return runs, with_labels(runs, token_sets)


def _modality(run: Run, data: Path | str | None) -> dict[str, Any]:
    """What the data set that `run` is tested on says of its tokens; nothing for raw audio."""
    folder = Path(run.config["dataset"]["path"] if data is None else data)
    return read_dataset(folder).modality if is_dataset(folder) else {}


def entries_of(scored: Sequence[ScoredRun], *, split: str) -> list[dict[str, Any]]:
    """The figures of runs that were scored on the same tokens (see `compare`); measures how fast each samples."""
    baseline = next((one.result for one in scored if one.run.name == BASELINE), None)
    entries = []
    for one in scored:
        difference = interval = None
        if baseline is not None:
            difference = one.result.nats_per_token - baseline.nats_per_token
            interval = bootstrap_interval(one.result, baseline) if one.result is not baseline else [0.0, 0.0]
        entries.append(
            {
                **figures_of(one, split=split),
                "difference_to_wavenet_nats": difference,
                "interval_95": interval,
                "sampling_samples_per_second": sampling_speed(one.run),
            }
        )
    return entries


def figures_of(scored: ScoredRun, *, split: str) -> dict[str, Any]:
    """What a comparison's JSON has of one run on its own."""
    run, tokens = scored.run, scored.tokens
    return {
        **describe(run, scored.result, split=split, tokens=tokens),
        "train_samples_per_second": training_speed(run.folder),
        "train_samples_per_second_by_slice": scored.speeds,
        "train_waited_share": scored.waited_share,
        "learning_curve": scored.curve.figures(),
        "device": str(run.device),
        "num_threads": torch.get_num_threads(),
    }


def labels_of(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The model of each run, with the run's name, or at need its path, if several are of the same model."""
    models = [entry["model"] for entry in entries]
    named = [f"{entry['model']} ({Path(entry['run']).name})" for entry in entries]
    return [
        printable(
            model if models.count(model) == 1 else name if named.count(name) == 1 else f"{model} ({entry['run']})"
        )
        for model, name, entry in zip(models, named, entries, strict=True)
    ]


def rows_of(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The comparison as a table's header and rows, best NLL first."""
    header = ["model", "nats/sample", "bits/sample", "vs WaveNet, nats [95% interval]", "prediction", "parameters",
              "trained on", "training", "sampling"]  # fmt: skip
    rows = []
    for label, entry in sorted(
        zip(labels_of(entries), entries, strict=True), key=lambda labelled: labelled[1]["nll_nats_per_sample"]
    ):
        difference = entry["difference_to_wavenet_nats"]
        if difference is None or entry["interval_95"] == [0.0, 0.0]:
            against = "-"
        else:
            against = f"{difference:+.4f}"
            if entry["interval_95"] is not None:
                against += " [{:+.4f}, {:+.4f}]".format(*entry["interval_95"])
        rate = entry["train_samples_per_second"]
        rows.append(
            [
                label,
                f"{entry['nll_nats_per_sample']:.4f}",
                f"{bits(entry['nll_nats_per_sample']):.4f}",
                against,
                entry["prediction"],
                f"{entry['num_parameters'] / 1e6:.2f} M",
                f"{entry['train_samples_seen'] / 1e6:.1f} M samples, {entry['train_seconds']:.0f} s",
                "-" if rate is None else f"{rate:,.0f}/s ({rate / entry['sample_rate_hz']:.2f} x real time)",
                f"{entry['sampling_samples_per_second']:,.0f}/s",
            ]
        )
    first = entries[0]
    for name, key in (("(linear prediction)", "linear_prediction"), ("(unigram)", "unigram")):
        if (nats := first[f"{key}_nats_per_sample"]) is not None:
            rows.append([name, f"{nats:.4f}", f"{bits(nats):.4f}", *["-"] * 6])
    for other in first.get("published", []):
        size = "-" if other["parameters"] is None else f"{other['parameters'] / 1e6:.1f} M"
        label = f"{other['model']} (published)"
        rows.append([label, f"{other['bits'] * math.log(2):.3f}", f"{other['bits']:.3f}", "-", "-", size, *["-"] * 3])
    return header, rows


def scope_of(first: dict[str, Any]) -> str:
    """What the NLL of several runs is of, from the figures of any of them."""
    return (
        f"{first['split']} split: {first['num_samples']:,} samples of {counted(first['num_utterances'], 'utterance')}, "
        f"state by {first['protocol']}{LOOKS_AHEAD if first['looks_ahead'] else ''}"
    )


def note_of(entries: Sequence[dict[str, Any]]) -> str:
    """What the figures of a comparison are of, and which models know less than linear prediction alone."""
    first = entries[0]
    known = first["linear_prediction_nats_per_sample"]
    nats = {label: entry["nll_nats_per_sample"] for label, entry in zip(labels_of(entries), entries, strict=True)}
    worse = [label for label, value in nats.items() if known is not None and value >= known]
    return (
        f"{scope_of(first)}; lower NLL is better; speeds on {first['device']} with "
        f"{counted(first['num_threads'], 'thread')}; sampling: one stream, from empty memories"
    ) + (f"; not better than linear prediction, which needs no training: {', '.join(worse)}" if worse else "")


def format_table(entries: Sequence[dict[str, Any]]) -> str:
    """The comparison as text, best NLL first."""
    lines = [*table(*rows_of(entries)), note_of(entries)]
    if others := entries[0].get("published"):
        sources = dict.fromkeys(other["source"] for other in others)
        lines.append(f"(published): measured by others, in bits; {'; '.join(sources)}")
    speeds = [entry["train_samples_per_second_by_slice"] for entry in entries]
    waited = [entry["train_waited_share"] for entry in entries]
    labels = labels_of(entries)
    lines += warnings_of(dict(zip(labels, speeds, strict=True)), dict(zip(labels, waited, strict=True)))
    return "\n".join(lines)
