"""The simulated GPU refuses what a GPU refuses, allows what it allows, and notices every wait."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.simulated_gpu.device import SimulatedGpu, without_gpu

pytestmark = without_gpu


def on_gpu(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, device="cuda", **options)


REFUSED: dict[str, Callable[[], Any]] = {
    "sum with a tensor on the CPU": lambda: on_gpu(3) + torch.ones(3),
    "concatenation with one": lambda: torch.cat([on_gpu(3), torch.ones(3)]),
    "a sum written to one": lambda: torch.ones(3).add_(on_gpu(3)),
    "a mask on the CPU": lambda: on_gpu(3).masked_fill_(torch.ones(3) > 0, 0.0),
    "a condition on the CPU": lambda: torch.where(torch.ones(3) > 0, on_gpu(3), on_gpu(3)),
    "an index on the device for the CPU": lambda: torch.ones(3)[on_gpu(1, dtype=torch.int64)],
    "a table on the device, tokens on the CPU": lambda: F.embedding(torch.zeros(2, dtype=torch.int64), on_gpu(4, 4)),
    "a stack with a number on the CPU": lambda: torch.stack([on_gpu(3).sum(), torch.ones(3).sum()]),
    "numpy of the device": lambda: on_gpu(3).numpy(),
    "random numbers by the CPU's generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "pinning what is on the device": lambda: on_gpu(3).pin_memory(),
}


@pytest.mark.parametrize("work", REFUSED)
def test_refused(gpu: SimulatedGpu, work: str) -> None:
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        REFUSED[work]()


ALLOWED: dict[str, Callable[[], Any]] = {
    "a number on the CPU": lambda: on_gpu(3) * torch.tensor(2.0) + 1,
    "a condition with numbers": lambda: torch.where(on_gpu(3) > 0, on_gpu(3), 0),
    "an index on the device": lambda: on_gpu(3)[on_gpu(2, dtype=torch.int64)],
    "a pinned copy": lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
}


@pytest.mark.parametrize("work", ALLOWED)
def test_allowed_without_a_wait(gpu: SimulatedGpu, work: str) -> None:
    assert ALLOWED[work]().device == torch.device("cuda:0")
    assert not gpu.waits and gpu.operations and len(gpu.copies) == (work == "a pinned copy")


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: on_gpu(3).sum().item(),
    "bool": lambda: bool(on_gpu(3).sum() > 0),
    "tolist": lambda: on_gpu(1).tolist(),
    "nonzero": lambda: on_gpu(3).nonzero(),
    "unique": lambda: on_gpu(3).unique(),
    "copy to the host": lambda: on_gpu(3).cpu(),
    "copy into the host's tensor": lambda: torch.ones(3).copy_(on_gpu(3)),
    "blocking copy": lambda: torch.ones(3).pin_memory().to("cuda"),
    "copy from memory that is not pinned": lambda: torch.ones(3).to("cuda", non_blocking=True),
    "copy of numbers": lambda: torch.tensor([1.0, 2.0], device="cuda"),
    "assignment from the host": lambda: on_gpu(3).copy_(torch.ones(3)),
    "index on the host": lambda: on_gpu(3)[torch.zeros(1, dtype=torch.int64)],
    "synchronize": lambda: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("work", WAITS)
def test_a_wait_is_noticed(gpu: SimulatedGpu, work: str, mode: Any) -> None:
    with mode():
        WAITS[work]()
    assert len(gpu.waits) == 1


def test_what_the_host_reads_is_made_up_unless_it_came_from_there(gpu: SimulatedGpu) -> None:
    assert on_gpu(2, dtype=torch.bfloat16).cpu().tolist() == [1, 1] and on_gpu(2, dtype=torch.int64).cpu().sum() == 0
    assert on_gpu(1).item() == 1 and bool(on_gpu(1) > 0) is True
    assert torch.tensor([3, 4]).to("cuda").cpu().tolist() == [3, 4]


def test_autocast_and_backward(gpu: SimulatedGpu) -> None:
    x, weight = on_gpu(3, 4, requires_grad=True), on_gpu(5, 4, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = F.linear(x, weight)
        assert y.dtype == torch.bfloat16 and F.layer_norm(y, (5,)).dtype == torch.float32
    y.float().sum().backward()
    assert weight.grad is not None and weight.grad.is_cuda and weight.grad.dtype == torch.float32
    assert not gpu.waits


def test_a_copy_is_independent(gpu: SimulatedGpu) -> None:
    layer = torch.nn.Linear(3, 2).to("cuda")
    other = copy.deepcopy(layer)
    assert other.weight is not layer.weight and other(on_gpu(5, 3)).shape == (5, 2)


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [(torch.bfloat16, False, "flash"), (torch.bfloat16, True, "efficient"), (torch.float64, False, None)],
)
def test_attention_takes_the_kernel_that_cuda_takes(
    gpu: SimulatedGpu, dtype: torch.dtype, mask: bool, kernel: str | None
) -> None:
    q, k, v = (on_gpu(2, 2, n, 16, dtype=dtype, requires_grad=True) for n in (5, 8, 8))
    F.scaled_dot_product_attention(q, k, v, attn_mask=on_gpu(5, 8) > 0 if mask else None).sum().backward()
    assert q.grad is not None and q.grad.dtype == dtype
    assert [call.kernel for call in gpu.attention] == ([kernel] if kernel else [])


def test_a_captured_graph_may_not_wait(gpu: SimulatedGpu) -> None:
    x = on_gpu(3)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
    assert gpu.num_graphs == 1
    for wait in (lambda: x.sum().item(), lambda: torch.ones(3).to("cuda", non_blocking=True)):
        with pytest.raises(AssertionError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait()


def test_tied_parameters_stay_tied(gpu: SimulatedGpu) -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    both = torch.nn.Sequential(first, second).to("cuda")
    assert len(list(both.parameters())) == 3 and all(parameter.is_cuda for parameter in both.parameters())
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in both.parameters())
