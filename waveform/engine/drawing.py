"""How a token is drawn from logits: the distribution after temperature and truncation, and the draw itself.

This defines the draw for every decoder. One that draws by itself computes the same, in its own way.

Shape letters: B streams, V classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from waveform.system.errors import UserError

LARGEST_WEIGHT = 2**40  # of a class, in `weights`: sums over 8 million classes fit into 64 bits


@dataclass(frozen=True)
class DrawConfig:
    """From which distribution tokens are drawn."""

    temperature: float = 1.0  # 0 takes the most probable token
    # Keep the k most probable classes, or the fewest whose probabilities reach p (nucleus; Holtzman et al. 2019); and
    # any others exactly as probable as the last of them.
    top_k: int | None = None
    top_p: float | None = None
    classes: tuple[int, int] | None = None  # the first and the last that may be drawn; all others are dropped first

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it must be a finite number of 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; it must be above 0 and at most 1")
        if self.classes is not None and not 0 <= self.classes[0] <= self.classes[1]:
            raise UserError(f"classes is {self.classes}; the first must be at least 0 and the last not below it")


def choose(logits: Tensor, uniform: Tensor, *, config: DrawConfig) -> Tensor:
    """logits [B, V], uniform [B] fp32 in [0, 1) -> the next tokens [B]."""
    first, last = config.classes or (0, logits.shape[-1] - 1)
    logits = logits[:, first : last + 1]
    if config.temperature == 0:
        return first + logits.argmax(dim=-1)
    return first + draw(weights(logits, config), uniform)


def weights(logits: Tensor, config: DrawConfig) -> Tensor:
    """logits [B, V] -> what classes are drawn in proportion to [B, V], int64, after temperature, top-k and top-p.

    The most probable class weighs 2^40, and one that is 2^40 times less probable nothing. Whole numbers have the same
    sum in every order, so two programs that draw differ only if rounding of an exponential in fp64 makes a weight
    differ by 1: in about one draw of 10^13. (With probabilities in fp32 it is one of 10^6.)
    """
    logits = logits.float()
    peak = logits.amax(dim=-1, keepdim=True)

    def weigh(x: Tensor) -> Tensor:
        return (x - peak).double().div_(config.temperature).exp_().mul_(LARGEST_WEIGHT).long()

    w = weigh(logits)
    num_kept = min(config.top_k or logits.shape[-1], logits.shape[-1])
    if num_kept < logits.shape[-1] or config.top_p is not None:
        ordered = logits.topk(num_kept, dim=-1).values
        w = torch.where(logits >= ordered[:, -1:], w, 0)
        if config.top_p is not None:
            wanted = (w.sum(dim=-1, keepdim=True).double() * config.top_p).ceil().long()
            last = torch.searchsorted(weigh(ordered).cumsum(dim=-1), wanted).clamp(max=num_kept - 1)
            w = torch.where(logits >= ordered.gather(-1, last), w, 0)
    return w


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverse transform: weights [B, V], uniform [B] fp32 in [0, 1) -> classes [B]; none that weighs 0."""
    cumulative = weights.cumsum(dim=-1)
    threshold = (uniform[:, None].double() * cumulative[:, -1:]).long()
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
