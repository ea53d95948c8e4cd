"""The Compressive Transformer as it is registered: the model of waveform/models, with the decoders of this package."""

import torch
from torch import nn

from waveform.decoding.cached import CachedDecoder
from waveform.engine.interface import Decoder
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.heads import SoftmaxHead
from waveform.models.memory import CompressiveState
from waveform.system.errors import UserError


class CompressiveTransformerWithDecoders(CompressiveTransformer):
    """A CompressiveTransformer that brings the fastest decoder for its device and weights."""

    has_int8_decoder = True

    def decoder(self, state: CompressiveState, *, int8: bool = False) -> Decoder | None:
        """A decoder with cached keys and values; None if rows are at different steps.

        int8: weights and cache in 8 bits, for fp32 models on a CPU with a plain softmax, which compiled kernels know.
        Raises UserError for others.
        """
        weight = next(self.parameters())
        in_step = not bool((state.steps != state.steps[0]).any())
        plain = isinstance(self.embedding, nn.Embedding) and isinstance(self.head, SoftmaxHead)
        plain = False
        if in_step and plain and weight.device.type == "cpu" and weight.dtype == torch.float32:
            from waveform.decoding.compiled import CompiledDecoder  # here, so that only sampling loads numba

            return CompiledDecoder(self, state, int8=int8)
        if int8:
            raise UserError(
                "int8 sampling is for fp32 models on a CPU without adaptive or tied embeddings, model.activation=relu, "
                "model.same_length or model.clamp_len; sample without it"
            )
        return CachedDecoder(self, state) if in_step else None
