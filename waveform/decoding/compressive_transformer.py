"""The Compressive Transformer as it is registered: the model of waveform/models, with the decoders of this package."""

from waveform.decoding.cached import CachedDecoder
from waveform.engine.interface import Decoder
from waveform.engine.known_settings import KnownSettings
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.run_layers import AS_PUBLISHED, KNOWN_TO_ALL
from waveform.models.token_model import TokenState

_OF_BOTH = {
    **{"attention": ("reference",), "empty_memory": ("zeros",), "compressed_position": ("contiguous",)},
    **{"prediction": ("linear",), **dict.fromkeys(("final_norm", *AS_PUBLISHED), ())},
}
_OF_MODEL = ("activation", "head", "tie_embeddings", "project_first", "compression")  # whose own modules are called
CACHED = KnownSettings(
    (*KNOWN_TO_ALL, "attention_dropout", *_OF_MODEL, "clamp_len", "input_activation"),
    {**_OF_BOTH, "norm": ("post",), "same_length": (True,)},
)
_AT_DEFAULT = ("norm", "activation", "input_activation", "same_length", "clamp_len", "head", "tie_embeddings")
IN_KERNELS = KnownSettings(
    (*KNOWN_TO_ALL, "attention_dropout"),
    {**_OF_BOTH, "compression": ("mean",), **dict.fromkeys((*_AT_DEFAULT, "project_first"), ())},
)


class CompressiveTransformerWithDecoders(CompressiveTransformer):
    """A CompressiveTransformer that brings the fastest decoder for its settings, device and weights."""

    @property
    def why_no_int8(self) -> str | None:
        """As `OptionalParts.why_no_int8`; compiled steps take the model if it is None."""
        return IN_KERNELS.why_not_in_kernels(self.config, next(self.parameters()))

    def decoder(self, state: TokenState, *, int8: bool = False) -> Decoder | None:
        """A decoder with cached keys and values; None if rows are at different steps, or settings are not known."""
        steps = state.trunk.steps
        if bool((steps != steps[0]).any()):
            return None
        if self.why_no_int8 is None:
            from waveform.kernels.decoder import KernelTransformerDecoder  # here, so that only sampling loads numba

            return KernelTransformerDecoder(self, state, int8=int8)
        return CachedDecoder(self, state) if CACHED.supports(self.config) else None
