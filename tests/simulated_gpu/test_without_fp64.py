"""A device without fp64, as Apple's GPUs are (`mps`): what needs fp64 is computed on the CPU.

torch has no `mps` here, so the simulated GPU stands in, and refuses every tensor in fp64.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import laws
from tests.engine.conftest import write_tokens
from tests.engine.training import small_learner
from tests.simulated_gpu.device import SimulatedGpu, without_gpu
from waveform.engine.interface import for_drawing
from waveform.ranks.distributed import World
from waveform.system.signals import StopRequest

pytestmark = [without_gpu, pytest.mark.usefixtures("no_fp64")]
_CUDAS_OWN = ("_scaled_dot_product_", "_efficient_attention_", "_thnn_fused_lstm_cell")  # torch takes others elsewhere


@cache
def missing_for_mps() -> set[str]:
    """The operators that torch's own list has neither for `mps` nor, made of others, for all devices."""
    path = files("torchgen") / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries: dict[str, Any] = {e["func"].partition("(")[0]: e for e in yaml.load(path.read_text(), yaml.CSafeLoader)}

    def places(entry: dict[str, Any]) -> set[str]:
        own = {place for several in entry.get("dispatch") or ["Composite"] for place in several.split(", ")}
        return own | (places(entries[entry["structured_delegate"]]) if "structured_delegate" in entry else set())

    def has(entry: dict[str, Any]) -> bool:
        return any(place == "MPS" or place.startswith("Composite") for place in places(entry))

    return {name for name, entry in entries.items() if not has(entry)}


@pytest.mark.parametrize("case", laws.params())
def test_it_trains_and_evaluates(case: laws.Case, gpu: SimulatedGpu, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.shard", [33, 21, 28, 9, 17])
    unroll = 2 if case.fields.get("compression_loss") == "none" else 1
    options = {"device": "cuda", "chunk": 2 * case.fields.get("window", 4), "unroll": unroll}
    world = World(device=torch.device("cuda:0"))
    learner = small_learner(case.model, tokens, world=world, fields=case.fields, **options)
    for _ in range(2):
        learner.update()
    assert learner.record()[0]["nll_nats"] > 0
    with learner.evaluated(tokens, StopRequest()) as evaluation:
        assert evaluation.counts.sum() == tokens.num_tokens
    missing = gpu.operators & missing_for_mps()
    assert "mm" in gpu.operators and all(name.startswith(_CUDAS_OWN) for name in missing), missing
    assert {parameter.device.type for parameter in for_drawing(learner.model).parameters()} == {"cpu"}
