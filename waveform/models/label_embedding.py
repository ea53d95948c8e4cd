"""Adds the vector of a row's label (a speaker, a word, a class) to each of its inputs, before a model's first layer.

An utterance's label comes with its begin-of-utterance input, V + label, and is then kept in the model's state until the
row's next one, so nothing but that one input knows of labels, and whatever carries state carries the label. Label 0 is
unknown: V + 0 is the begin-of-utterance input of models without labels.

Shape letters: B rows, T steps, N labels with unknown, D model width, V tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# In a model's state: the label of each row, [B] int64 on the device; nothing for a model without labels.
RowLabels = tuple[Tensor, ...]


class LabelEmbedding(nn.Module):
    """A vector for each label. All start at zero, so a new model computes what it would without labels."""

    def __init__(self, d_model: int, *, num_labels: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.table = nn.Parameter(torch.zeros(num_labels, d_model))  # [N, D]

    def init_state(self, batch_size: int, *, device: torch.device | str) -> RowLabels:
        """The labels of rows that have read nothing: unknown."""
        return (torch.zeros(batch_size, dtype=torch.int64, device=device),)

    def read(self, inputs: Tensor, rows: RowLabels) -> tuple[Tensor, Tensor, RowLabels]:
        """inputs [B, T] in 0..V + N - 1, read by rows with these labels -> tokens [B, T] in 0..V, the label of each in
        0..N - 1, and the rows' labels after the last. Labels may change anywhere within a call.
        """
        begins = inputs >= self.vocab_size
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        last_begin = torch.where(begins, steps, -1).cummax(dim=1).values  # -1: it was in an earlier call
        begun = (inputs - self.vocab_size).gather(1, last_begin.clamp(min=0))
        labels = torch.where(last_begin < 0, rows[0][:, None], begun)
        return inputs.clamp(max=self.vocab_size), labels, (labels[:, -1].contiguous(),)

    def step(self, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One step of a decoder: inputs [B] -> tokens [B] in 0..V and vectors [B, D]; changes `rows` [B] in place."""
        rows.copy_(torch.where(inputs >= self.vocab_size, inputs - self.vocab_size, rows))
        return inputs.clamp(max=self.vocab_size), self(rows)

    def forward(self, labels: Tensor) -> Tensor:
        """labels [...] -> vectors [..., D]."""
        return F.embedding(labels, self.table)
