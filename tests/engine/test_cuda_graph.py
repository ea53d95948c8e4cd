"""Drawing by replay: equal to drawing step by step, and nothing that a replay would freeze or wait for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import laws
from waveform.engine import drawing, interface
from waveform.engine.drawing import CapturedDrawing, SamplingConfig, StepwiseDrawing
from waveform.engine.interface import DeviceDecoder

every_case = pytest.mark.parametrize("case", laws.CASES, ids=str)
TRUNCATED = SamplingConfig(temperature=0.9, top_k=20, top_p=0.95)
B = 2


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
    """As `capture_cuda_graph`, without CUDA: what Python decided while capturing is decided for every replay.

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


def steppers(case: laws.Case, model: Any, tokens_before: int) -> list[DeviceDecoder]:
    """Two decoders that continue from the same state."""
    state = model.init_state(B, device="cpu", dtype=torch.float64)
    if tokens_before:
        state = model(laws.random_tokens(tokens_before, batch_size=B), state).state
    made = [interface.decoder(model, laws.clone(state)) for _ in range(2)]
    assert all(isinstance(stepper, DeviceDecoder) for stepper in made)
    return made


@every_case
def test_replayed_drawing_equals_stepwise(case: laws.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "GRAPH_STEPS", 2)  # windows are of a few steps
    model = case.build().eval().requires_grad_(False)
    config = TRUNCATED if case is laws.CASES[0] else SamplingConfig()
    with torch.inference_mode():
        for tokens_before in (0, 4 * case.window + 1):
            first, second = steppers(case, model, tokens_before)
            tokens = torch.full((B,), laws.VOCAB_SIZE)
            stepwise = StepwiseDrawing(first, tokens, config)
            captured = CapturedDrawing(second, tokens, config, capture=capture_operations)
            generator = torch.Generator().manual_seed(0)
            for length in (7 * case.window + 3, 1, 2 * drawing.GRAPH_STEPS):  # blocks that begin anywhere in a window
                uniform = torch.rand(length, B, generator=generator)
                assert torch.equal(captured.draw(uniform), stepwise.draw(uniform))


def test_graphs_are_of_several_steps_where_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window longer than a graph, most tokens come from graphs of many steps."""
    monkeypatch.setattr(drawing, "GRAPH_STEPS", 2)
    case = next(case for case in laws.CASES if case.model == "compressive_transformer")
    first, second = steppers(case, case.build().eval().requires_grad_(False), 0)
    sizes: list[int] = []

    def counting(work: Callable[[], None]) -> Callable[[], None]:
        place = len(sizes)
        sizes.append(0)

        def replay() -> None:
            sizes[place] += 1
            work()

        return replay

    tokens = torch.full((B,), laws.VOCAB_SIZE)
    uniform = torch.rand(200, B)
    drawn = CapturedDrawing(second, tokens, SamplingConfig(), capture=counting).draw(uniform)
    assert torch.equal(drawn, StepwiseDrawing(first, tokens, SamplingConfig()).draw(uniform))
    per_window = case.window // 2
    assert len(sizes) == 2 and max(sizes) >= (200 // case.window - 1) * per_window


@every_case
def test_a_graph_has_nothing_to_wait_for(case: laws.Case) -> None:
    """On a device without values, steps and draws still run: nothing there is read by the host."""
    device = torch.device("meta")
    model = case.build().to(device).eval().requires_grad_(False)
    with torch.inference_mode():
        stepper = interface.decoder(model, model.init_state(B, device=device, dtype=torch.float64))
        assert isinstance(stepper, DeviceDecoder)
        tokens = torch.zeros(B, dtype=torch.int64, device=device)
        for config in (SamplingConfig(), TRUNCATED, SamplingConfig(temperature=0)):
            CapturedDrawing(stepper, tokens, config, capture=capture_operations).device_steps(2)


def test_without_a_graph_steps_go_one_by_one_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    case = laws.CASES[0]
    first, second = steppers(case, case.build().eval().requires_grad_(False), 0)

    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    tokens, uniform = torch.full((B,), laws.VOCAB_SIZE), torch.rand(40, B)
    drawn = CapturedDrawing(second, tokens, SamplingConfig(), capture=refuse).draw(uniform)
    assert torch.equal(drawn, StepwiseDrawing(first, tokens, SamplingConfig()).draw(uniform))
    assert (
        "sampling goes step by step, slower; no CUDA graph could be captured: operation not" in capsys.readouterr().err
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_case
def test_cuda_graphs_equal_stepwise(case: laws.Case) -> None:
    model = case.build().to("cuda").eval().requires_grad_(False)
    with torch.inference_mode():
        state = model.init_state(B, device="cuda", dtype=torch.float64)
        tokens = torch.full((B,), laws.VOCAB_SIZE, device="cuda")
        uniform = torch.rand(6 * case.window + 40, B, device="cuda")
        stepwise = StepwiseDrawing(interface.decoder(model, laws.clone(state)), tokens, SamplingConfig())
        source = drawing.drawing(interface.decoder(model, laws.clone(state)), tokens, SamplingConfig())
        assert isinstance(source, CapturedDrawing)
        assert torch.equal(source.draw(uniform), stepwise.draw(uniform))
