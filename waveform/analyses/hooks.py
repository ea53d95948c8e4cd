"""Forward hooks that watch the layers of a model as it runs; the forward pass itself is unchanged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.models.compressive_transformer import Layer, LayerOutput

See = Callable[[int, RelativeAttention, AttentionOutput, Slots], None]


@contextmanager
def observe_attention(model: nn.Module, see: See) -> Iterator[None]:
    """While open, `see(layer, attention, output, slots)` is called at every relative attention.

    What a fused attention does not keep is computed from these: `attention.weights(output, slots)` [B, H, T, K], or for
    one block of queries at a time `attention.received_attention(output, slots)` [B, K].
    """
    modules = [module for module in model.modules() if isinstance(module, RelativeAttention)]

    def hook(layer: int, module: RelativeAttention, inputs: Sequence[Any], output: AttentionOutput) -> None:
        see(layer, module, output, inputs[2])

    for module in modules:
        module.observed = True
    try:
        with _hooked(modules, hook):
            yield
    finally:
        for module in modules:
            module.observed = False


def observe_compression_loss(model: nn.Module, see: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
    """While open, `see(layer, loss [B])` is called whenever a layer computes its compression loss.

    Models compute it only if gradients are enabled.
    """

    def hook(layer: int, module: nn.Module, inputs: Sequence[Any], output: LayerOutput) -> None:
        if output.loss is not None:
            see(layer, output.loss.detach())

    return _hooked([module for module in model.modules() if isinstance(module, Layer)], hook)


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """While open, `hook(number, module, inputs, output)` is called after each forward pass of a module."""
    handles = [module.register_forward_hook(partial(hook, i)) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
