"""A GPU that is not there: runs the code's way through `cuda` on a CPU, and sees what a GPU would refuse or wait for.

Within `simulated_gpu()` a tensor on `cuda` is a wrapper that says so to torch, around a tensor on its device `meta`: it
has a shape, a dtype and a device but no values. Autograd, autocast and the rules of shapes and dtypes are torch's own.
Tensors on the CPU are real, so that counters decide as they always do. What the host reads from the device is made up:
true, 1.0 or 0, unless the tensor came from the host as it is.

Not seen: numbers, speed, memory, limits and errors of the kernels themselves, what libraries wait for, several streams,
and anything between several GPUs. (torch's FakeTensorMode could stand in for the wrapper, at several times the time.)
"""

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.nn.attention.bias import CausalBias
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

_ROOT = Path(__file__).parents[2]
_CODE = tuple(str(_ROOT / package) + "/" for package in ("waveform", "baselines", "recipes"))
_CUDA = torch.device("cuda:0")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_SEVERAL = (tuple, list)
aten = torch.ops.aten

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="needs a machine without a GPU: torch's compiled code would use a real one, past what is simulated",
)

# Operations after which the host needs to know something that only the device knows.
_WAITING = {
    aten._local_scalar_dense.default: "a value is read",
    aten.nonzero.default: "nonzero",
    aten._unique2.default: "unique",
    aten.bincount.default: "bincount",
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_COPYING = {aten._to_copy.default, aten.copy_.default}
_TAKING_A_NUMBER = {aten.where.self, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor}
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}  # no kernel
# Attention by kernel: which it is, and which argument is its mask.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default: ("flash", None),
    aten._efficient_attention_forward.default: ("efficient", 3),
    aten._scaled_dot_product_efficient_attention.default: ("efficient", 3),
}


class OnGpu(Tensor):
    """A tensor on `cuda:0` for all that torch can tell."""

    has_fp64 = True  # of all; Apple's GPUs have none
    like: Tensor  # what it is, on torch's device `meta`
    on_host: Tensor | None  # its values, if they were copied from there

    @staticmethod
    def __new__(cls, like: Tensor, *_: Any) -> "OnGpu":
        if isinstance(like, OnGpu):
            return like.detach()
        if not cls.has_fp64 and like.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a MPS Tensor to {like.dtype}")
        self = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=_CUDA
        )
        self.like, self.on_host = like, None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside simulated_gpu()")

    def tolist(self) -> Any:  # which torch refuses of such tensors
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.like.untyped_storage()

    def data_ptr(self) -> int:
        return 0  # copy.deepcopy then makes a clone

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"OnGpu({tuple(self.shape)}, {self.dtype})"


class Attention(NamedTuple):
    """One call of an attention kernel; products and softmax are none."""

    kernel: str  # flash | efficient
    mask: Tensor | None


class SimulatedGpu(TorchDispatchMode):
    """Carries out what happens on `cuda`, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.capturing = False
        self.num_graphs = 0
        self.forget()

    def forget(self) -> None:
        """Begin the records anew."""
        self.waits: list[str] = []  # where the host waits for the device, and why
        self.copies: list[str] = []  # where something is copied to the device without a wait
        self.attention: list[Attention] = []
        self.operations: Counter[str] = Counter()  # all but views and allocations: about one kernel each
        self.num_in_backward = 0  # of these
        self.operators: set[str] = set()  # all of them, by torch's full names

    def wait(self, why: str) -> None:
        assert not self.capturing, f"{_place()}: {why}, while a graph is captured"
        self.waits.append(f"{_place()}: {why}")

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        """torch.cuda.graph."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
        self.num_graphs += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = (kwargs.get("device"), *args)
        if OnGpu not in types and not any(isinstance(x, torch.device) and x.type == "cuda" for x in named):
            return func(*args, **kwargs)  # on the CPU alone
        operation = _about(func)
        if operation.is_composite:  # in inference mode, composite operations arrive whole
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # by torch's C++, as on a GPU
        self._note(operation, args)
        self._check(operation, args, kwargs)
        if operation.is_copy:
            return self._copy(func, args, kwargs)
        if operation.waits:
            self.wait(operation.waits)
        if operation.made_up:
            return operation.made_up(*args, **kwargs)
        if operation.is_view:
            return _view(func, args, kwargs)
        if func is aten.index.Tensor:
            args = (args[0], [part for index in args[1] for part in _places(index)])
        if operation.changes and isinstance(args[0], OnGpu):
            args[0].on_host = None
        return _carry_out(func, args, kwargs, changes=operation.changes)

    def _note(self, operation: "_Operation", args: Any) -> None:
        if operation.attention:
            name, place_of_mask = operation.attention
            self.attention.append(Attention(name, None if place_of_mask is None else args[place_of_mask]))
        self.operators.add(operation.full_name)
        if operation.is_kernel:
            self.operations[operation.name] += 1
            self.num_in_backward += torch._C._current_graph_task_id() != -1

    def _check(self, operation: "_Operation", args: Any, kwargs: Any) -> None:
        """What fake tensors let pass, but a GPU does not, or not without a wait."""
        for tensor in () if operation.is_copy or operation.is_indexing else _tensors(args):
            is_number = not tensor.dim() and operation.takes_numbers and not (operation.changes and tensor is args[0])
            if not isinstance(tensor, OnGpu) and not is_number:
                raise RuntimeError(f"{operation.name}: Expected all tensors to be on one device, found cuda:0 and cpu")
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != "cuda":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if operation.is_indexing:
            if not isinstance(args[0], OnGpu):
                raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
            for index in args[1]:
                if index is not None and not isinstance(index, OnGpu):
                    self.wait("an index is copied to the device from memory that is not pinned")
                elif index is not None and index.dtype == torch.bool:
                    self.wait("a mask is an index")

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Between host and device, or on the device."""
        source = args[1] if func is aten.copy_.default else args[0]
        if func is aten.copy_.default:
            to_device, non_blocking = isinstance(args[0], OnGpu), len(args) > 2 and args[2]
        else:
            device = kwargs.get("device")
            to_device = device.type == "cuda" if device is not None else True
            non_blocking = kwargs.get("non_blocking", False)
        if not to_device:
            self.wait("a copy to the host")
            return _read(source, args[0] if func is aten.copy_.default else None, kwargs.get("dtype"))
        moved = _carry_out(func, args, kwargs, changes=func is aten.copy_.default)
        if not isinstance(source, OnGpu) and source.numel():
            if getattr(source, "pinned", False) and non_blocking:
                self.copies.append(_place())
            else:
                self.wait("a copy to the device, blocking or from memory that is not pinned")
            moved.on_host = source.detach().to(moved.dtype, copy=True)
        return moved


class _Operation:
    """What matters here of one of torch's operations."""

    def __init__(self, func: Any) -> None:
        self.name = func._overloadpacket.__name__
        self.full_name = func.name().removeprefix("aten::")  # as torch's own lists have it, with the overload
        self.is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        self.is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.is_copy = func in _COPYING
        self.is_indexing = func in _INDEXING
        self.is_kernel = not self.is_view and self.name not in _ALLOCATING  # launches about one
        self.changes = func._schema.is_mutable  # its first argument is changed in place
        # Also as tensors without dimensions on the CPU.
        self.takes_numbers = torch.Tag.pointwise in func.tags or func in _TAKING_A_NUMBER
        self.attention = _ATTENTION.get(func)
        self.waits = _WAITING.get(func)  # why the host must wait
        self.made_up = _MADE_UP.get(func)


_about = cache(_Operation)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of an ordinary tensor is one in inference mode too, and the other way round."""
    of = args[0]
    result = func(of.like, *args[1:], **kwargs)
    with torch._C._InferenceMode(of.is_inference()):
        return _mapped(lambda x: of if x is of.like else OnGpu(x), result)


_KNOWN: dict[Any, Any] = {}  # by operation and what matters of its arguments: what it gave, on `meta`


def _carry_out(func: Any, args: Any, kwargs: Any, *, changes: bool) -> Any:
    """As torch does on its device `meta`; what comes out is on the device.

    Much of what torch does there is Python, slower than many a kernel, so what it gave is remembered: for operations
    that give new tensors, or change their first argument and return it.
    """
    tensors = _tensors(args)
    if not tensors:
        return _on_meta(func, args, kwargs)
    key = (func, _key(args), _key(tuple(kwargs.items())))
    if key in _KNOWN:
        return args[0] if changes else _mapped(lambda x: OnGpu(_like(x)) if isinstance(x, Tensor) else x, _KNOWN[key])
    result = _on_meta(func, args, kwargs)
    if changes and result is args[0]:
        _KNOWN[key] = None
    elif not changes and not any(x is y for x in tensors for y in _tensors((result,))):
        _KNOWN[key] = _mapped(lambda x: _like(x) if isinstance(x, Tensor) else x, result)
    return result


def _like(x: Tensor) -> Tensor:
    """On torch's device `meta`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _key(value: Any) -> Any:
    """What decides what an operation gives: of tensors all but their values, of numbers all but fractions'."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype
    if isinstance(value, _SEVERAL):
        return tuple([_key(part) for part in value])
    return type(value), None if isinstance(value, float) else value


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The same, carried out by torch."""
    given: dict[int, OnGpu] = {}

    def inside(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, OnGpu):
            given[id(value.like)] = value
            return value.like
        return _like(value) if isinstance(value, Tensor) else value

    def outside(value: Any) -> Any:
        return given[id(value)] if id(value) in given else OnGpu(value) if isinstance(value, Tensor) else value

    result = func(*_mapped(inside, args), **{name: _mapped(inside, value) for name, value in kwargs.items()})
    return _mapped(outside, result)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of each part of nested tuples and lists, which is what operations take and return."""
    if isinstance(value, _SEVERAL):
        return type(value)([_mapped(function, part) for part in value])
    return function(value)


def _tensors(args: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    parts = [part for value in args for part in (value if isinstance(value, _SEVERAL) else (value,))]
    return [part for part in parts if isinstance(part, Tensor)]


def _read(source: Tensor, into: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    into = torch.empty(source.shape, dtype=dtype or source.dtype) if into is None else into
    return into.fill_(_value(source)) if source.on_host is None else into.copy_(source.on_host)


def _value(tensor: Tensor) -> float | bool | int:
    return 1.0 if tensor.is_floating_point() else tensor.dtype == torch.bool or 0


def _on_device(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return OnGpu(torch.empty(shape, dtype=dtype, device="meta"))


def _places(index: Tensor | None) -> list[Tensor | None]:
    """A mask on the device as the numbers of the places where it is true; half of them, if the host cannot know."""
    if index is None or index.dtype != torch.bool:
        return [index]
    num_places = (index.numel() + 1) // 2 if index.on_host is None else int(index.on_host.sum())
    return [_on_device(num_places) for _ in range(index.dim())]


def _unique(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _on_device(x.numel(), dtype=x.dtype), _on_device(*x.shape), _on_device(x.numel())


_MADE_UP: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _value,
    aten.nonzero.default: lambda x: _on_device((x.numel() + 1) // 2, x.dim()),
    aten.bincount.default: lambda x, weights=None, minlength=0: _on_device(max(minlength, 1)),
    aten._unique2.default: _unique,
    # torch's own for the device `meta` lacks an argument.
    aten._efficient_attention_backward.default: lambda grad, *qkv_and_more, **_: (
        *(OnGpu(torch.empty_like(x.like)) for x in qkv_and_more[:3]),
        None,
    ),
}


def _place() -> str:
    """The line of the code that is being run, without what only passes on."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_CODE) and frame.f_code.co_name != "to_device":
            return f"{path.removeprefix(f'{_ROOT}/')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


# Attention: which kernel CUDA takes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).


def _takes_flash(call: Any, debug: bool = False) -> bool:
    q, k, v = call.query, call.key, call.value
    return (
        call.attn_mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and not (call.is_causal and q.shape[2] != k.shape[2])
    )


def _takes_efficient(call: Any, debug: bool = False) -> bool:
    q, k, v = call.query, call.key, call.value
    multiple = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}.get(q.dtype)
    return bool(multiple) and q.dtype == k.dtype == v.dtype and q.shape[-1] % multiple == v.shape[-1] % multiple == 0


def _params(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, is_causal: bool, gqa: bool) -> SimpleNamespace:
    return SimpleNamespace(query=q, key=k, value=v, attn_mask=mask, is_causal=is_causal)


_by_cpu = F.scaled_dot_product_attention


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **given: Any) -> Tensor:
    if not isinstance(q, OnGpu):
        return _by_cpu(q, k, v, attn_mask, **given)
    if isinstance(attn_mask, CausalBias):
        assert q.dtype == k.dtype == v.dtype, "autocast does not reach attention with a CausalBias"
        return CausalBias._dispatch(q, k, v, attn_mask, **given)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = (x.to(dtype) for x in (q, k, v))
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    assert attn_mask is None or attn_mask.dtype == q.dtype, "the mask's dtype is not the queries'"
    scale, is_causal = given.get("scale"), given.get("is_causal", False)
    call = _params(q, k, v, attn_mask, 0.0, is_causal, False)
    if _takes_flash(call):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    mask = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    if _takes_efficient(call):
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, attn_mask, 0.0, is_causal, None, scale=scale)[0]


# What else torch asks of a machine with a GPU.


def _pin(tensor: Tensor) -> Tensor:
    assert not isinstance(tensor, OnGpu), "only tensors on the CPU can be pinned"
    pinned: Any = tensor.clone()
    pinned.pinned = True
    return pinned


@contextmanager
def _with_a_context() -> Iterator[None]:
    """While open, autograd's engine believes that CUDA has been initialised.

    It asks a C++ object that Python cannot reach: CUDA's hooks. The object gets a copy of its table of virtual
    functions in which `hasPrimaryContext` says yes. Where that one stands is read from torch's own header; the
    destructor, which comes first, takes two places.
    """
    header = Path(torch.__file__).parent / "include/ATen/detail/AcceleratorHooksInterface.h"
    functions = re.findall(r"virtual [^(;]*?(\w+)\(", header.read_text())
    get_hooks = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.POINTER(ctypes.c_void_p)
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: True)
    hooks, size = get_hooks(), ctypes.sizeof(ctypes.c_void_p)
    table = hooks[0]
    assert table is not None
    copy = (ctypes.c_void_p * 100).from_buffer_copy(ctypes.string_at(table - 2 * size, 100 * size))  # 2: its type
    copy[2 + functions.index("hasPrimaryContext") + 1] = ctypes.cast(yes, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(copy) + 2 * size
    try:
        yield
    finally:
        hooks[0] = table


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """While open, torch believes that this machine has one GPU."""
    gpu = SimulatedGpu()
    properties = SimpleNamespace(name="simulated", major=9, minor=0, total_memory=80 << 30)
    does_nothing = ("_lazy_init", "set_device", "set_rng_state", "manual_seed", "manual_seed_all")
    cuda = {
        **dict.fromkeys((*does_nothing, "reset_peak_memory_stats"), lambda *_: None),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *_, **__: True),
        **dict.fromkeys(("device_count", "max_memory_allocated"), lambda *_: 1),
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "synchronize": lambda device=None: gpu.wait("torch.cuda.synchronize"),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),  # nothing here has values to be computed again
        "graph": gpu.capture,
    }
    only_lift_cpu = torch._C._only_lift_cpu_tensors()
    swaps_params = torch.__future__.get_swap_module_params_on_conversion()
    torch._C._ensureCUDADeviceGuardSet()
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in cuda.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(Tensor, "pin_memory", _pin)
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        patch.setattr(bias, "can_use_flash_attention", _takes_flash)
        patch.setattr(bias, "can_use_efficient_attention", _takes_efficient)
        patch.setattr(bias, "SDPAParams", _params)
        for module in (_foreach_utils, nn.utils.clip_grad):
            patch.setattr(module, "_has_foreach_support", lambda tensors, device: True)
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device="cuda")` moves by a visible operation
        # As with a GPU: a parameter that moves remains the same object, so that tied ones remain tied.
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            # In this thread, because torch may have decided already that there is no device to start another for.
            # Without cuDNN's LSTM, which asks for a driver, and there is none; torch's own is taken.
            with _with_a_context(), torch.autograd.set_multithreading_enabled(False), cudnn.flags(enabled=False), gpu:
                yield gpu
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps_params)
            torch._C._set_only_lift_cpu_tensors(only_lift_cpu)
