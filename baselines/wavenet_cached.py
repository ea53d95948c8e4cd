"""Steps a WaveNet one token at a time with torch (fp64, GPUs); and WaveNet as it is registered, with its decoders.

Shape letters: as in wavenet.py.
"""

from typing import cast

import torch
from torch import Tensor, nn

from baselines.wavenet import WaveNet, WaveNetState
from waveform.decoding.stepped_front import SteppedFront
from waveform.engine.cuda_graph import DeviceDecoder
from waveform.engine.interface import Decoder
from waveform.engine.known_settings import KnownSettings
from waveform.models.linear_prediction import with_prediction

_SIZES = ("vocab_size", "num_stacks", "layers_per_stack", "kernel_size", "num_labels", "classes")
_WIDTHS = ("residual_channels", "gate_channels", "skip_channels", "end_channels")
KNOWN = KnownSettings(any_value=(*_SIZES, *_WIDTHS), values={"prediction": ("none", "linear")})  # to both decoders


class WaveNetWithDecoders(WaveNet):
    """A WaveNet that brings the fastest decoder for its settings, device and weights."""

    @property
    def why_no_int8(self) -> str | None:
        """As `OptionalParts.why_no_int8`; compiled steps take the model if it is None."""
        return KNOWN.why_not_in_kernels(self.config, self.embedding.weight)

    def decoder(self, state: WaveNetState, *, int8: bool = False) -> Decoder | None:
        """A decoder that continues from `state` with the weights as they are now; None if settings are not known."""
        if self.why_no_int8 is None:
            from baselines.wavenet_kernels import KernelWaveNetDecoder  # here, so that only sampling loads numba

            return KernelWaveNetDecoder(self, state, int8=int8)
        fitted_together = not state.predictors or len(set(state.predictors[0].steps.tolist())) == 1
        return WaveNetDecoder(self, state) if KNOWN.supports(self.config) and fitted_together else None


class WaveNetDecoder(DeviceDecoder):
    """Steps a WaveNet on ring buffers, with few operations, because their number decides the speed.

    What the older taps add is known before a step begins (Paine et al. 2016, "Fast WaveNet"), so one gather and one
    batched product per tap serve all layers at once; only the newest tap waits for the layer below.
    """

    @torch.inference_mode()
    def __init__(self, model: WaveNet, state: WaveNetState) -> None:
        config, self._head = model.config, model.head
        self._front = SteppedFront(model, state)
        c, g, older = config.residual_channels, config.gate_channels, config.kernel_size - 1
        num_layers, num_rows = len(config.dilations), state.fifos[0].shape[0]
        convolutions, residuals = cast(list[nn.Linear], model.convolutions), cast(list[nn.Linear], model.residuals)
        self._embedding = model.embedding.weight
        # [L, K, C, 2G]
        kernels = torch.stack([conv.weight.t().unflatten(0, (-1, c)) for conv in convolutions])
        self._older_kernels = [kernels[:, tap].contiguous() for tap in range(older)]
        self._newest_kernels = kernels[:, older].contiguous().unbind()
        self._biases = torch.stack([conv.bias for conv in convolutions])[:, None]
        self._residuals = [residual.weight.t().contiguous() for residual in residuals]
        self._skip_weight, self._skip_bias = model.skip.weight.t().contiguous(), model.skip.bias

        # All rings in one buffer [sum of H, B, C]. Step n is kept at n mod H, so tap k (0: oldest) of step n, which
        # reads step n - (K - 1 - k) * D, finds it at (n + k * D) mod H, and step n replaces what tap 0 read.
        self._rings = torch.cat([fifo.transpose(0, 1) for fifo in state.fifos]).to(self._embedding.dtype)
        lengths = torch.tensor(config.histories, device=self._rings.device)
        dilations = torch.tensor(config.dilations, device=self._rings.device)
        self._starts, self._lengths = lengths.cumsum(0) - lengths, lengths
        self._lags = torch.arange(older, device=self._rings.device)[:, None] * dilations  # [K - 1, L]
        self._slots = torch.empty_like(self._lags)
        self._step_number = torch.zeros(1, dtype=torch.int64, device=self._rings.device)

        self._taps = self._rings.new_empty(older * num_layers, num_rows, c)
        self._inputs = self._rings.new_empty(num_layers, num_rows, c)
        self._z = self._rings.new_empty(num_layers, num_rows, 2 * g)
        self._gates = self._rings.new_empty(num_rows, num_layers * g)
        # Views are made once: making one costs as much as a small product.
        self._flat_slots, self._oldest_slots = self._slots.view(-1), self._slots[0]
        self._taps_of = self._taps.view(older, num_layers, num_rows, c).unbind()
        self._input_of = self._inputs.unbind()
        self._z_of = [(z, z[:, :g], z[:, g:]) for z in self._z]
        self._gate_of = self._gates.split(g, dim=1)
        weights = (*self._older_kernels, *self._newest_kernels, *self._residuals, self._biases, self._skip_weight)
        self.bytes_per_step = sum(tensor.nbytes for tensor in (*weights, *self._head.parameters(), self._taps))

    @property
    def steps_to_host(self) -> int:
        """As `DeviceDecoder.steps_to_host`."""
        return self._front.steps_to_host

    @torch.inference_mode()
    def advance(self, num_steps: int) -> None:
        """As `DeviceDecoder.advance`."""
        self._front.advance(num_steps)

    @torch.inference_mode()
    def device_step(self, tokens: Tensor) -> Tensor:
        """As `DeviceDecoder.device_step`: the number of the step is on the device."""
        torch.add(self._lags, self._step_number, out=self._slots)
        self._slots.remainder_(self._lengths).add_(self._starts)
        self._step_number += 1
        torch.index_select(self._rings, 0, self._flat_slots, out=self._taps)
        z: Tensor = self._biases
        for taps, kernels in zip(self._taps_of, self._older_kernels, strict=True):
            z = torch.baddbmm(z, taps, kernels, out=self._z)

        tokens, added, prediction = self._front.step(tokens)
        x = torch.index_select(self._embedding, 0, tokens, out=self._input_of[0])
        for vectors in added:
            x.add_(vectors)
        for layer, (z, tanh_half, sigmoid_half) in enumerate(self._z_of):
            z.addmm_(x, self._newest_kernels[layer])
            gate = torch.mul(tanh_half.tanh_(), sigmoid_half.sigmoid_(), out=self._gate_of[layer])
            if layer < len(self._residuals):
                x = torch.addmm(x, gate, self._residuals[layer], out=self._input_of[layer + 1])
        self._rings.index_copy_(0, self._oldest_slots, self._inputs)
        hidden = torch.addmm(self._skip_bias, self._gates, self._skip_weight)
        return self._head.logits(with_prediction(hidden[:, None], prediction))[:, 0]
