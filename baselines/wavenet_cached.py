"""Steps a WaveNet one token at a time with torch (fp64, GPUs); and WaveNet as it is registered, with its decoders.

Shape letters: as in wavenet.py.
"""

from typing import cast

import torch
from torch import Tensor, nn

from baselines.wavenet import WaveNet
from waveform.decoding.stepped import SteppedDecoder
from waveform.engine.interface import Decoder
from waveform.engine.known_settings import KnownSettings
from waveform.models.token_model import TokenState

_SIZES = ("vocab_size", "num_stacks", "layers_per_stack", "kernel_size", "num_labels", "classes", "prediction_widening")
_WIDTHS = ("residual_channels", "gate_channels", "skip_channels", "end_channels")
KNOWN = KnownSettings((*_SIZES, *_WIDTHS), {"prediction": ("linear",)})  # to both decoders


class WaveNetWithDecoders(WaveNet):
    """A WaveNet that brings the fastest decoder for its settings, device and weights."""

    @property
    def why_no_int8(self) -> str | None:
        """As `OptionalParts.why_no_int8`; compiled steps take the model if it is None."""
        return KNOWN.why_not_in_kernels(self.config, self.embedding.weight)

    def decoder(self, state: TokenState, *, int8: bool = False) -> Decoder | None:
        """A decoder that continues from `state` with the weights as they are now; None if settings are not known."""
        if self.why_no_int8 is None:
            from baselines.wavenet_kernels import KernelWaveNetDecoder  # here, so that only sampling loads numba

            return KernelWaveNetDecoder(self, state, int8=int8)
        fitted_together = not state.predictors or len(set(state.predictors[0].steps.tolist())) == 1
        return WaveNetDecoder(self, state) if KNOWN.supports(self.config) and fitted_together else None


class WaveNetDecoder(SteppedDecoder):
    """Steps a WaveNet on ring buffers.

    What the older taps add is known before a step begins (Paine et al. 2016, "Fast WaveNet"), so one gather and one
    batched product serve all layers at once; only the newest tap waits for the layer below.
    """

    @torch.inference_mode()
    def __init__(self, model: WaveNet, state: TokenState) -> None:
        super().__init__(model, state)
        config = model.config
        convolutions = cast(list[nn.Linear], model.convolutions)
        # [L, K, C, 2G]
        kernels = torch.stack([each.weight.t().unflatten(0, (config.kernel_size, -1)) for each in convolutions])
        self._older = kernels[:, :-1].flatten(1, 2).contiguous()  # [L, (K - 1) C, 2G]
        self._newest = kernels[:, -1].contiguous()
        self._biases = torch.stack([each.bias for each in convolutions])[:, None]

        # All rings in one buffer [sum of H, B, C]. Step n is kept at n mod H, so tap k (0: oldest) of step n, which
        # reads step n - (K - 1 - k) * D, finds it at (n + k * D) mod H, and step n replaces what tap 0 read.
        self._rings = torch.cat([fifo.transpose(0, 1) for fifo in state.trunk]).to(kernels.dtype)
        self._lengths = torch.tensor(config.histories, device=kernels.device)[:, None]
        self._starts = self._lengths.cumsum(0) - self._lengths
        older_taps = torch.arange(config.kernel_size - 1, device=kernels.device)
        self._lags = older_taps * torch.tensor(config.dilations, device=kernels.device)[:, None]  # [L, K - 1]
        self._step_number = torch.zeros(1, dtype=torch.int64, device=kernels.device)
        self._residuals = [each.weight.t() for each in cast(list[nn.Linear], model.residuals)]
        taps = self._lags.numel() * self._rings[0].nbytes
        read = (self._older, self._newest, self._biases, *self._residuals, model.skip.weight, *model.head.parameters())
        self.bytes_per_step = sum(tensor.nbytes for tensor in read) + taps

    @torch.inference_mode()
    def device_step(self, tokens: Tensor) -> Tensor:
        """As `DeviceDecoder.device_step`: the number of the step is on the device."""
        places = self._starts + (self._lags + self._step_number) % self._lengths
        self._step_number += 1
        taps = self._rings[places].transpose(1, 2).flatten(2)  # [L, B, (K - 1) C]
        z_of = torch.baddbmm(self._biases, taps, self._older)

        x, prediction = self.embed(tokens)
        inputs, gates = [], []
        for layer, z in enumerate(z_of):
            inputs.append(x)
            tanh_half, sigmoid_half = torch.addmm(z, x, self._newest[layer]).chunk(2, dim=-1)
            gates.append(tanh_half.tanh() * sigmoid_half.sigmoid())
            if layer < len(self._residuals):
                x = torch.addmm(x, gates[-1], self._residuals[layer])
        self._rings.index_copy_(0, places[:, 0], torch.stack(inputs))
        return self.logits(self._model.skip(torch.cat(gates, dim=-1)), prediction)
