"""What a study of recall reports: bits per answer by distance, as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.studies.seeds import mean_and_interval
from waveform.system.console import table


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one setting's figures over its seeds: the headline metric, by distance too, and what it took."""
    first = runs[0]
    headline = first["headline"]
    return {
        "model": first["model"],
        "num_parameters": first["num_parameters"],
        "train_seconds": [run["train_seconds"] for run in runs],
        "train_tokens_seen": first["train_tokens_seen"],
        headline: mean_and_interval([run[headline] for run in runs]),
        "chance_bits": first["chance_bits"],
        "bits_by_distance": [
            {
                "from": bucket["from"],
                "to": bucket["to"],
                "num_answers": bucket["num_answers"],
                **mean_and_interval([run["bits_by_distance"][i]["bits"] for run in runs]),
            }
            for i, bucket in enumerate(first["bits_by_distance"])
        ],
    }


def format_table(summary: Mapping[str, Any]) -> str:
    """Return bits per answer by setting: over all distances with an interval, and the mean at each distance."""
    variants = summary["variants"]
    buckets = next(iter(variants.values()))["bits_by_distance"]
    header = ["setting", "bits per answer [95% interval]", *(f"to {bucket['to']}" for bucket in buckets), "parameters"]
    rows = []
    for label, entry in variants.items():
        total = entry["bits_per_answer"]
        cell = f"{total['mean']:.3f}"
        if total["interval_95"] is not None:
            cell += " [{:.3f}, {:.3f}]".format(*total["interval_95"])
        by_distance = [f"{bucket['mean']:.2f}" for bucket in entry["bits_by_distance"]]
        rows.append([label, cell, *by_distance, f"{entry['num_parameters']:,}"])
    chance = next(iter(variants.values()))["chance_bits"]
    return "\n".join(
        [
            *table(header, rows),
            f"bits per answer by the steps since its fact was last seen; chance is {chance:.2f} bits; "
            f"means of {summary['seeds']} seeds",
        ]
    )
