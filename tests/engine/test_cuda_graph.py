"""The sampling loop by replay: equal to single steps, with nothing that a replay would freeze or wait for."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import laws
from tests.calling import Capsys
from waveform.engine import cuda_graph, interface
from waveform.engine.cuda_graph import CudaGraphLoop, DeviceDecoder
from waveform.engine.drawing import DrawConfig
from waveform.engine.interface import Decoder

every_case = pytest.mark.parametrize("case", laws.params(laws.WITH_DECODER))
B = 2
BEGIN = torch.full((B,), laws.VOCAB_SIZE)


class _Recording(TorchDispatchMode):
    """Keeps every operation with the tensors it had, as a CUDA graph keeps kernels with their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.operations.append((func, args, kwargs or {}, outputs))
        return result


def capture_operations(work: Callable[[], None]) -> Callable[[], None]:
    """Like `capture_cuda_graph`, without CUDA: what Python decides while capturing holds for every replay.

    Recording carries the work out, so the first replay does nothing.
    """
    with _Recording() as recording:
        work()
    fresh = True

    def replay() -> None:
        nonlocal fresh
        if fresh:
            fresh = False
            return
        for func, args, kwargs, outputs in recording.operations:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(outputs, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay


def graph_loop(stepper: DeviceDecoder, config: DrawConfig) -> CudaGraphLoop:
    """As `DeviceDecoder.draw` makes it for a GPU."""
    return CudaGraphLoop(stepper, config, num_rows=B, device=torch.device("cpu"))


def steppers(case: laws.Case, tokens_before: int = 0) -> list[DeviceDecoder]:
    """Two decoders of a case's model that continue from the same state."""
    model = case.build().eval().requires_grad_(False)
    state = laws.fresh_state(model, B)
    if tokens_before:
        state = model(laws.random_tokens(tokens_before, batch_size=B), state).state
    made = [interface.decoder(model, laws.clone(state)) for _ in range(2)]
    assert all(isinstance(stepper, DeviceDecoder) for stepper in made)
    return made


@every_case
def test_replays_equal_single_steps(case: laws.Case, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "GRAPH_STEPS", 2)  # windows are of a few steps
    monkeypatch.setattr(cuda_graph, "capture_cuda_graph", capture_operations)
    config = DrawConfig(temperature=0.9, top_k=20, top_p=0.95) if case is laws.CASES[0] else DrawConfig()
    with torch.inference_mode():
        for tokens_before in (0, 4 * case.window + 1):
            first, second = steppers(case, tokens_before)
            captured = graph_loop(second, config)
            tokens, generator = BEGIN, torch.Generator().manual_seed(0)
            for length in (7 * case.window + 3, 1, 2 * cuda_graph.GRAPH_STEPS):  # blocks begin anywhere in a window
                uniform = torch.rand(length, B, generator=generator)
                drawn = captured.draw(tokens, uniform)
                assert torch.equal(drawn, Decoder.draw(first, tokens, uniform, config))
                tokens = drawn[-1]


def test_graphs_have_several_steps_within_a_window(monkeypatch: MonkeyPatch) -> None:
    """With a window longer than a graph, most tokens come from graphs of many steps."""
    monkeypatch.setattr(cuda_graph, "GRAPH_STEPS", 2)
    case = laws.Case("compressive_transformer", "conv")
    first, second = steppers(case)
    replays: list[Mock] = []

    def counting(work: Callable[[], None]) -> Callable[[], None]:
        replays.append(Mock(side_effect=work))
        return replays[-1]

    monkeypatch.setattr(cuda_graph, "capture_cuda_graph", counting)
    uniform = torch.rand(200, B)
    drawn = graph_loop(second, DrawConfig()).draw(BEGIN, uniform)
    assert torch.equal(drawn, Decoder.draw(first, BEGIN, uniform, DrawConfig()))
    per_window = case.window // 2
    assert len(replays) == 2
    assert max(replay.call_count for replay in replays) >= (200 // case.window - 1) * per_window


def test_if_capture_fails_single_steps_go_on_with_a_warning(capsys: Capsys, monkeypatch: MonkeyPatch) -> None:
    first, second = steppers(laws.CASES[0])

    refusal = RuntimeError("operation not permitted when stream is capturing\nmore")
    monkeypatch.setattr(cuda_graph, "capture_cuda_graph", Mock(side_effect=refusal))
    uniform = torch.rand(40, B)
    drawn = graph_loop(second, DrawConfig()).draw(BEGIN, uniform)
    assert torch.equal(drawn, Decoder.draw(first, BEGIN, uniform, DrawConfig()))
    assert "no CUDA graph could be captured (operation not permitted when stream is" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_case
def test_cuda_graphs_equal_stepwise(case: laws.Case) -> None:
    model = case.build().to("cuda").eval().requires_grad_(False)
    with torch.inference_mode():
        state = model.init_state(B, device="cuda", dtype=torch.float64)
        tokens = torch.full((B,), laws.VOCAB_SIZE, device="cuda")
        uniform = torch.rand(6 * case.window + 40, B, device="cuda")
        captured, stepwise = (interface.decoder(model, laws.clone(state)) for _ in range(2))
        drawn = captured.draw(tokens, uniform, DrawConfig())
        assert isinstance(captured, DeviceDecoder) and captured._loop is not None
        assert torch.equal(drawn, Decoder.draw(stepwise, tokens, uniform, DrawConfig()))
