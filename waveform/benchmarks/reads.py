"""Counts the bytes that one step of a decoder reads: weights, and cached keys, values or inputs, each once."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from waveform.engine.interface import Decoder, MeteredDecoder

_PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "linear", "mv", "addmv",
                 "scaled_dot_product_attention")
}  # fmt: skip


class _ReadCounter(TorchDispatchMode):
    """Counts the bytes that a step's matrix products read of tensors that the step did not make itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[tuple[Any, ...], int] = {}  # of each place that was read
        self._made: set[int] = set()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _tensors((args, kwargs))
        if func.overloadpacket in _PRODUCTS:
            old = [tensor for tensor in inputs if _storage(tensor) not in self._made]
            self.num_bytes |= {(t.data_ptr(), tuple(t.shape), t.stride()): t.nbytes for t in old}
        result = func(*args, **(kwargs or {}))
        # A result that is a view, or was written into, existed before.
        self._made |= set(map(_storage, _tensors(result))) - set(map(_storage, inputs))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bytes_read_by_step(stepper: Decoder, tokens: Tensor) -> int | None:
    """Return the bytes of weights and cache that one step reads, by running one; None if unknown.

    A `MeteredDecoder`, whose products are not torch's, reports its own count.
    """
    if isinstance(stepper, MeteredDecoder):
        return stepper.bytes_per_step
    with _ReadCounter() as counter:
        stepper.step(tokens)
    return sum(counter.num_bytes.values()) or None
