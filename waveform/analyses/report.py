"""The figures of an analysis as lines of text, for the terminal."""

from itertools import zip_longest
from typing import Any


def describe(figures: dict[str, Any]) -> str:
    """Return the figures of `analyse` in a few lines."""
    unit, lines = figures["unit"], []
    for entry in figures["runs"]:
        lines.append(f"{entry['label']}, step {entry['step']}, {figures['split']} split")
        attention = entry["attention_by_position"]
        if "absent" in attention:
            lines.append(f"  attention by position: {attention['absent']}")
        else:
            lines.append(
                f"  attention by position, oldest first, % of a query's weight ({attention['num_windows']} windows of "
                f"{attention['num_pieces']} pieces, memories full)"
            )
            for region, values in attention["regions"].items():
                errors = [f"±{100 * e:.2f}" for e in values["weight_standard_error"] or ()]  # none for one piece
                cells = [f"{100 * w:.2f}{e}" for w, e in zip_longest(values["weight"], errors, fillvalue="")]
                lines.append(f"    {region:<10} {'  '.join(cells)}   sum {100 * sum(values['weight']):.1f}")
        loss = entry["compression_loss_by_layer"]
        if "absent" in loss:
            lines.append(f"  compression loss by layer: {loss['absent']}")
        else:
            errors = [f"±{e:.1g}" for e in loss["standard_error"] or ()]
            cells = [f"{m:.3g}{e}" for m, e in zip_longest(loss["mean"], errors, fillvalue="")]
            lines.append(f"  compression loss by layer ({loss['loss']}): {'  '.join(cells)}")
        lines += _heads(entry["attention_by_head"])
        lines += _answers(entry.get("attention_on_answers"))
        speed = entry["state_reuse"]
        if "absent" in speed:
            lines.append(f"  state reuse: {speed['absent']}")
        else:
            lines.append(
                f"  evaluation: {1e6 * speed['seconds_per_token']['carried']:.1f} us per {unit} with carried state; "
                f"without it {speed['speedup_over_each_window']:.1f} times as long, if each window reads its "
                f"{speed['context_tokens']} {unit}s of context again, or {speed['speedup_over_each_token']:,.0f} times "
                f"as long, if each {unit} does ({speed['device']})"
            )
    context = figures["effective_context"]
    if "absent" in context:
        lines.append(f"relative effective context: {context['absent']}")
        return "\n".join(lines)
    group = "the group" if len(figures["runs"]) > 1 else "one run, relative to itself"
    lines.append(
        f"relative effective context in {unit}s of {group} (steps of {context['step']} to {context['lengths'][-1]}, "
        f"{context['num_positions']:,} positions)"
    )
    for i, entry in enumerate(figures["runs"]):
        cells = [
            f"r={ratio}: {'> ' if results[i]['reached_limit'] else ''}{results[i]['recl']}"
            for ratio, results in context["by_ratio"].items()
        ]
        nats = context["nats_by_length"][i]
        lines.append(f"  {entry['label']:<24} {'   '.join(cells)}   nats {nats[0]:.4f} -> {nats[-1]:.4f}")
    return "\n".join(lines)


def _heads(heads: dict[str, Any]) -> list[str]:
    """How far back each head looks on average, a line for each layer, and how far each term of its score would."""
    if "absent" in heads:
        return [f"  attention by head: {heads['absent']}"]
    lines = [f"  mean distance by head, steps ({heads['num_windows']} windows, memories full)"]
    lines += [
        f"    layer {i:<2} {'  '.join(f'{distance:7.1f}' for distance in layer)}"
        for i, layer in enumerate(heads["mean_distance"])
    ]
    for region, share in heads["share"].items():
        if region != "window":
            lines.append(
                f"  attention to {region}{' memory' * (region == 'compressed')} by head, % of a query's weight"
            )
            lines += [
                f"    layer {i:<2} {'  '.join(f'{100 * each:7.2f}' for each in layer)}" for i, layer in enumerate(share)
            ]
    for letter, term in heads["terms"].items():
        distances = [distance for layer in term["mean_distance"] for distance in layer]
        lines.append(
            f"    term ({letter}) alone, {term['name']}, steps: {min(distances):.1f} to {max(distances):.1f}, "
            f"mean {sum(distances) / len(distances):.1f}"
        )
    return lines


def _answers(answers: dict[str, Any] | None) -> list[str]:
    """A line for each head: the weight on the slot that holds the answer, by distance."""
    if answers is None:
        return []
    if "absent" in answers:
        return [f"  attention on answers: {answers['absent']}"]

    def cells(shares: list[float | None]) -> str:
        return "  ".join("    -" if share is None else f"{100 * share:5.1f}" for share in shares)

    lines = [
        "  attention on the slot that holds the answer, %, by steps since it was last seen",
        "    up to            " + "  ".join(f"{bucket['to']:>5}" for bucket in answers["buckets"]),
        f"    within reach     {cells(answers['held'])}",
    ]
    for i, layer in enumerate(answers["weight"]):
        lines += [f"    layer {i:<2} head {h:<2} {cells(weights)}" for h, weights in enumerate(layer)]
    return lines
