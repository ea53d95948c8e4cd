"""`python -m recipes compare`: several runs on the same held-out text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.corpora.episodes import is_recall
from recipes.metrics import UNITS
from recipes.plots import Curve, save_recall
from recipes.reinforcement.settings import is_agent
from recipes.text import load
from recipes.verbs.agents import AgentEvaluation, Playing, evaluate_agents
from recipes.verbs.evaluate import Measurement, measure, protocol_of
from waveform.ranks.distributed import SCORING_TIMEOUT_S, job
from waveform.runs.learning_curves import read_learning_curve, save_learning_curves
from waveform.runs.scoring import EvaluateOptions, bootstrap_interval, own_tokens
from waveform.system.console import counted, table
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json


def compare(
    run_dirs: Sequence[Path | str],
    options: EvaluateOptions | None = None,
    playing: Playing | None = None,
    *,
    split: str = "test",
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate runs on the same tokens; print a table, return (and write) the figures.

    Each entry contains what `evaluate` gives, `difference_to_first_nats` per token, `interval_95` of that by the
    paired bootstrap over documents, or pieces with options.rows (None for fewer than five), and for words
    `relative_gain_over_first`. plot_file: bits by distance for runs on recall, validation NLL in training for others.
    Under torchrun every process calls this. Raises UserError as `evaluate` does, and if the runs' tokens differ, or
    when their state resets. Agents play in the same environment, and their returns are compared.
    """
    check_files(json_file=json_file, plot_file=plot_file)
    options, playing = options or EvaluateOptions(), playing or Playing()
    if any([is_agent(run_dir) for run_dir in run_dirs]):
        chosen = AgentEvaluation(options, playing, split=split, plot_file=plot_file, device=device)
        return evaluate_agents(run_dirs, chosen, json_file=json_file, show_progress=show_progress)
    playing.refuse()
    with job(device=device, timeout_s=SCORING_TIMEOUT_S) as world:
        runs = [load(run_dir, device=world.device.type, **options.model_fields) for run_dir in run_dirs]
        checksums = [own_tokens(run, split=split).checksum for run in runs]
        for run, checksum in zip(runs, checksums, strict=True):
            if checksum != checksums[0]:
                raise UserError(
                    f"{runs[0].given} and {run.given} have different {split} data and cannot be compared; "
                    "train both on one data set"
                )
        protocols = sorted({protocol_of(run, options) for run in runs})
        if len(protocols) > 1:
            raise UserError(
                f"these runs were trained with train.state={' and '.join(protocols)} and would be scored so; name one "
                "for all of them with --protocol"
            )
        measured = [
            measure(run, options, split=split, world=world, show_progress=show_progress and world.is_first)
            for run in runs
        ]
        entries = [_entry(one, measured[0]) for one in measured]
        for entry in entries[1:]:
            if "perplexity_by_frequency" in entry:
                entry["relative_gain_over_first"] = relative_gain(entry, entries[0])
        if world.is_first:
            if show_progress:
                print(format_table(entries))
            write_json(json_file, entries)
            if plot_file is not None and is_recall(runs[0]):
                save_recall(plot_file, [("recall", [Curve(_label(entry), [entry]) for entry in entries])])
            elif plot_file is not None:
                curves = [(run.folder.name, read_learning_curve(run.folder, run.config)) for run in runs]
                save_learning_curves(plot_file, curves, unit=runs[0].unit)
        return entries


def _entry(one: Measurement, first: Measurement) -> dict[str, Any]:
    return {
        **one.figures,
        "difference_to_first_nats": one.result.nats_per_token - first.result.nats_per_token,
        "interval_95": None if one is first else bootstrap_interval(one.result, first.result),
    }


def _label(entry: dict[str, Any]) -> str:
    return Path(entry["run"]).name


def rows_of(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the comparison as a table's header and rows, in the order given."""
    first = entries[0]
    metrics = [first["headline"], *(name for name in UNITS if name in first and name != first["headline"])]
    names = [UNITS[name] for name in metrics]
    header = ["run", *names, "nats/token", "to the first [95% interval]", "parameters", "trained on"]
    rows = []
    for entry in entries:
        against = "-" if entry is first else f"{entry['difference_to_first_nats']:+.4f}"
        if entry["interval_95"] is not None:
            against += " [{:+.4f}, {:+.4f}]".format(*entry["interval_95"])
        rows.append(
            [
                f"{_label(entry)} ({entry['model']})",
                *(f"{entry[name]:,.2f}" if name.endswith("perplexity") else f"{entry[name]:.4f}" for name in metrics),
                f"{entry['nats_per_token']:.4f}",
                against,
                f"{entry['num_parameters'] / 1e6:.2f} M",
                f"{entry['train_tokens_seen'] / 1e6:.1f} M tokens, {entry['train_seconds']:.0f} s",
            ]
        )
    return header, rows


def format_table(entries: Sequence[dict[str, Any]]) -> str:
    """Return the comparison as text, in the order given."""
    first = entries[0]
    lines = table(*rows_of(entries))
    if "perplexity_by_frequency" in first:
        lines += ["", "perplexity by occurrences in training:", *table(*frequencies_of(entries))]
    if "bits_by_distance" in first:
        lines += ["", f"bits per answer by distance, chance {first['chance_bits']:.2f}:", *_distances(entries)]
    lines.append(
        f"{first['split']} split: {first['num_tokens']:,} tokens of {counted(first['num_documents'], 'document')}"
    )
    if first["rows"]:
        lines.append(f"cut for speed, state {first['state']}")
    return "\n".join(lines)


def relative_gain(entry: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """Return by how much the first run's perplexity exceeds this one's, as a share of it, by bucket and in total.

    Rae et al. 2019, Table 7: 61.2 against 55.9 is a gain of 9.5%.
    """
    before, after = first["perplexity_by_frequency"], entry["perplexity_by_frequency"]
    gains = {bucket: before[bucket]["perplexity"] / after[bucket]["perplexity"] - 1 for bucket in before}
    return {**gains, "all": first["perplexity"] / entry["perplexity"] - 1}


def frequencies_of(entries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return Table 7 as header and rows: a line of perplexities for each run, then one of its gain over the first."""
    buckets = list(entries[0]["perplexity_by_frequency"])
    rows = []
    for entry in entries:
        by_bucket = [f"{entry['perplexity_by_frequency'][bucket]['perplexity']:,.2f}" for bucket in buckets]
        rows.append([_label(entry), *by_bucket, f"{entry['perplexity']:,.2f}"])
        if entry is not entries[0]:
            gains = entry["relative_gain_over_first"]
            rows.append(["  gain over the first", *(f"{gain:+.1%}" for gain in gains.values())])
    return ["run", *buckets, "all"], rows


def _distances(entries: Sequence[dict[str, Any]]) -> list[str]:
    buckets = entries[0]["bits_by_distance"]
    header = ["steps", *(_label(entry) for entry in entries)]
    rows = [
        [f"{bucket['from']} to {bucket['to']}", *(f"{entry['bits_by_distance'][i]['bits']:.3f}" for entry in entries)]
        for i, bucket in enumerate(buckets)
    ]
    return table(header, rows)
