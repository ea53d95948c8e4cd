"""Draws within compiled steps: the tokens that the definition in torch draws, whatever the rule and the logits."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import laws
from waveform.engine import interface
from waveform.engine.drawing import DrawConfig, choose
from waveform.engine.interface import Decoder
from waveform.kernels.draw import Draws, KernelDecoder, draw_from

B = 300
TEMPERATURES, TOP_K = (0, 1e-300, 0.01, 0.9, 1.0, 3.0, 1e30), (None, 1, 7, 200)
TOP_P = (None, 1e-9, 0.5, 0.95, 1 - 2**-53, 1.0)
RULES = [
    *(DrawConfig(temperature=t, top_k=k, top_p=p) for t, k, p in itertools.product(TEMPERATURES, TOP_K, TOP_P)),
    *(DrawConfig(classes=(3, 8)), DrawConfig(classes=(1, 1), temperature=0), DrawConfig(classes=(4, 10), top_k=3)),
]


def drawn_by_kernel(logits: Tensor, uniform: Tensor, config: DrawConfig) -> Tensor:
    """As `choose`."""
    stepper: Any = SimpleNamespace(step=lambda tokens: logits)
    return draw_from(stepper, torch.zeros(len(logits), dtype=torch.int64), uniform[None], config)[0]


LOGITS: dict[str, Callable[[Tensor], Tensor]] = {  # of random ones [B, num_classes] in fp32
    "usual": lambda logits: logits,
    "ties": lambda logits: logits.round(),
    "equal": lambda logits: logits[:, :1].expand_as(logits),
    "zeros of both signs": lambda logits: torch.where(logits > 0, 0.0, -0.0),
    "far apart": lambda logits: logits * 10 ** torch.linspace(-30, 37, B)[:, None],
    "impossible classes": lambda logits: torch.where(torch.arange(logits.shape[1]) % 3 == 1, logits, -torch.inf),
}


@pytest.mark.parametrize("num_classes", [11, 256])
@pytest.mark.parametrize("kind", LOGITS)
def test_kernels_draw_what_the_definition_draws(kind: str, num_classes: int) -> None:
    logits = LOGITS[kind](torch.randn(B, num_classes, generator=torch.Generator().manual_seed(num_classes)) * 3)
    generator = torch.Generator().manual_seed(1)
    for config in RULES:
        uniform = torch.rand(B, generator=generator)
        uniform[:4] = torch.tensor([0, 2**-24, 0.5, 1 - 2**-24])
        expected = choose(logits, uniform, config=config)
        assert torch.equal(drawn_by_kernel(logits, uniform, config), expected), config
        if kind == "impossible classes":
            assert (expected % 3 == 1).all()


def test_many_classes() -> None:
    logits = torch.randn(40, 32000, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(1))
    for rule in ({}, {"temperature": 0}, {"top_k": 5000}, {"top_p": 0.99}, {"top_k": 1}):
        config = DrawConfig(**rule)
        assert torch.equal(drawn_by_kernel(logits, uniform, config), choose(logits, uniform, config=config))


class _CountingUp(KernelDecoder):
    """Draws what follows its inputs, up to three tokens before the host has work."""

    steps_to_host = 3

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._num_threads, self._num_steps = 1, 0

    def _run(self, tokens: np.ndarray, draws: Draws) -> None:
        self.lengths.append(len(draws.drawn))
        self.steps_to_host = self.steps_to_host - len(draws.drawn) or 3
        draws.drawn[:] = (tokens + np.arange(1, len(draws.drawn) + 1)[:, None]) % 5
        tokens[:] = draws.drawn[-1]


def test_a_decoder_that_draws_is_called_once_for_many_tokens() -> None:
    stepper, tokens, config = _CountingUp(), torch.tensor([0, 3]), DrawConfig()
    assert torch.equal(stepper.draw(tokens, torch.rand(5, 2), config), (tokens + torch.arange(1, 6)[:, None]) % 5)
    assert stepper.draw(tokens, torch.rand(2, 2), config).tolist() == [[1, 4], [2, 0]]
    assert stepper.lengths == [3, 2, 1, 1]
    assert tokens.tolist() == [0, 3]


def assert_draws_equal_single_steps(case: laws.Case, lengths: list[int], *, int8: bool = False) -> None:
    """Of a decoder that draws, and of its twin that `Decoder.draw` calls once per token."""
    model = case.build().float()
    for config in (DrawConfig(), DrawConfig(temperature=0.8, top_k=8, top_p=0.9)):
        drawing, stepwise = (interface.decoder(model, laws.fresh_state(model, 2), int8=int8) for _ in range(2))
        assert type(drawing).draw is not Decoder.draw
        tokens, generator = torch.full((2,), laws.VOCAB_SIZE), torch.Generator().manual_seed(0)
        for length in lengths:
            uniform = torch.rand(length, 2, generator=generator)
            drawn = drawing.draw(tokens, uniform, config)
            assert torch.equal(drawn, Decoder.draw(stepwise, tokens, uniform, config))
            tokens = drawn[-1]


@pytest.mark.parametrize("variant", ["adaptive-tied", "max-tied"])
def test_decoders_that_step_with_torch_draw_with_the_kernel(variant: str) -> None:
    assert_draws_equal_single_steps(laws.Case("compressive_transformer", variant), [70])


@pytest.mark.parametrize("case", laws.params(laws.IN_KERNELS))
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_decoders_that_draw_equal_single_steps(case: laws.Case, int8: bool) -> None:
    """Across windows, and wherever a block begins."""
    assert_draws_equal_single_steps(case, [7 * case.window + 3, 1, 130, 64], int8=int8)
