"""What a model reads: before each token its predecessor, and before the first the begin-of-utterance id."""

import torch
from torch import Tensor


def begin_of_utterance(vocab_size: int) -> int:
    """The input before the first token of an utterance: V, one above the token ids 0..V - 1."""
    return vocab_size


def shift_right(tokens: Tensor, *, vocab_size: int) -> Tensor:
    """Tokens [..., T] of utterances from their start -> the inputs [..., T] that predict them."""
    first = torch.full_like(tokens[..., :1], begin_of_utterance(vocab_size))
    return torch.cat([first, tokens[..., :-1]], dim=-1)
