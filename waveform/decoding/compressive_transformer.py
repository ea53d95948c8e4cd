"""The Compressive Transformer as it is registered: the model of waveform/models, with the decoders of this package."""

from waveform.decoding.cached import CachedDecoder
from waveform.engine.interface import Decoder
from waveform.engine.known_settings import KnownSettings
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.memory import CompressiveState
from waveform.models.run_layers import AS_PUBLISHED, KNOWN_TO_ALL

_OF_MODEL = ("activation", "head", "tie_embeddings", "project_first", "compression")  # whose own modules are called
_OF_BOTH = {
    "attention": ("fused", "reference"),
    "empty_memory": ("mask", "zeros"),
    "compressed_position": ("time", "contiguous"),
    "prediction": ("none", "linear"),
    "final_norm": (True,),
    **AS_PUBLISHED,
}
CACHED = KnownSettings(
    any_value=(*KNOWN_TO_ALL, "attention_dropout", *_OF_MODEL, "clamp_len", "input_activation"),
    values={**_OF_BOTH, "norm": ("pre", "post"), "same_length": (False, True)},
)
IN_KERNELS = KnownSettings(
    any_value=(*KNOWN_TO_ALL, "attention_dropout"),
    values={
        **_OF_BOTH,
        "norm": ("pre",),
        "compression": ("conv", "mean"),
        "activation": ("gelu",),
        "input_activation": ("none",),
        "same_length": (False,),
        "clamp_len": (0,),
        "head": ("softmax",),
        "tie_embeddings": (False,),
        "project_first": (False,),
    },
)


class CompressiveTransformerWithDecoders(CompressiveTransformer):
    """A CompressiveTransformer that brings the fastest decoder for its settings, device and weights."""

    @property
    def why_no_int8(self) -> str | None:
        """As `OptionalParts.why_no_int8`; compiled steps take the model if it is None."""
        return IN_KERNELS.why_not_in_kernels(self.config, next(self.parameters()))

    def decoder(self, state: CompressiveState, *, int8: bool = False) -> Decoder | None:
        """A decoder with cached keys and values; None if rows are at different steps, or settings are not known."""
        if bool((state.steps != state.steps[0]).any()):
            return None
        if self.why_no_int8 is None:
            from waveform.kernels.decoder import KernelTransformerDecoder  # here, so that only sampling loads numba

            return KernelTransformerDecoder(self, state, int8=int8)
        return CachedDecoder(self, state) if CACHED.supports(self.config) else None
