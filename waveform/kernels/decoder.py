"""Steps a CompressiveTransformer on a CPU with compiled kernels, near the speed at which memory can be read.

A step reads every weight and every cached key and value once; nothing else takes long. One compiled function does the
whole step (step.py), and as many as are asked for, with the draws between them (draw.py); Python is needed once per
window, for compression.

Rows are computed alike whatever their number (dense.py), and threads change no bit of them (attend_slots.py).

Shape letters: B rows, V classes.
"""

import numpy as np
import torch

from waveform.kernels.draw import NO_DRAWS, Draws, KernelDecoder
from waveform.kernels.record import address
from waveform.kernels.row_inputs import lay_out_inputs
from waveform.kernels.slots import Windows, caches_read, lay_out_memory
from waveform.kernels.step import CACHE_GROUPS, PHASES_PER_LAYER, PROJECT, lay_out_step, run
from waveform.kernels.weights import lay_out_compressor, lay_out_weights
from waveform.models.compressive_transformer import CompressiveTransformer
from waveform.models.memory import CompressiveState, occupancy


class KernelTransformerDecoder(KernelDecoder):
    """Steps an fp32 CompressiveTransformer on the CPU, if its settings are known (compressive_transformer.py).

    All rows are at the same step. int8: weights and cached keys and values are kept in 8 bits, with a scale for each
    output, or slot and head.
    """

    @torch.inference_mode()
    def __init__(self, model: CompressiveTransformer, state: CompressiveState, *, int8: bool = False) -> None:
        config = self._config = model.config
        weights, memory = lay_out_weights(model, int8=int8), lay_out_memory(model, state, int8=int8)
        step = lay_out_step(model.kinds, weights, memory, epsilon=model.layers[0].attention_norm.eps)
        inputs, self._sound = lay_out_inputs(model, state, num_rows=step["num_rows"], width=step["width"])
        self._compressors = [lay_out_compressor(layer) for layer in model.layers]  # kernels only have addresses
        convolutions = np.array([address(each) for each in self._compressors])
        fields = {**weights, "convolutions": convolutions, **inputs, **memory._asdict(), **step}
        super().__init__(
            fields,
            read=(*weights.values(), *caches_read(model.kinds, memory)),
            num_phases=PHASES_PER_LAYER * config.num_layers + 1,
            int8=int8,
        )
        self._num_steps = int(state.steps[0])
        self._kinds, self._windows = model.kinds, Windows(model.kinds, memory)
        self._windows.begin(self._num_steps)

    @property
    def steps_to_host(self) -> int:
        """Steps to the end of the window."""
        return self._config.window - self._num_steps % self._config.window

    def _take(self, tokens: np.ndarray, draws: Draws) -> None:
        super()._take(tokens, draws)
        if self._num_steps % self._config.window == 0:
            self._end_window()

    def _run(self, tokens: np.ndarray, draws: Draws) -> None:
        run(PROJECT, tokens, self._num_steps, draws, self._sound, self._plan, self._kind)

    def _end_window(self) -> None:
        """Compress what leaves memory."""
        end, plan = self._num_steps, self._plan
        for config, layers in self._kinds:
            before, after = occupancy(config, torch.tensor([end - config.window, end])).evicted.tolist()
            if config.compressed and after > before:
                num_kept = min(config.groups, config.compressed)
                first = end - config.window - config.memory + (config.groups - num_kept) * config.compression_rate
                plan["num_groups"], plan["first_consumed"] = num_kept, first
                plan["compressed"], plan["compression_rate"] = config.compressed, config.compression_rate
                first_slot = (after * config.groups - num_kept) % config.compressed
                run(CACHE_GROUPS, np.array(layers), first_slot, NO_DRAWS, self._sound, plan, self._kind)
        self._windows.begin(end)
