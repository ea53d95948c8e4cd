"""Every law on every registered model."""

import pytest

from tests import laws
from waveform.models import registry

every_case = pytest.mark.parametrize("case", laws.params())


def test_every_registered_model_has_cases() -> None:
    assert set(registry.model_names()) == set(laws.CONFIGS), "add small configurations to tests/laws.py"


@every_case
def test_causality(case: laws.Case) -> None:
    laws.check_causality(case)


@every_case
def test_chunks(case: laws.Case) -> None:
    laws.check_chunks(case)


@every_case
def test_decoder_equals_teacher_forcing(case: laws.Case) -> None:
    laws.check_decoder(case)


@every_case
def test_state_is_fixed(case: laws.Case) -> None:
    laws.check_state(case)


@every_case
def test_state_keeps_its_dtype(case: laws.Case) -> None:
    laws.check_state_dtype(case)


@every_case
def test_state_carries_gradient_only_when_asked(case: laws.Case) -> None:
    laws.check_gradient_in_state(case)


@every_case
def test_rows_are_independent(case: laws.Case) -> None:
    laws.check_rows_are_independent(case)


@every_case
def test_a_reset_row_equals_a_fresh_one(case: laws.Case) -> None:
    laws.check_reset_rows(case)


@pytest.mark.parametrize("carry_gradient", [False, True], ids=["no BPTT", "BPTT"])
@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if laws.trains_without_bptt(case)]))
def test_each_loss_reaches_its_own_parameters(case: laws.Case, carry_gradient: bool) -> None:
    laws.check_gradients_of_parameters(case, carry_gradient=carry_gradient)


@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if not laws.trains_without_bptt(case)]))
def test_task_loss_alone_trains_the_compressor(case: laws.Case) -> None:
    laws.check_task_loss_alone(case)


@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if laws.reads_no_values(case)]))
def test_training_never_waits_for_the_device(case: laws.Case) -> None:
    laws.check_never_waits(case)


@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if case.num_labels]))
def test_a_label_is_added_until_the_next(case: laws.Case) -> None:
    laws.check_labels(case)


@pytest.mark.parametrize("case", laws.params([case for case in laws.CASES if case.num_labels]))
def test_labels_begin_at_zero(case: laws.Case) -> None:
    laws.check_labels_begin_at_zero(case)
