"""Activation checkpointing: the same losses and gradients, with less kept for the backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import laws
from waveform.engine.interface import detach
from waveform.models.registry import build

CASES = [case for case in laws.CASES if case.model not in ("wavenet", "lstm")]


def windows(
    name: str, fields: dict[str, Any], *, checkpointed: bool, length: int, unroll: int = 1, rows: int = 2
) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Losses and gradients of six windows, and the most that a backward pass kept, in elements."""
    torch.manual_seed(0)
    model = build(name, vocab_size=laws.VOCAB_SIZE, **fields).double()
    model.checkpoint_activations = checkpointed
    tokens = torch.randint(laws.VOCAB_SIZE, (rows, 6 * length + 1))
    state = model.init_state(rows, device="cpu", dtype=torch.float64)
    losses, kept = [], 0
    for begin in range(0, 6, unroll):
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 8
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = torch.zeros((), dtype=torch.float64)
            for i in range(begin, begin + unroll):
                model.carry_gradient = i + 1 < begin + unroll
                step = model.forward(tokens[:, i * length : (i + 1) * length], state)
                nll = model.head.nll(step.hidden, tokens[:, i * length + 1 : (i + 1) * length + 1])
                loss = loss + nll.mean() + sum(aux.sum() for aux in step.aux_losses.values())
                state = step.state
        kept = max(kept, sum(saved.values()))
        loss.backward()
        state = detach(state)
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("case", laws.params(CASES))
def test_losses_and_gradients_are_the_same(case: laws.Case, unroll: int) -> None:
    # So that random numbers must come again, of what drops attention weights too
    dropped = "attention_dropout" if case.fields.get("attention") == "reference" else "dropout"
    fields, length = {**case.fields, dropped: 0.1}, case.window + (1 if "ragged" in case.variant else 0)
    again, kept = (windows(case.model, fields, checkpointed=x, unroll=unroll, length=length) for x in (True, False))
    laws.assert_same(again[:2], kept[:2])


def test_less_is_kept() -> None:
    fields = {**laws.CONFIGS["compressive_transformer"]["conv"], "num_layers": 6, "window": 16, "memory": 16}
    again, kept = (windows("compressive_transformer", fields, checkpointed=x, length=16)[2] for x in (True, False))
    assert again < kept / 4
