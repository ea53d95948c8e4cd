"""Every law on every registered model."""

from collections.abc import Callable
from functools import partial

import pytest

from tests import laws
from waveform.models import registry

LAWS = [
    *(laws.check_causality, laws.check_chunks, laws.check_decoder, laws.check_rows_are_independent),
    *(laws.check_state, laws.check_state_dtype, laws.check_gradient_in_state, laws.check_reset_rows),
]
LAWS_OF_LABELS = [laws.check_labels, laws.check_labels_begin_at_zero]
by_law = partial(pytest.mark.parametrize, "law", ids=lambda law: law.__name__.removeprefix("check_"))


def test_every_registered_model_has_cases() -> None:
    assert set(registry.model_names()) == set(laws.CONFIGS), "add small configurations to tests/laws.py"


@by_law(LAWS)
@pytest.mark.parametrize("case", laws.params())
def test_law(case: laws.Case, law: Callable[[laws.Case], None]) -> None:
    law(case)


@pytest.mark.parametrize("carry_gradient", [False, True], ids=["no BPTT", "BPTT"])
@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if laws.trains_without_bptt(case)]))
def test_each_loss_reaches_its_own_parameters(case: laws.Case, carry_gradient: bool) -> None:
    laws.check_gradients_of_parameters(case, carry_gradient=carry_gradient)


@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if not laws.trains_without_bptt(case)]))
def test_task_loss_alone_trains_the_compressor(case: laws.Case) -> None:
    laws.check_task_loss_alone(case)


@by_law(LAWS_OF_LABELS)
@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if case.num_labels]))
def test_law_of_labels(case: laws.Case, law: Callable[[laws.Case], None]) -> None:
    law(case)
