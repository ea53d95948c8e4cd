"""What a model reads: before each token its predecessor, and before the first the begin-of-utterance id and label."""

import torch
from torch import Tensor


def begin_of_utterance(vocab_size: int, label: int = 0) -> int:
    """The input before the first token of an utterance: V, one above the token ids 0..V - 1, plus its label's number.

    A model keeps the label in its state, and adds a vector for it to every input until the next utterance begins.
    """
    return vocab_size + label


def shift_right(tokens: Tensor, *, vocab_size: int, label: int = 0) -> Tensor:
    """Tokens [..., T] of utterances from their start -> the inputs [..., T] that predict them."""
    first = torch.full_like(tokens[..., :1], begin_of_utterance(vocab_size, label))
    return torch.cat([first, tokens[..., :-1]], dim=-1)
