"""Counts the bytes that one step of a decoder reads: weights, and cached keys, values or inputs, each once."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from waveform.engine.interface import Decoder

_aten = torch.ops.aten


class _ReadCounter(TorchDispatchMode):
    """Counts the bytes that a step's matrix products read of tensors that the step did not make itself."""

    _PRODUCTS = frozenset(
        {_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_, _aten.linear, _aten.mv,
         _aten.addmv, _aten.scaled_dot_product_attention}
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # storages
        self._read: dict[tuple[Any, ...], int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        if func.overloadpacket in self._PRODUCTS:
            for tensor in inputs:
                if tensor.untyped_storage().data_ptr() not in self._made:
                    place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
                    self._read[place] = tensor.numel() * tensor.element_size()
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            # A result that is a view, or was written into, existed before.
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in storages:
                self._made.add(leaf.untyped_storage().data_ptr())
        return result


def bytes_read_by_step(stepper: Decoder, tokens: Tensor) -> int | None:
    """Return the bytes of weights and cache that one step reads, by running one; None if unknown.

    A decoder whose products are not torch's reports its own count.
    """
    if stepper.bytes_per_step is not None:
        return stepper.bytes_per_step
    with _ReadCounter() as counter:
        stepper.step(tokens)
    return counter.num_bytes or None
