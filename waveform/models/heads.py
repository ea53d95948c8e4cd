"""Output heads: hidden vectors to a distribution over the vocabulary.

Shape letters: B rows, T steps, D model width, V classes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SoftmaxHead(nn.Module):
    """A linear layer and a softmax."""

    def __init__(self, d_model: int, *, vocab_size: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, vocab_size)
        nn.init.normal_(self.projection.weight, std=0.02)
        nn.init.zeros_(self.projection.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] -> logits [B, T, V]."""
        return self.projection(hidden)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, T, D], targets [B, T] -> NLL in nats [B, T], computed in at least fp32."""
        logits = self.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
