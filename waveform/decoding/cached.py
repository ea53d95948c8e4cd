"""Steps a CompressiveTransformer one token at a time with torch: for fp64 and GPUs, and as the kernels' oracle.

Within a window a step reads and writes buffers that never move, at slots that follow from a counter on the device, so
that a GPU can replay steps as one captured graph (engine/cuda_graph.py).

Shape letters: B rows, W window, M memory slots, C compressed slots, K = C + M + W (of a layer, whose M and C may be its
own), D model width, H heads, d = D / H head width, P position features.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from waveform.decoding.stepped import SteppedDecoder
from waveform.engine.drawing import DrawConfig
from waveform.models import memory
from waveform.models.attention import encode_times, position_query
from waveform.models.compressive_transformer import CompressiveTransformer, Layer
from waveform.models.run_layers import compress_layers
from waveform.models.token_model import TokenState
from waveform.models.transformer_config import CompressiveTransformerConfig


class _FusedWeights(NamedTuple):
    """One layer's weights, laid out for one query at a time."""

    projection: Tensor  # [D, 3 D + H P]: q, k, v and `position_query`
    projection_bias: Tensor
    output: Tensor  # [D, D]


class _View(NamedTuple):
    """The slots of layers with the same sizes: their times, and which are in use."""

    config: CompressiveTransformerConfig  # of such a layer
    times: Tensor  # [K] fp64, relative to the window's start
    position_keys: Tensor  # [P, K]
    mask: Tensor  # [K]: 0 or, for unused slots, -inf

    @property
    def first_window_slot(self) -> int:
        return self.config.compressed + self.config.memory

    def begin_window(self, steps: Tensor) -> None:
        """Set the mask for the window in which `steps` [1] lies."""
        now, end = memory.occupancy(self.config, steps), self.first_window_slot
        first_used = end - int(now.memory) - int(now.compressed)
        if self.config.same_length:
            first_used = max(first_used, int(now.phase))
        self.mask.fill_(-torch.inf)
        self.mask[first_used : end + int(now.phase)] = 0

    def take(self, phase: Tensor) -> Tensor:
        """Unmask the slot [1] of the step at `phase` [1] of the window; return it."""
        slot = phase + self.first_window_slot
        self.mask.index_fill_(0, slot, 0)
        if self.config.same_length:
            self.mask.index_fill_(0, phase, -torch.inf)  # `memory` steps back: there is nothing before memory
        return slot


class CachedDecoder(SteppedDecoder):
    """Steps a CompressiveTransformer, keeping the keys and values of every slot.

    Equal to `forward` (law 2, chunks). Within a window keys are appended; at its end they shift, and only compressed
    slots are projected anew.
    """

    @torch.inference_mode()
    def __init__(self, model: CompressiveTransformer, state: TokenState) -> None:
        super().__init__(model, state)
        config = self._config = model.config
        self._scale = (config.d_model // config.num_heads) ** -0.5
        trunk = state.trunk
        self._state = trunk._replace(window=trunk.window.clone(), usage=trunk.usage.clone())
        self._weights = [self._fuse(layer) for layer in model.layers]
        reference = next(model.parameters())
        device = reference.device
        self._complex = torch.complex128 if reference.dtype == torch.float64 else torch.complex64
        self._rotations = self._unit_circle(torch.arange(config.window, dtype=torch.float64)).to(device)
        limit = self._unit_circle(torch.tensor([-config.clamp_len], dtype=torch.float64)).to(device)
        self._limit = torch.view_as_real(limit).mT.flatten()  # [P], what a query meets `clamp_len` steps back
        self._keys: list[Tensor] = []  # [B H, K, d]
        self._values: list[Tensor] = []
        for i, layer in enumerate(model.layers):
            slots, _ = memory.of_layers(layer.config, trunk, i)
            slots = torch.cat([slots, trunk.window[:, i]], dim=1).to(reference.dtype)
            self._keys.append(self._project(layer, slots, layer.attention.key))
            self._values.append(self._project(layer, slots, layer.attention.value))
        self._phase_on_device = torch.empty(1, dtype=torch.int64, device=device)
        self._views = [self._view(kind.config, reference) for kind in model.kinds]
        self._view_of = {layer: number for number, kind in enumerate(model.kinds) for layer in kind.layers}
        weights = [weight for fused in self._weights for weight in fused] + list(model.head.parameters())
        for layer in model.layers:
            weights += (*layer.feedforward_in.parameters(), *layer.feedforward_out.parameters())
        of_views = [tensor for view in self._views for tensor in (view.position_keys, view.mask)]
        read = (*weights, *self._keys, *self._values, *of_views)
        self.bytes_per_step = sum(tensor.nbytes for tensor in read)
        self._begin_window()

    def _unit_circle(self, times: Tensor) -> Tensor:
        """times [..., n] -> e^{i w t} [..., n, P / 2], complex.

        A model in fp32 rounds w and w t in `forward`; these are exact, and their cosines and sines are rounded once.
        """
        features = self._config.num_position_features
        sin, cos = encode_times(times, num_position_features=features, dtype=torch.float64).chunk(2, dim=-1)
        return torch.complex(cos, sin).to(self._complex)

    def _view(self, config: CompressiveTransformerConfig, reference: Tensor) -> _View:
        """The view of layers with this configuration; no slot is in use yet."""
        times = memory.slot_times(config).to(reference.device)
        pairs = torch.view_as_real(self._unit_circle(times))  # [K, P / 2, 2]: cosine and sine
        return _View(config, times, pairs.flatten(1).t().to(reference.dtype), reference.new_empty(len(times)))

    def _fuse(self, layer: Layer) -> _FusedWeights:
        a = layer.attention
        position, constant = position_query(a)
        weight = torch.cat([a.query.weight, a.key.weight, a.value.weight, position.flatten(0, 1)])
        bias = torch.cat([a.content_bias.flatten(), weight.new_zeros(2 * self._config.d_model), constant.flatten()])
        return _FusedWeights(weight.t().contiguous(), bias, a.output.weight.t().contiguous())

    def _project(self, layer: Layer, slots: Tensor, projection: nn.Linear) -> Tensor:
        """Raw slots [B, n, D] -> [B H, n, d], contiguous."""
        return layer.projection(slots, projection).flatten(0, 1).contiguous()

    def _begin_window(self) -> None:
        """Set counters and masks for the window in which `_state.steps` lies."""
        steps = self._state.steps[:1]
        self._phase = int(steps) % self._config.window
        self._phase_on_device.fill_(self._phase)
        for view in self._views:
            view.begin_window(steps)

    @property
    def steps_to_host(self) -> int:
        """Steps to the end of the window, or of a block of linear prediction."""
        return min(self._config.window - self._phase, super().steps_to_host)

    @torch.inference_mode()
    def draw(self, tokens: Tensor, uniform: Tensor, config: DrawConfig) -> Tensor:
        """As `Decoder.draw`."""
        if tokens.device.type != "cpu":
            return super().draw(tokens, uniform, config)
        from waveform.kernels.draw import draw_from  # here, so that only sampling on a CPU loads numba

        return draw_from(self, tokens, uniform, config)

    @torch.inference_mode()
    def advance(self, num_steps: int) -> None:
        """As `DeviceDecoder.advance`; evicts, compresses and shifts if the window is full."""
        super().advance(num_steps)
        self._phase += num_steps
        assert self._phase <= self._config.window
        if self._phase == self._config.window:
            self._end_window()

    @torch.inference_mode()
    def device_step(self, tokens: Tensor) -> Tensor:
        """As `DeviceDecoder.device_step`."""
        phase = self._phase_on_device
        slots = [view.take(phase) for view in self._views]
        rotation = self._rotations.index_select(0, phase)
        x, prediction = self.embed(tokens)
        for i, layer in enumerate(self._model.layers):
            self._state.window[:, i].index_copy_(1, phase, x[:, None].to(self._state.window.dtype))
            normed = layer.attention_norm(x) if layer.config.norm == "pre" else x
            x = torch.addmm(x, self._attend(i, normed, slots[self._view_of[i]], rotation), self._weights[i].output)
            x = layer.attention_norm(x) if layer.config.norm == "post" else x
            normed = layer.feedforward_norm(x) if layer.config.norm == "pre" else x
            x = x + layer.feedforward_out(layer.activation(layer.feedforward_in(normed)))
            x = layer.feedforward_norm(x) if layer.config.norm == "post" else x
        phase += 1
        return self.logits(self._model.final_norm(x), prediction)

    def _attend(self, i: int, normed: Tensor, slot: Tensor, rotation: Tensor) -> Tensor:
        """Layer i's attention [B, D], before its output projection; keeps the key and value of `normed` [B, D]."""
        view, keys, values, weights = self._views[self._view_of[i]], self._keys[i], self._values[i], self._weights[i]
        config, (batch, d_model) = view.config, normed.shape
        batch_heads = batch * config.num_heads
        projected = torch.addmm(weights.projection_bias, normed, weights.projection)
        of_content, of_position = projected.tensor_split([3 * d_model], dim=1)
        query, key, value = (part.reshape(batch_heads, 1, -1) for part in of_content.chunk(3, dim=1))
        keys.index_copy_(1, slot, key)
        values.index_copy_(1, slot, value)
        halves = of_position.reshape(batch_heads, 2, -1)
        rotated = torch.view_as_real(torch.complex(*halves.unbind(dim=1)) * rotation).flatten(1)
        by_position = torch.addmm(view.mask, rotated.view(-1, rotated.shape[1]), view.position_keys)
        if config.clamp_len:
            is_far = self._phase_on_device - view.times > config.clamp_len
            at_limit = view.mask + (halves.flatten(1) @ self._limit)[:, None]
            by_position = torch.where(is_far, at_limit, by_position)
        logits = torch.baddbmm(
            by_position.view(batch_heads, 1, -1), query, keys.transpose(1, 2), beta=self._scale, alpha=self._scale
        )
        attention_weights = logits.softmax(dim=-1)
        if config.tracks_usage:
            received = attention_weights.view(batch, config.num_heads, -1).mean(dim=1)
            _, usage = memory.of_layers(config, self._state, i)
            usage += received[:, config.compressed : view.first_window_slot]
        return torch.bmm(attention_weights, values).view(batch, d_model)

    def _end_window(self) -> None:
        """Compress what leaves memory, and move what stays; `_state.steps` is anywhere in the window that is full."""
        before, parts = self._state, []
        num_left = self._config.window - int(before.steps[0]) % self._config.window
        for kind in self._model.kinds:
            config, part = kind.config, memory.part_of(kind, before)
            groups = part.slots[:, :, :0]
            clock = memory.clock_of(config, before.steps, num_left, device=groups.device, dtype=groups.dtype)
            if config.compressed and clock.evicts is not False:
                layers = [self._model.layers[i] for i in kind.layers]
                groups, _ = compress_layers(layers, part, part.window, clock, None)
                groups = groups[:, :, -config.compressed :].to(part.slots.dtype)
            for i, new_slots in zip(kind.layers, groups.unbind(dim=1), strict=True):
                self._shift(i, config, new_slots)
            parts.append(memory.after_call(config, part, part.window, groups, part.usage, clock))
        state = memory.joined(parts, like=before)
        # Captured graphs write into the buffers of these two.
        self._state = state._replace(window=before.window, usage=before.usage.copy_(state.usage))
        self._begin_window()

    def _shift(self, i: int, config: CompressiveTransformerConfig, new_slots: Tensor) -> None:
        """Move layer i's keys and values to where the next window expects them, with those of `new_slots` [B, n, D]."""
        layer, num_new = self._model.layers[i], new_slots.shape[1]
        for cache, projection in ((self._keys[i], layer.attention.key), (self._values[i], layer.attention.value)):
            kept, moved = cache[:, num_new : config.compressed], cache[:, config.compressed + config.window :]
            new = self._project(layer, new_slots, projection)
            cache[:, : config.compressed + config.memory] = torch.cat([kept, new, moved], dim=1)
