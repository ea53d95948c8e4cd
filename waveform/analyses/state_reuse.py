"""What carrying state saves in evaluation, against rereading each context (Dai et al. 2019, section 4.5, Table 9).

The paper compares Transformer-XL with a transformer that moves its context by one token for each token that it scores.
Here a model is compared with itself: with carried state it reads W tokens per window; without, for each token or for
each window, it reads from a fresh state as much context as its attention reaches directly (WaveNet: its receptive
field).
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from waveform.engine.interface import SequenceModel, State, optional_parts

ROUNDS = 5  # of timing, in which all ways take turns


def seconds_per_token(ways: Mapping[str, tuple[Callable[[], Any], int]]) -> dict[str, float]:
    """Time each of `ways`, a call and the number of tokens that it scores; return medians over `ROUNDS`."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS + 1):
        for name, (run, scored) in ways.items():
            began = time.perf_counter()
            run()
            if i:  # the first round warms up
                seconds[name].append((time.perf_counter() - began) / scored)
    return {name: statistics.median(values) for name, values in seconds.items()}


def fresh_state(model: SequenceModel, *, device: torch.device) -> State:
    """The state of one row that has read nothing."""
    return model.init_state(1, device=device, dtype=next(iter(model.parameters())).dtype)


def read_windows(model: SequenceModel, tokens: torch.Tensor, state: State, *, window: int, num_scored: int) -> State:
    """Read tokens in windows, compute the NLL of the last `num_scored` in the last window, and return the state."""
    for part in tokens.split(window, dim=1):
        hidden, state, _ = model.forward(part, state)
    num = min(num_scored, part.shape[1])
    model.head.nll(hidden[:, -num:], part[:, -num:]).sum().item()  # waits for the device
    return state


@torch.inference_mode()
def state_reuse_speed(model: SequenceModel, *, vocab_size: int, window: int, device: torch.device) -> dict[str, Any]:
    """Measure seconds per scored token with and without carried state, in one row.

    Tokens are random: the time does not depend on them.
    """
    length = optional_parts(model).receptive_field
    if length is None:
        return {"absent": "the model does not say how far back it reaches"}
    # Complete windows, so that the context is cut in the same way each time.
    context = -(-max(length - window, 1) // window) * window
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, context + window), generator=generator).to(device)
    fresh = fresh_state(model, device=device)
    read = partial(read_windows, model, window=window)
    full = read(tokens[:, :context], fresh, num_scored=1)
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "carried": (partial(read, tokens[:, context:], full, num_scored=window), window),
        "anew_for_each_window": (partial(read, tokens, fresh, num_scored=window), window),
        "anew_for_each_token": (partial(read, tokens[:, window:], fresh, num_scored=1), 1),
    }
    medians = seconds_per_token(ways)
    return {
        "context_tokens": context,
        "window": window,
        "seconds_per_token": medians,
        "speedup_over_each_window": medians["anew_for_each_window"] / medians["carried"],
        "speedup_over_each_token": medians["anew_for_each_token"] / medians["carried"],
        "rounds": ROUNDS,
        "rows": 1,
        "device": str(device),
        "num_threads": torch.get_num_threads(),
    }
