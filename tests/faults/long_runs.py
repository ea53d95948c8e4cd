"""RAM during a long evaluation and long sampling: it stays as it is after a warm-up."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from tests.calling import SMALL
from tests.faults import forkserver
from tests.faults.fault import fault
from waveform.audio.audio_format import AudioFormat
from waveform.audio.wav import wav_writer
from waveform.engine.evaluator import EvaluateConfig, evaluate
from waveform.engine.sampler import SamplingConfig, sample
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_set import TokenSet
from waveform.models.registry import build
from waveform.system.machine import resident_bytes

_WAYS = [(name, way) for way in ("utterance", "chunk", "sample", "int8", "eager") for name in SMALL]


def _long(folder: Path, name: str, way: str, num_tokens: int) -> None:
    """Print the resident RAM after a tenth of the tokens, and the most after that."""
    begin = most = done = 0

    def count(num: int) -> None:
        nonlocal begin, most, done
        done += num
        if done >= num_tokens // 10:
            now = resident_bytes()
            begin, most = begin or now, max(most, now)

    sizes = {field: int(size) for field, size in re.findall(r"(\w+)=(\d+)", SMALL[name])}
    model = build(name, vocab_size=256, **sizes)
    model.eval().requires_grad_(False)
    (_evaluate if way in ("utterance", "chunk") else _sample)(folder, model, way, num_tokens, count)
    assert done == num_tokens
    print(json.dumps({"begin": begin, "most": most}))


def _evaluate(folder: Path, model: Any, way: str, num_tokens: int, count: Callable[[int], None]) -> None:
    path, rng = folder / "long.shard", np.random.default_rng(0)
    with ShardWriter(path, vocab_size=256) as writer:
        sizes = (min(1 << 16, num_tokens - start) for start in range(0, num_tokens, 1 << 16))
        writer.write("long", (rng.integers(0, 256, size, dtype=np.uint8) for size in sizes))
    config = EvaluateConfig(window=512, protocol=way, chunk=1024)
    evaluate(model, TokenSet([Shard(path)], vocab_size=256), config, progress=SimpleNamespace(update=count))


def _sample(folder: Path, model: Any, way: str, num_tokens: int, count: Callable[[int], None]) -> None:
    if way == "eager":  # as for a model without its own decoder
        model.decoder = lambda state, int8=False: None
    with wav_writer(folder / "long.wav", sample_rate_hz=24_000) as append:

        def write(block: Tensor) -> None:
            append(AudioFormat().decode(block[0].numpy()))
            count(block.shape[1])

        config = SamplingConfig(int8=way == "int8")
        sample(model, vocab_size=256, num_streams=1, num_steps=num_tokens, on_block=write, config=config)


@fault("long evaluation and sampling", short=7, long=15)
def _flat(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: after a tenth of the samples, RAM stays flat within 1%."""
    num_tokens = 10_000_000 if cases >= len(_WAYS) else 20_000
    growth = {}
    for case in range(cases):
        name, way = _WAYS[4 * case % len(_WAYS)]  # so that even a few cases have every way
        here = folder / f"{name}-{way}"
        here.mkdir()
        # The slowest way of all samples some 2,000 a second.
        num = num_tokens if way != "eager" else min(num_tokens, 500_000) // 5
        printed = forkserver.run(_long, here, name, way, num, output=here / "printed.txt", timeout_s=7200)
        figures = json.loads(printed.splitlines()[-1])
        growth[f"{name} {way}, {num:,} tokens"] = round(100 * (figures["most"] / figures["begin"] - 1), 3)
        assert figures["most"] < 1.01 * figures["begin"], f"{name} {way}: {figures}"
    return {"growth_percent": growth}
