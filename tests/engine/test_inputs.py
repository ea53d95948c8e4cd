"""The inputs that predict an utterance's tokens."""

import torch

from waveform.engine.inputs import shift_right


def test_each_input_is_the_token_before_and_the_first_begins_the_utterance() -> None:
    tokens = torch.tensor([[3, 1, 2], [0, 0, 4]])
    assert shift_right(tokens, vocab_size=5).tolist() == [[5, 3, 1], [5, 0, 0]]
    assert shift_right(tokens[0, :1], vocab_size=5).tolist() == [5]
