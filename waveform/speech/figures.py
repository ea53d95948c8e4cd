"""The figures of runs on speech, besides their NLL, and the tables of `evaluate`, `compare` and `race`."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from waveform.audio.audio_format import LOOKS_AHEAD, format_of
from waveform.engine.drawing import DrawConfig
from waveform.engine.evaluator import Evaluation
from waveform.engine.interface import begin_of_utterance, decoder, for_drawing
from waveform.engine.metrics import bits
from waveform.engine.token_set import TokenSet
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import display_names, linear_prediction_nats, nll_by_label, trained_on, unigram_nats
from waveform.runs.speeds import warnings_of
from waveform.runs.statistics import with_intervals
from waveform.system.console import counted, printable, table

UNLABELLED = "(unlabelled)"
_MOST_LABELS = 20  # rows of a table
_SPEED_SECONDS = 2.0  # for measuring how fast a run samples


def metrics_of(run: TrainedRun, tokens: TokenSet, pieces: TokenSet, result: Evaluation) -> dict[str, Any]:
    """What is reported beside a run's NLL: that of models which need no training, and its own by label.

    pieces: `tokens` as they were scored.
    """
    modality = run.config["dataset"]["modality"]
    by_label = nll_by_label(result, tokens)
    return {
        "sample_rate_hz": modality["sample_rate_hz"],
        "looks_ahead": format_of(modality).looks_ahead,
        "unigram_nats_per_token": unigram_nats(run, pieces, result),
        "linear_prediction_nats_per_token": linear_prediction_nats(run, pieces, result),
        "prediction": run.config["model"].get("prediction", "none"),
        **({"nll_by_label": by_label} if by_label else {}),
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures of one run as text."""
    beside = {"linear prediction alone": "linear_prediction", "unigram": "unigram"}
    known = {name: figures[f"{key}_nats_per_token"] for name, key in beside.items()}
    lines = [
        f"{figures['model']}, step {figures['step']}, {figures['split']} split, state {figures['state']}"
        f"{LOOKS_AHEAD if figures['looks_ahead'] else ''}: "
        f"{figures['nats_per_token']:.4f} nats = {figures['bits_per_token']:.4f} bits per sample "
        f"({figures['num_tokens']:,} samples of {counted(figures['num_utterances'], 'utterance')}"
        + "".join(f"; {name} {nats:.4f} nats" for name, nats in known.items() if nats is not None)
        + ")"
    ]
    if "nll_by_label" in figures:
        lines += table(["label", "utterances", "nats/sample"], by_label_rows([figures["nll_by_label"]]))
    if "dynamic" in figures:
        dynamic = figures["dynamic"]
        lines.append(
            f"dynamic, {dynamic['optimiser']} at {dynamic['lr']:g}: {dynamic['nats_per_token']:.4f} nats = "
            f"{dynamic['bits_per_token']:.4f} bits per sample ({dynamic['difference_to_plain_nats']:+.4f} nats)"
        )
    return "\n".join(lines)


def by_label_rows(entries: Sequence[Sequence[dict[str, Any]]]) -> list[list[str]]:
    """Rows of a table, for at most 20 labels: label, number of utterances, and the nats of each of several runs."""
    rows = [
        [
            UNLABELLED if of_runs[0]["label"] is None else printable(of_runs[0]["label"]),
            str(of_runs[0]["num_utterances"]),
            *(f"{entry['nats_per_token']:.4f}" for entry in of_runs),
        ]
        for of_runs in zip(*entries, strict=True)
    ]
    if len(rows) > _MOST_LABELS:
        more = f"({len(rows) - _MOST_LABELS} more labels: --json)"
        rows = [*rows[:_MOST_LABELS], [more, *[""] * (len(rows[0]) - 1)]]
    return rows


@torch.inference_mode()
def sampling_speed(run: TrainedRun) -> float:
    """Samples per second of one stream that `run` draws, on the device that it draws on, from empty memories."""
    vocab_size, model = int(run.config["dataset"]["vocab_size"]), for_drawing(run.model)
    device = next(iter(model.parameters())).device
    tokens = torch.tensor([begin_of_utterance(vocab_size)], device=device)
    stepper = decoder(model, model.init_state(1, device=device, dtype=torch.float32))
    uniform = torch.full((32, 1), 0.5, device=device)
    stepper.draw(tokens, uniform, DrawConfig())  # may wait for a compiler or the capture of a CUDA graph
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SPEED_SECONDS:
        tokens = stepper.draw(tokens, uniform, DrawConfig())[-1]
        tokens.cpu()  # wait for the device
        steps += len(uniform)
    return steps / (time.perf_counter() - began)


def rows_of(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The comparison as a table's header and rows, best NLL first."""
    (baseline,) = {entry["model"] for entry in entries if entry["run"] == entry["baseline"]}
    other = "WaveNet" if baseline == "wavenet" else "the first"
    header = ["model", "nats/sample", "bits/sample", f"vs {other}, nats [95% interval]", "prediction", "parameters",
              "trained on", "training", "sampling"]  # fmt: skip
    rows = []
    for label, entry in sorted(
        zip(display_names(entries), entries, strict=True), key=lambda labelled: labelled[1]["nats_per_token"]
    ):
        against = with_intervals(entry["difference_nats"], entry["interval_95"], sign="+")
        rate = entry["train_tokens_per_second"]
        rows.append(
            [
                label,
                f"{entry['nats_per_token']:.4f}",
                f"{bits(entry['nats_per_token']):.4f}",
                "-" if entry["run"] == entry["baseline"] else against,
                entry["prediction"],
                f"{entry['num_parameters'] / 1e6:.2f} M",
                trained_on(entry),
                "-" if rate is None else f"{rate:,.0f}/s ({rate / entry['sample_rate_hz']:.2f} x real time)",
                f"{entry['sampling_tokens_per_second']:,.0f}/s",
            ]
        )
    first = entries[0]
    for name, key in (("(linear prediction)", "linear_prediction"), ("(unigram)", "unigram")):
        if (nats := first[f"{key}_nats_per_token"]) is not None:
            rows.append([name, f"{nats:.4f}", f"{bits(nats):.4f}", *["-"] * 6])
    for other in first.get("published", []):
        size = "-" if other["parameters"] is None else f"{other['parameters'] / 1e6:.1f} M"
        label = f"{other['model']} (published)"
        rows.append([label, f"{other['bits'] * math.log(2):.3f}", f"{other['bits']:.3f}", "-", "-", size, *["-"] * 3])
    return header, rows


def scope_of(entry: dict[str, Any]) -> str:
    """Say what the NLL of several runs was measured on, from the figures of any of them."""
    return (
        f"{entry['split']} split: {entry['num_tokens']:,} samples of {counted(entry['num_utterances'], 'utterance')}, "
        f"state {entry['state']}{LOOKS_AHEAD if entry['looks_ahead'] else ''}"
    )


def race_scope(entry: dict[str, Any]) -> str:
    """Say the same below a race, with the NLL of models that need no training."""
    return (
        f"{scope_of(entry)}; linear prediction alone {entry['linear_prediction_nats_per_token']:.4f} nats, unigram "
        f"{entry['unigram_nats_per_token']:.4f} nats; {entry['device']}, {counted(entry['num_threads'], 'thread')}"
    )


def note_of(entries: Sequence[dict[str, Any]]) -> str:
    """Say what a comparison was measured on, and which models are no better than linear prediction alone."""
    first = entries[0]
    known = first["linear_prediction_nats_per_token"]
    nats = {label: entry["nats_per_token"] for label, entry in zip(display_names(entries), entries, strict=True)}
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
    return "\n".join([*lines, *warnings_of(dict(zip(display_names(entries), entries, strict=True)))])
