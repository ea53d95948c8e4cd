"""Fully sharded data parallelism (FSDP2, after ZeRO: Rajbhandari et al. 2020), for models that do not fit one device.

Each rank keeps its part of every weight, gradient and optimiser state; the weights of one unit (a layer) are gathered
just before it runs, forward and backward, and dropped afterwards. Memories stay on the rank that owns their rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from waveform.ranks.distributed import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard(root: nn.Module, units: Sequence[nn.Module], *, world: World) -> "GradientWatch":
    """Shard the parameters in `root` over all ranks in place; each of `units` is gathered by itself, the rest together.

    Call it before the optimiser is made, with the same weights on every rank, and call `drop_missing` of the result
    before each step of the optimiser.
    """
    from torch.distributed.device_mesh import DeviceMesh  # seconds to import, needed only here
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = DeviceMesh.from_group(world.group, world.device.type)
    for module in [*units, root]:
        fully_shard(module, mesh=mesh)
    for unit in _sharded(root):
        assert isinstance(unit, FSDPModule)
        # The loss is already divided by the tokens of all ranks, so gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # Rows are at different positions in their utterances: one rank may compress when another does not.
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    return GradientWatch(root, units)


def _sharded(root: nn.Module) -> "list[FSDPModule]":
    """The sharded modules in `root`; it is the first of them if it is sharded itself."""
    return [cast("FSDPModule", module) for module in root.modules() if hasattr(module, "unshard")]


class GradientWatch:
    """Knows which sharded parameters got a gradient. FSDP gives the others zeros; Adam would move them by momentum."""

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        self._parameters = dict(root.named_parameters())
        self._received: set[str] = set()
        self._watched: dict[str, Tensor] = {}
        names = {module: name for name, module in root.named_modules()}
        for module in [*units, root]:
            module.register_forward_pre_hook(partial(self._watch, names[module]))

    def _watch(self, prefix: str, module: nn.Module, _: Any) -> None:
        """Within a unit's forward its parameters are unsharded; the backward pass gives gradients to these."""
        for name, parameter in module.named_parameters(prefix=prefix):
            if not hasattr(parameter, "device_mesh") and self._watched.get(name) is not parameter:
                self._watched[name] = parameter
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._received.add(name))

    def drop_missing(self, *, world: World) -> None:
        """Remove the gradient of each parameter that got none on any rank since the last call."""
        received = world.largest(*(name in self._received for name in self._parameters))
        for parameter, has in zip(self._parameters.values(), received, strict=True):
            if not has:
                parameter.grad = None
        self._received.clear()


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Keep all weights unsharded on every rank within the block, for work that ranks do not do in step."""
    units = _sharded(root)
    if units:
        # FSDP takes whatever runs forward first for its root, and before the first step that would be a layer.
        units[0]._get_fsdp_state()._lazy_init()  # torch has no public way to say which it is
    for unit in units:
        unit.unshard()
        if unit is not root:  # the root's own forward is not called within
            unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            if unit is not root:
                unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered (every rank must call this), or the tensor itself."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """An unsharded tensor, the same on every rank, cut as `parameter` is (if it is sharded), without communication."""
    if not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(parameter.device), mesh, placements, src_data_rank=None)
