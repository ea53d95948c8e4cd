"""Compares training speed and RAM with compressive-transformer-pytorch 0.4.0, the best-known public implementation.

    pip install compressive-transformer-pytorch==0.4.0
    python -m tests.peers.training [--threads 2] [--windows 5] [--json FILE]

Both train one window after another with full memories: forward, task and compression loss, backward, gradient clipping,
Adam; in fp32 and again in bf16 (autocast). The peer is set up as in the paper (no GRU gates, no enhanced recurrence).
It stops training its key and value projections after the first compression, so it does less than it should, and its
compression loss sees only one memory. Times are measured in turn in one process, peak RAM in a process for each.
"""

import argparse
import functools
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waveform.system.cpu import set_defaults

SHAPE = {"num_layers": 20, "d_model": 384, "num_heads": 6, "window": 768, "memory": 768, "compressed": 192}
D_FEEDFORWARD = 1536
COMPRESSION_RATE = 4
VOCAB_SIZE = 256
CLIP_NORM = 0.1
WINDOWS_TO_FILL = 3  # the first fills memory, the next compressed memory


def peer(*, bf16: bool = False) -> Callable[[], None]:
    """Return a function that makes one training step of the peer."""
    import torch
    from compressive_transformer_pytorch import CompressiveTransformer
    from torch.nn import functional as F

    torch.manual_seed(0)
    model = CompressiveTransformer(
        num_tokens=VOCAB_SIZE,
        dim=SHAPE["d_model"],
        depth=SHAPE["num_layers"],
        heads=SHAPE["num_heads"],
        seq_len=SHAPE["window"],
        mem_len=SHAPE["memory"],
        cmem_len=SHAPE["compressed"],
        cmem_ratio=COMPRESSION_RATE,
        gru_gated_residual=False,
        enhanced_recurrence=False,
    )
    assert 4 * SHAPE["d_model"] == D_FEEDFORWARD, "the peer's feed-forward is 4 d wide"
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    memories: list[Any] = [None]

    def step() -> None:
        tokens = torch.randint(VOCAB_SIZE, (1, SHAPE["window"] + 1))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits, memories[0], aux = model(tokens[:, :-1], memories=memories[0])
            loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]) + aux.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimiser.step()
        optimiser.zero_grad()

    return step


def ours(*, bf16: bool = False) -> Callable[[], None]:
    """Return a function that makes one training step of this package."""
    import torch

    from waveform.models.registry import build

    torch.manual_seed(0)
    fields = {**SHAPE, "d_feedforward": D_FEEDFORWARD, "compression_rate": COMPRESSION_RATE}
    model: Any = build("compressive_transformer", vocab_size=VOCAB_SIZE, **fields)
    compressor = model.compressor_parameters()
    apart = {id(parameter) for parameter in compressor}
    trunk = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    optimiser = torch.optim.Adam([*trunk, *compressor], lr=1e-4, fused=True)
    states = [model.init_state(1)]

    def step() -> None:
        tokens = torch.randint(VOCAB_SIZE, (1, SHAPE["window"] + 1))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            result = model(tokens[:, :-1], states[0])
            loss = model.head.nll(result.hidden, tokens[:, 1:]).mean()
            loss = loss + sum(aux.mean() for aux in result.aux_losses.values())
        states[0] = result.state
        loss.backward()
        for parameters in (trunk, compressor):
            torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimiser.step()
        optimiser.zero_grad()

    return step


SIDES: dict[str, Callable[[], Callable[[], None]]] = {
    "peer": peer,
    "ours": ours,
    "peer_bf16": functools.partial(peer, bf16=True),
    "ours_bf16": functools.partial(ours, bf16=True),
}


def peak_bytes(side: str, threads: int) -> int:
    """Return the peak RAM, imports included, of a process that trains `side` on a few windows."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_train_and_measure, (side, threads))


def _train_and_measure(side: str, threads: int) -> int:
    set_defaults()
    import torch

    torch.set_num_threads(threads)
    step = SIDES[side]()
    for _ in range(WINDOWS_TO_FILL + 2):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(*, threads: int, windows: int) -> dict[str, Any]:
    """Return seconds per window and peak bytes of each side, and their ratios."""
    memory = {side: peak_bytes(side, threads) for side in SIDES}
    set_defaults()
    import torch

    torch.set_num_threads(threads)
    steps = {side: make() for side, make in SIDES.items()}
    for step in steps.values():
        for _ in range(WINDOWS_TO_FILL):
            step()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(windows):
        for side, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[side].append(time.perf_counter() - began)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        "shape": {**SHAPE, "d_feedforward": D_FEEDFORWARD, "compression_rate": COMPRESSION_RATE},
        "seconds": seconds,
        "median_seconds": medians,
        "times_the_speed": medians["peer"] / medians["ours"],
        "times_the_speed_in_bf16": medians["peer_bf16"] / medians["ours_bf16"],
        "peak_bytes": memory,
        "share_of_the_memory": memory["ours"] / memory["peer"],
        "threads": threads,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=5, help="number of windows timed for each, in turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(threads=args.threads, windows=args.windows), indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
