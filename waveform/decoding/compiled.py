"""Steps a CompressiveTransformer on a CPU with compiled kernels, near the speed at which memory can be read.

A step reads every weight and every cached key and value once; nothing else takes long. One compiled function does the
whole step (step.py), and as many as are asked for, with the draws between them (draw.py); Python is needed once per
window, for compression.

Rows are computed alike whatever their number (kernels.py), and threads change no bit of them (attend.py).

Shape letters: B rows, V classes, D' model width padded to whole vectors.
"""

import numba
import numpy as np
import torch

from waveform.compiled.simd import address
from waveform.decoding.draw import NO_DRAWS, Draws, KernelDecoder, make_draw_scratch
from waveform.decoding.kernels import zeros
from waveform.decoding.plan import make_plan
from waveform.decoding.row_inputs import lay_out_labels
from waveform.decoding.row_predictions import lay_out_predictions
from waveform.decoding.slots import Windows, lay_out_memory
from waveform.decoding.step import ADOPT, PROJECT, make_scratch, run, sizes_of
from waveform.decoding.weights import lay_out_compressors, lay_out_weights
from waveform.models.compressive_state import CompressiveState
from waveform.models.compressive_transformer import CompressiveTransformer


class CompiledDecoder(KernelDecoder):
    """Steps an fp32 CompressiveTransformer on the CPU; all rows are at the same step.

    int8: weights and cached keys and values are kept in 8 bits, with a scale for each output, or slot and head.
    """

    @torch.inference_mode()
    def __init__(self, model: CompressiveTransformer, state: CompressiveState, *, int8: bool = False) -> None:
        self._model, self._config = model, model.config
        self._num_steps = int(state.steps[0])
        self._weights = lay_out_weights(model, int8=int8)
        self._compressors = lay_out_compressors(model)
        self._memory = lay_out_memory(model, state, int8=int8)
        self._windows = Windows(model.config, self._memory)
        self._windows.begin(self._num_steps)
        self._sizes = sizes_of(model, self._weights, self._memory)
        self._scratch = make_scratch(self._sizes)
        self._draw_scratch = make_draw_scratch(model.config.vocab_size)
        self._labels = lay_out_labels(
            model.label_embedding, state.labels, num_rows=self._sizes.num_rows, width=self._sizes.width
        )
        self._predictions = lay_out_predictions(
            model.linear_prediction, state.predictors, num_rows=self._sizes.num_rows, width=self._sizes.width
        )
        work_on = (self._weights, self._compressors, self._labels, self._predictions, self._memory)
        self._plan = make_plan(*work_on, self._scratch, self._draw_scratch, self._sizes)
        self._kind = np.int8(0) if int8 else np.float32(0)
        self._logits = torch.from_numpy(self._scratch.logits)[:, : model.config.vocab_size]
        m = self._memory
        cache = (m.keys, m.values, *((m.key_scales, m.value_scales) if int8 else ()))
        self.bytes_per_step = sum(array.nbytes for array in (*self._weights[1:], *cache))

    @property
    def steps_to_host(self) -> int:
        """Steps to the end of the window."""
        return self._config.window - self._num_steps % self._config.window

    def _take(self, tokens: np.ndarray, draws: Draws) -> None:
        self._run(PROJECT, tokens, self._num_steps, draws)
        self._num_steps += max(1, len(draws.drawn))
        if self._num_steps % self._config.window == 0:
            self._end_window()

    def _run(self, first_phase: int, tokens: np.ndarray, at: int, draws: Draws = NO_DRAWS) -> None:
        if self._sizes.num_threads > 1:
            numba.set_num_threads(self._sizes.num_threads)
        run(first_phase, tokens, at, draws, self._plan, self._kind)

    def _end_window(self) -> None:
        """Compress what leaves memory."""
        config = self._config
        rate = config.compression_rate
        if config.compressed:
            before, after = (max(0, n - config.memory) for n in (self._num_steps - config.window, self._num_steps))
            evicted = np.arange(before, after)
            if self._sizes.tracks_usage and len(evicted):
                # From sums to averages over the steps that saw a slot, before slots of other windows join it.
                steps_seen = ((evicted + config.memory) // config.window - evicted // config.window) * config.window
                self._memory.usage[:, :, evicted % self._sizes.history_ring] /= steps_seen.astype(np.float32)
            if after // rate > before // rate:
                self._compress(before // rate, after // rate)
        self._windows.begin(self._num_steps)

    def _compress(self, first_group: int, last_group: int) -> None:
        config, sizes = self._config, self._sizes
        num_kept = min(last_group - first_group, config.compressed)
        groups = zeros(sizes.num_rows, num_kept, sizes.width)
        projected = zeros(sizes.num_rows, num_kept, sizes.num_projected)
        self._plan["groups"], self._plan["group_keys"] = address(groups), address(projected)
        self._plan["num_groups"] = num_kept
        first_slot = (last_group - num_kept) % config.compressed
        if sizes.convolves:
            consumed = zeros(sizes.num_rows, num_kept, config.compression_rate * sizes.width)
            self._plan["consumed"] = address(consumed)
            self._plan["first_consumed"] = (last_group - num_kept) * config.compression_rate
            self._run(ADOPT, np.arange(config.num_layers), first_slot)
            return
        steps = np.arange(first_group * config.compression_rate, last_group * config.compression_rate)
        own_slots = (first_slot + np.arange(num_kept)) % config.compressed
        for i in range(config.num_layers):
            made, made_steps = self._compressed(i, steps)
            groups[..., : config.d_model] = made[:, -num_kept:]
            if made_steps is not None:
                self._memory.own_steps[i][:, own_slots] = made_steps[:, -num_kept:]
            self._run(ADOPT, np.array([i]), first_slot)

    def _compressed(self, layer: int, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """What the layer's compressor makes of its inputs at `steps` [n]: [B, n / c, D], and their own steps if any."""
        compressor, memory, at = self._model.layers[layer].compressor, self._memory, steps % self._sizes.history_ring
        consumed = torch.from_numpy(memory.history[layer][:, at, : self._config.d_model])
        use = torch.from_numpy(memory.usage[layer][:, at]) if self._sizes.tracks_usage else None
        # One row at a time, because products of other sizes may round otherwise.
        rows = [(consumed[b : b + 1], None if use is None else use[b : b + 1]) for b in range(len(consumed))]
        made = torch.cat([compressor(*row) for row in rows]).numpy()
        if not self._config.keeps_times:
            return made, None
        return made, steps[torch.cat([compressor.kept(*row) for row in rows]).numpy()]
