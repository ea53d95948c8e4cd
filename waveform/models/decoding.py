"""Steps a CompressiveTransformer one token at a time with torch: the decoder for fp64 and for GPUs, and the oracle.

Shape letters: B rows, W window, M memory slots, C compressed slots, D model width, H heads, d = D / H head width,
P position features.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.models import attention
from waveform.models.compressive_transformer import CompressiveState, CompressiveTransformer, Layer


class _FusedWeights(NamedTuple):
    """One layer's weights, laid out for one query at a time."""

    projection: Tensor  # [D, 3 D + H P]: q, k, v and (q + v)^T W_R as (cosine, -sine) pairs
    projection_bias: Tensor
    output: Tensor  # [D, D]


class CachedDecoder:
    """Steps a CompressiveTransformer with the keys and values of every slot kept (equal to `forward`; law 2).

    Inside a window keys only append; at its end they shift, and only compressed slots are projected anew. Positions
    cost one complex product a layer: (a_c - i a_s) e^{i w t} = (cosine part) + i (sine part) of the rotated query.
    """

    @torch.inference_mode()
    def __init__(self, model: CompressiveTransformer, state: CompressiveState) -> None:
        self._model, self._config = model, model.config
        config = model.config
        self._batch = len(state.steps)
        self._heads, self._d_head = config.num_heads, config.d_model // config.num_heads
        self._scale = self._d_head**-0.5
        self._first_window_slot = config.compressed + config.memory
        self._state = state._replace(window=tuple(window.clone() for window in state.window))
        self._layers = list(model._layers())
        self._weights = [self._fuse(layer) for layer in self._layers]
        reference = next(model.parameters())
        self._complex = torch.complex128 if reference.dtype == torch.float64 else torch.complex64
        self._rotations = self._unit_circle(torch.arange(config.window, dtype=torch.float64)).to(reference.device)
        self._keys: list[Tensor] = []  # [B H, C + M + W, d]
        self._values: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            slots = torch.cat([state.compressed[i], state.memory[i], state.window[i]], dim=1).to(reference.dtype)
            self._keys.append(self._project(layer, slots, layer.attention.key))
            self._values.append(self._project(layer, slots, layer.attention.value))
        self._usage = [usage.clone() for usage in state.usage]
        self._refresh(state.steps)

    def _unit_circle(self, times: Tensor) -> Tensor:
        """times [n] -> e^{i w t} [n, P / 2], complex."""
        w = attention.frequencies(self._config.num_position_features)
        # fp32 models round w and w t to fp32 in `forward`; here they are exact and rounded once.
        return torch.polar(torch.ones(1, dtype=torch.float64), times[:, None] * w).to(self._complex)

    def _fuse(self, layer: Layer) -> _FusedWeights:
        a = layer.attention
        heads, features = self._heads, self._config.num_position_features
        w_r = a.position.weight.view(heads, self._d_head, features)
        w_q = a.query.weight.view(heads, self._d_head, -1)
        by_position = torch.einsum("hdp,hdm->hpm", w_r, w_q)
        constant = torch.einsum("hdp,hd->hp", w_r, a.position_bias)

        def pairs(x: Tensor) -> Tensor:  # [sines; cosines] -> (cosine, -sine) pairs
            sine, cosine = x.chunk(2, dim=1)
            return torch.stack([cosine, -sine], dim=2).flatten(0, 2)

        weight = torch.cat([a.query.weight, a.key.weight, a.value.weight, pairs(by_position)])
        bias = torch.cat([a.content_bias.flatten(), weight.new_zeros(2 * self._config.d_model), pairs(constant)])
        return _FusedWeights(weight.t().contiguous(), bias, a.output.weight.t().contiguous())

    def _project(self, layer: Layer, slots: Tensor, projection: nn.Linear) -> Tensor:
        """Raw slots [B, n, D] -> [B H, n, d], contiguous."""
        return layer.frozen_projection(slots, projection).flatten(0, 1).contiguous()

    def _refresh(self, steps: Tensor) -> None:
        """Counters and slot times for the window in which `steps` lies."""
        config = self._config
        fill = self._model._fill(steps[:1])
        self._phase = int(fill.phase)
        self._first_used = self._first_window_slot - int(fill.memory) - int(fill.compressed)
        times = self._model._slot_times(
            fill.pending, num_compressed=config.compressed, num_memory=config.memory, end=config.window
        )
        keys = torch.view_as_real(self._unit_circle(times[0])).flatten(1)  # [K, P] as (cosine, sine) pairs
        self._position_keys = keys.t().contiguous().to(self._keys[0].device)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V] of the token that follows."""
        config, model = self._config, self._model
        d_model, batch_heads = config.d_model, self._batch * self._heads
        slot = self._first_window_slot + self._phase
        used = slice(self._first_used, slot + 1)
        rotation, position_keys = self._rotations[self._phase], self._position_keys[:, used]
        x = model.embedding(tokens)
        for i, layer in enumerate(self._layers):
            keys, values, weights = self._keys[i], self._values[i], self._weights[i]
            self._state.window[i][:, self._phase] = x
            normed = layer.attention_norm(x) if layer.pre_norm else x
            projected = torch.addmm(weights.projection_bias, normed, weights.projection)
            query = projected[:, :d_model].reshape(batch_heads, 1, self._d_head)
            keys[:, slot] = projected[:, d_model : 2 * d_model].reshape(batch_heads, self._d_head)
            values[:, slot] = projected[:, 2 * d_model : 3 * d_model].reshape(batch_heads, self._d_head)
            pairs = projected[:, 3 * d_model :].reshape(batch_heads, -1, 2)
            rotated = torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(1)
            by_position = torch.mm(rotated, position_keys)
            logits = torch.baddbmm(
                by_position[:, None], query, keys[:, used].transpose(1, 2), beta=self._scale, alpha=self._scale
            )
            attention_weights = logits.softmax(dim=-1)
            if self._usage[i].shape[1]:
                self._count_usage(i, attention_weights)
            mixed = torch.bmm(attention_weights, values[:, used]).view(self._batch, d_model)
            x = torch.addmm(x, mixed, weights.output)
            x = layer.attention_norm(x) if not layer.pre_norm else x
            normed = layer.feedforward_norm(x) if layer.pre_norm else x
            x = x + layer.feedforward_out(F.gelu(layer.feedforward_in(normed)))
            x = layer.feedforward_norm(x) if not layer.pre_norm else x
        self._phase += 1
        if self._phase == config.window:
            self._end_window()
        return model.head.logits(model.final_norm(x)[:, None])[:, 0]

    def _count_usage(self, i: int, attention_weights: Tensor) -> None:
        received = attention_weights.view(self._batch, self._heads, -1).mean(dim=1)
        in_memory = received[
            :, max(0, self._config.compressed - self._first_used) : received.shape[1] - self._phase - 1
        ]
        if in_memory.shape[1]:
            self._usage[i][:, -in_memory.shape[1] :] += in_memory

    def _end_window(self) -> None:
        config = self._config
        before = self._state._replace(usage=tuple(self._usage))
        state = self._model.close_window(before)
        num_new = min(self._model.num_compressed_between(before.steps[0], state.steps[0]), config.compressed)
        for i, layer in enumerate(self._layers):
            new_slots = state.compressed[i][:, config.compressed - num_new :]
            for cache, projection in (
                (self._keys[i], layer.attention.key),
                (self._values[i], layer.attention.value),
            ):
                kept = cache[:, num_new : config.compressed].clone()
                moved = cache[:, config.compressed + config.window :].clone()
                if num_new:
                    cache[:, : config.compressed - num_new] = kept
                    cache[:, config.compressed - num_new : config.compressed] = self._project(
                        layer, new_slots, projection
                    )
                cache[:, config.compressed : config.compressed + config.memory] = moved
        self._usage = [usage.clone() for usage in state.usage]
        self._state = state
        self._refresh(state.steps)
