"""A package of your own adds a compression function by one class and one entry point; it then obeys the laws."""

from pathlib import Path

import pytest

from tests import laws
from tests.recipes.corpus_files import write_folder
from waveform.models.registry import build
from waveform.system.errors import UserError

_MODULE = """
import torch
from torch import Tensor, nn
from waveform.models.compression import Compressor

class ByUse(Compressor):
    '''The mean of each group, weighted by the attention that its slots received, projected.'''

    uses_attention = True

    def __init__(self, d_model: int, *, rate: int) -> None:
        super().__init__(d_model, rate=rate)
        self.projection = nn.Linear(d_model, d_model)

    def initialise(self) -> None:
        nn.init.eye_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        weights = usage_Bn.unflatten(1, (-1, self.rate)).softmax(dim=2).to(slots_BnD.dtype)
        return self.projection((slots_BnD.unflatten(1, (-1, self.rate)) * weights[..., None]).sum(dim=2))
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> laws.Case:
    """A small model with the compression function `by_use` of an installed package; its `wrong` is not one."""
    points = "[waveform.compressions]\nby_use = my_compression:ByUse\nwrong = my_compression:Tensor\n"
    files = {"my_compression.py": _MODULE, "my_compression-1.0.dist-info/entry_points.txt": points}
    monkeypatch.syspath_prepend(write_folder(tmp_path, files))
    variants = laws.CONFIGS["compressive_transformer"]
    monkeypatch.setitem(variants, "by-use", {**variants["conv-ragged"], "compression": "by_use"})
    return laws.Case("compressive_transformer", "by-use")


def test_a_compression_function_of_your_own_obeys_the_laws(case: laws.Case) -> None:
    laws.check_chunks(case)
    laws.check_decoder(case)
    laws.check_reset_rows(case)
    laws.check_gradients_of_parameters(case, carry_gradient=False)


def test_it_starts_as_it_says(case: laws.Case) -> None:
    weight = build(case.model, vocab_size=8, **case.fields).layers[1].compressor.projection.weight
    assert weight.trace() == len(weight) and weight.count_nonzero() == len(weight)


def test_a_wrong_function_is_refused(case: laws.Case) -> None:
    with pytest.raises(UserError, match=r"^model.compression is 'min'; choose one of conv, .*, by_use, wrong$"):
        build(case.model, vocab_size=8, **case.fields | {"compression": "min"})
    with pytest.raises(UserError, match=r"'wrong' of the group waveform.compressions must name a subclass"):
        build(case.model, vocab_size=8, **case.fields | {"compression": "wrong"})
