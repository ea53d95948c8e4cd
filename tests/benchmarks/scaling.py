"""How far the papers' configurations could scale over GPUs, on paper: the tables of docs/performance.md.

python -m tests.benchmarks.scaling

Nothing is timed. Bytes are counted by `tests.benchmarks.communication`. Computation is 6 FLOPs per parameter and token,
plus 12 per layer, slot and unit of width. Communication overlaps with nothing.
"""

from functools import partial
from typing import Any

import torch

from recipes.text import compose_config as compose_text
from tests.benchmarks.communication import bytes_sent
from waveform.models.registry import build
from waveform.runs.configured_model import num_parameters
from waveform.speech.config import compose_config as compose_speech

PEAK_FLOPS = 989e12  # a second, of an H100 in bf16 without sparsity
SHARES = (0.1, 0.4)  # of it that training reaches; docs/performance.md says what each stands for
_ACHIEVED = 0.8  # share of a network's rate
_BYTES_PER_SECOND = {8: 450e9, 32: 400e9}  # NVLink within 8 GPUs; eight 400 Gb/s links per node, 4 nodes of 8


def rows(name: str, config: dict[str, Any], *, vocab_size: int, flops_per_second: float) -> list[str]:
    """Return a table's lines for one configuration, without and with sharding."""
    fields = {key: value for key, value in config["model"].items() if key != "name"}
    with torch.device("meta"):
        model: Any = build(config["model"]["name"], vocab_size=vocab_size, **fields)
    sizes, train = model.config, config["train"]
    window = train["window"] or sizes.window
    num_slots = sizes.window + sizes.memory + sizes.compressed
    per_token = 6 * num_parameters(model) + 12 * sizes.num_layers * num_slots * sizes.d_model
    flops = per_token * train["batch_size"] * train["chunk"]
    title = f"{name}, {num_parameters(model) / 1e6:.0f} M, batch {train['batch_size']} x {train['chunk']}"
    bytes_of = partial(bytes_sent, model, units=model.sharding_units(window), unroll=train["unroll"])
    lines = []
    for sharding in ("none", "fsdp"):
        cells = [title if sharding == "none" else "", f"`{sharding}`"]
        for num_ranks, rate in _BYTES_PER_SECOND.items():
            sent = bytes_of(num_ranks=num_ranks, sharding=sharding, num_windows=train["chunk"] // window)
            sent_s, compute_s = sent / (_ACHIEVED * rate), flops / num_ranks / flops_per_second
            whole_s = sent_s + compute_s
            took = f"{sent_s * 1e3:.1f} of {whole_s * 1e3:.0f} ms"
            cells += [f"{sent / 1e9:.2f} GB", took, f"{compute_s / whole_s:.0%}"]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def table(share: float) -> list[str]:
    """Return all lines below the header, at a share of the peak."""
    configs = (
        ("speech", compose_speech(["preset=speech_paper"]), 256),
        ("enwik8", compose_text("enwik8", ["preset=paper"]), 256),
        ("PG-19", compose_text("pg19", ["preset=paper"]), 32_000),
    )
    return [
        line
        for name, config, vocab_size in configs
        for line in rows(name, config, vocab_size=vocab_size, flops_per_second=share * PEAK_FLOPS)
    ]


if __name__ == "__main__":
    for share in SHARES:
        print(f"at {share:.0%}", *table(share), sep="\n")
