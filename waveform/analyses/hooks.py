"""Forward hooks that watch the layers of a model as it runs; the forward pass itself is unchanged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.models.compressive_transformer import Layer, LayerOutput


def attention_modules(model: Any) -> list[RelativeAttention]:
    """Return the relative attention of each layer, from first to last; an empty list for a model without it."""
    return [module for module in model.modules() if isinstance(module, RelativeAttention)]


See = Callable[[int, Tensor, Slots], None]  # layer, what was seen, the slots of the call
SeeCall = Callable[[int, RelativeAttention, AttentionOutput, Slots], None]  # layer, and all of one call


def observe_attention(model: Any, see: See) -> AbstractContextManager[None]:
    """While open, `see(layer, received, slots)` is called at every attention.

    received [B, K]: the weight that each slot received, summed over the call's queries and averaged over heads. If the
    attention is fused, weights are computed for one block of queries at a time, and none are kept.
    """
    return observe_calls(
        model, lambda i, attention, output, slots: see(i, attention.received_attention(output, slots), slots)
    )


def observe_heads(model: Any, see: See) -> AbstractContextManager[None]:
    """While open, `see(layer, weights, slots)` is called at every attention, with the weights [B, H, T, K]."""
    return observe_calls(model, lambda i, attention, output, slots: see(i, attention.weights(output, slots), slots))


@contextmanager
def observe_calls(model: Any, see: SeeCall) -> Iterator[None]:
    """While open, `see(layer, attention, output, slots)` is called at every attention."""

    def observer(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Sequence[Any], output: AttentionOutput) -> None:
            assert isinstance(module, RelativeAttention)
            slots: Slots = inputs[2]
            see(layer, module, output, slots)

        return hook

    modules = attention_modules(model)
    hooks = [module.register_forward_hook(observer(i)) for i, module in enumerate(modules)]
    for module in modules:
        module.observed = True
    try:
        yield
    finally:
        for hook, module in zip(hooks, modules, strict=True):
            hook.remove()
            module.observed = False


@contextmanager
def observe_compression_loss(model: Any, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While open, `see(layer, loss [B])` is called whenever a layer computes its compression loss.

    Models compute it only if gradients are enabled.
    """

    def observer(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Sequence[Any], output: LayerOutput) -> None:
            if output.loss is not None:
                see(layer, output.loss.detach())

        return hook

    layers = [module for module in model.modules() if isinstance(module, Layer)]
    hooks = [layer.register_forward_hook(observer(i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
