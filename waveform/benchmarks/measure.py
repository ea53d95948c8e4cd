"""Measures what `waveform bench` prints of a model: training, memory, sampling, each beside its limit on this machine.

Counts and limits, all taken in the same process as the speeds and in turn with them:

    model FLOPs       3 x the matrix products of one forward with full memories (2 FLOPs a multiply-add), the usual
                      convention: backward costs twice forward, and what a backward recomputes is not useful work.
                      Forwards of auxiliary losses count once, a lower bound: they stop most gradients, and 3 x them
                      is 8% more for the Compressive Transformer than all that it carries out
    matrix rate       FLOP/s of one large product, in the precision that training uses
    bytes of a step   weights and cached keys, values or inputs that the products of a decoder's step read, each once
    memory rate       bytes/s of summing an array far larger than any cache
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from waveform.engine.cuda_graph import GRAPH_STEPS, STEPS_TO_CAPTURE
from waveform.engine.interface import (
    Decoder,
    DeviceDecoder,
    MeteredDecoder,
    SequenceModel,
    State,
    decoder,
    map_state,
    optional_parts,
    state_tensors,
    take_rows,
)
from waveform.engine.sampler import BLOCK_STEPS, SamplingConfig, SamplingLoop, sampling_loop
from waveform.engine.trainer import Trainer
from waveform.system.machine import peak_resident_bytes

BACKWARD_FACTOR = 3  # forward and backward together, in forwards
_MIN_REPEATS, _MAX_REPEATS = 3, 7
_REPEATS_S = 5.0  # of timing, once there are _MIN_REPEATS
_STEPS_S = 0.3  # of sampling in one repeat
_MAX_WINDOWS = 64  # read until memories are full
_WARM_STEPS = {"cpu": 3, "cuda": STEPS_TO_CAPTURE}  # of a decoder, before it is timed
_aten = torch.ops.aten


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min, max and number of repeated measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def seconds(function: Callable[[], Any], *, device: torch.device) -> float:
    """Wall-clock time of a call, including what it leaves queued on a GPU."""
    _synchronise(device)
    began = time.perf_counter()
    function()
    _synchronise(device)
    return time.perf_counter() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Limits:
    """What the machine can do, measured again at each call so that it shares the speeds' good and bad moments."""

    def __init__(self, device: torch.device, *, dtype: torch.dtype) -> None:
        """dtype: of the matrix product."""
        cuda = device.type == "cuda"
        self._device, self._calls = device, 20 if cuda else 1
        size = 8192 if cuda else 2048
        self._a, self._b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._long = torch.ones(1 << 28 if cuda else 1 << 26, device=device)  # 1 GiB, 256 MiB
        self.matrix_rate(), self.memory_rate()  # the first calls load libraries

    def matrix_rate(self) -> float:
        """FLOP/s of a product of square matrices."""
        flops = 2 * self._a.shape[0] ** 3 * self._calls
        return flops / seconds(lambda: self._repeat(self._multiply), device=self._device)

    def memory_rate(self) -> float:
        """Bytes/s read."""
        read = self._long.numel() * self._long.element_size() * self._calls
        return read / seconds(lambda: self._repeat(self._long.sum), device=self._device)

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def _repeat(self, function: Callable[[], Any]) -> None:
        for _ in range(self._calls):
            function()


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _addmm_flops(out: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    batch = a[0] if len(a) == 3 else 1
    return 2 * batch * a[-2] * a[-1] * b[-1]


# Products that torch's counter does not know; the rest, and what a custom autograd function is made of, it does.
_MORE_PRODUCTS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten.addmm_: _addmm_flops,
    _aten.baddbmm_: _addmm_flops,
}


def counted_flops(function: Callable[[], Any]) -> int:
    """FLOPs of the matrix products, convolutions and attention that a call carries out."""
    with FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS) as counter:
        function()
    return int(counter.get_total_flops())


def forward_flops(model: SequenceModel, tokens: Tensor, state: State) -> int:
    """FLOPs of one forward: tokens [B, T] through trunk, head and, where gradients are enabled, auxiliary losses."""

    def forward() -> None:
        step = model.forward(tokens, state)
        model.head.nll(step.hidden, tokens)

    return counted_flops(forward)


def model_flops(model: SequenceModel, tokens: Tensor, state: State) -> int:
    """FLOPs that training on tokens [B, T] usefully takes, forward and backward (defined in the module's docstring)."""
    with torch.no_grad():
        without_aux = forward_flops(model, tokens, state)
    return BACKWARD_FACTOR * without_aux + max(0, forward_flops(model, tokens, state) - without_aux)


@torch.no_grad()
def fill_memories(model: SequenceModel, state: State, *, window: int, vocab_size: int) -> tuple[State, int]:
    """Read windows of random tokens until memories are full: until two windows in a row cost as many FLOPs.

    Returns the state and the number of windows read. A window that attends to more slots costs more, so equal costs
    mean that no memory grew (one that reads all slots from the start, full or not, costs the same at once).
    """
    parameter = next(iter(model.parameters()))
    batch_size = state_tensors(state)[0].shape[0]
    generator = torch.Generator().manual_seed(0)
    costs: list[int] = []
    while len(costs) < _MAX_WINDOWS and (len(costs) < 2 or costs[-1] != costs[-2]):
        tokens = torch.randint(vocab_size, (batch_size, window), generator=generator).to(parameter.device)

        def read(tokens: Tensor = tokens) -> None:
            nonlocal state
            state = model.forward(tokens, state).state

        costs.append(counted_flops(read))
    return state, len(costs)


def measure_training(trainer: Trainer, *, window: int, vocab_size: int) -> dict[str, Any]:
    """Time `trainer.update` with full memories; afterwards `trainer.state` stands at a window's start, memories full.

    Every row of the trainer's stream must be in its first utterance for `updates_needed()` chunks. Peak memory is
    that of two updates (the second holds the optimiser's moments beside the activations).
    """
    device, config = trainer.world.device, trainer.config
    autocast = config.autocast(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer.stream.next_chunk()  # in which every row starts afresh
    trainer.module.train()
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        trainer.state, num_windows = fill_memories(trainer.model, trainer.state, window=window, vocab_size=vocab_size)
        tokens = torch.zeros(config.batch_size // trainer.world.size, window, dtype=torch.int64, device=device)
        useful = model_flops(trainer.model, tokens, trainer.state)
    executed = counted_flops(trainer.update)
    update_s = [seconds(trainer.update, device=device)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
    limits = Limits(device, dtype=autocast or torch.float32)
    matrix_rates = [limits.matrix_rate()]
    while not _enough(update_s):
        update_s.append(seconds(trainer.update, device=device))
        matrix_rates.append(limits.matrix_rate())
    tokens_per_update = tokens.shape[0] * config.chunk
    flops_per_token = useful / tokens.numel()
    speed = spread([tokens_per_update / s for s in update_s])
    rate = spread(matrix_rates)
    return {
        "tokens_per_second": speed,
        "seconds_per_update": spread(update_s),
        "tokens_per_update": tokens_per_update,
        "model_flops_per_token": flops_per_token,
        "executed_flops_per_token": executed / tokens_per_update,
        "matrix_flops_per_second": rate,
        "model_flop_utilisation": speed["median"] * flops_per_token / rate["median"],
        "windows_read_before": num_windows,
        "peak_bytes": peak,
    }


def updates_needed() -> int:
    """Chunks of each row that `measure_training` reads at most."""
    return _MAX_REPEATS + 2


def _enough(durations_s: Sequence[float]) -> bool:
    return len(durations_s) >= _MAX_REPEATS or (len(durations_s) >= _MIN_REPEATS and sum(durations_s) >= _REPEATS_S)


def decoders(model: SequenceModel) -> Mapping[str, Callable[[State], Decoder]]:
    """Every way in which `model` samples, by the name it has in the results; another decoder gets its line here."""
    ways: dict[str, Callable[[State], Decoder]] = {"exact": lambda state: decoder(model, state)}
    if optional_parts(model).has_int8_decoder and next(iter(model.parameters())).device.type == "cpu":
        ways["int8"] = lambda state: decoder(model, state, int8=True)
    return ways


class _ReadCounter(TorchDispatchMode):
    """Counts the bytes of tensors that a step's matrix products read and the step did not make itself."""

    _PRODUCTS = frozenset(
        {_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_, _aten.linear, _aten.mv,
         _aten.addmv, _aten.scaled_dot_product_attention}
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # storages
        self._read: dict[tuple[Any, ...], int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        if func.overloadpacket in self._PRODUCTS:
            for tensor in inputs:
                if tensor.untyped_storage().data_ptr() not in self._made:
                    place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
                    self._read[place] = tensor.numel() * tensor.element_size()
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            # What is written into or looked at through a view existed before.
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in storages:
                self._made.add(leaf.untyped_storage().data_ptr())
        return result


def bytes_read_by_step(stepper: Decoder, tokens: Tensor) -> int | None:
    """Bytes of weights and cache that one step reads, by carrying one out; None where that cannot be told.

    A `MeteredDecoder`, whose products are not torch's, says it itself.
    """
    if isinstance(stepper, MeteredDecoder):
        return stepper.bytes_per_step
    with _ReadCounter() as counter:
        stepper.step(tokens)
    return counter.num_bytes or None


@torch.inference_mode()
def measure_sampling(
    model: SequenceModel, state: State, *, window: int, vocab_size: int, stream_counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Time drawing tokens from every decoder of `model`, for each number of streams side by side.

    state: with full memories, at the start of a window; its first row is taken for every stream. Steps are timed from
    the middle of the window on, where as many window slots are in use as on average, and one step at its end, whose
    extra work (compression, shifting memories) is shared out over the window.
    """
    model_device = next(iter(model.parameters())).device
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(vocab_size, (1, window), generator=generator).to(model_device)
    state = take_rows(state, [0])
    midway = model.forward(inputs[:, : window // 2], state).state if window > 1 else state
    near_end = model.forward(inputs[:, : window - 2], state).state if window > 2 else state
    cases = [_Sampler(model, name, make, midway, n) for n in stream_counts for name, make in decoders(model).items()]
    limits = Limits(model_device, dtype=torch.float32)
    warm_steps = _WARM_STEPS[model_device.type]
    room = (window // 2 - warm_steps - 3) // _MAX_REPEATS  # so that no repeat meets the window's end
    for case in cases:
        case.warm(warm_steps, max_steps=max(room, 1))
    memory_rates: list[float] = []
    for _ in range(_MAX_REPEATS):  # in turn, so that all meet the same moments
        memory_rates.append(limits.memory_rate())
        for case in cases:
            case.repeat()
    rate = spread(memory_rates)
    return [case.result(near_end, window=window, memory_rate=rate) for case in cases]


class _Sampler:
    """One decoder of one number of streams, timed."""

    def __init__(
        self, model: SequenceModel, name: str, make: Callable[[State], Decoder], state: State, num_streams: int
    ) -> None:
        self._name, self._make, self._num_streams = name, make, num_streams
        self._device = next(iter(model.parameters())).device
        self._tokens = torch.zeros(num_streams, dtype=torch.int64, device=self._device)
        self._stepper = make(self._rows(state))
        self._loop = sampling_loop(self._stepper, self._tokens, SamplingConfig())
        self._step_s: list[float] = []
        self._num_steps = 1
        self._bytes: int | None = None

    def _rows(self, state: State) -> State:
        return map_state(torch.clone, take_rows(state, [0] * self._num_streams))

    def _draw(self, loop: SamplingLoop, num_steps: int) -> None:
        loop.draw(torch.full((num_steps, self._num_streams), 0.5, device=self._device))

    def warm(self, num_steps: int, *, max_steps: int) -> None:
        """Take steps untimed, and set how many a repeat takes, at most `max_steps`."""
        self._draw(self._loop, num_steps)
        step_s = seconds(lambda: self._draw(self._loop, 1), device=self._device)
        self._num_steps = max(1, min(max_steps, BLOCK_STEPS, round(_STEPS_S / step_s)))
        if self._num_steps > GRAPH_STEPS:  # whole graphs, where steps are captured
            self._num_steps -= self._num_steps % GRAPH_STEPS
        self._bytes = bytes_read_by_step(self._stepper, self._tokens)

    def repeat(self) -> None:
        """Time `num_steps` steps."""
        duration_s = seconds(lambda: self._draw(self._loop, self._num_steps), device=self._device)
        self._step_s.append(duration_s / self._num_steps)

    def result(self, near_end: State, *, window: int, memory_rate: dict[str, float]) -> dict[str, Any]:
        """The figures; near_end: two steps before the end of a window."""
        stepper = self._make(self._rows(near_end))
        stepper.step(self._tokens)
        if isinstance(stepper, DeviceDecoder):
            stepper.device_step(self._tokens)
            end_s = seconds(lambda: stepper.advance(1), device=self._device)
            extra_s = end_s / window
        else:
            end_s = seconds(lambda: stepper.step(self._tokens), device=self._device)
            extra_s = max(0.0, end_s - statistics.median(self._step_s)) / window
        per_second = spread([self._num_streams / (step_s + extra_s) for step_s in self._step_s])
        bound_s = None if self._bytes is None else self._bytes / memory_rate["median"]
        return {
            "decoder": self._name,
            "num_streams": self._num_streams,
            "samples_per_second": per_second,
            "steps_per_repeat": self._num_steps,
            "window_end_seconds": end_s,
            "bytes_per_step": self._bytes,
            "memory_bytes_per_second": memory_rate,
            "share_of_bound": None if bound_s is None else bound_s * per_second["median"] / self._num_streams,
        }
