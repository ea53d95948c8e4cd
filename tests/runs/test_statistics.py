"""Intervals over utterances: those of the ratio estimator, which large samples approach, and None for a few."""

import numpy as np
import pytest

from waveform.engine.evaluator import Evaluation
from waveform.runs.statistics import interval_over_utterances, paired_interval

RNG = np.random.default_rng(1)
COUNTS = RNG.integers(10, 1000, 400)
NATS = COUNTS * (5 - COUNTS / 500 + RNG.standard_normal(400))  # long utterances cost less per token than short ones


def test_an_interval_over_utterances_is_that_of_the_sums() -> None:
    mean = NATS.sum() / COUNTS.sum()
    half = 1.96 * np.sqrt(np.square(NATS - mean * COUNTS).sum()) / COUNTS.sum()  # delta method
    low, high = interval_over_utterances(NATS, COUNTS, resamples=4000) or (0, 0)
    assert (low - mean, high - mean) == pytest.approx((-half, half), rel=0.07)


def test_a_paired_interval_leaves_out_what_two_models_share() -> None:
    names = [str(i) for i in range(400)]
    a, b = (Evaluation(names, nats, COUNTS, "utterance") for nats in (NATS + 0.25 * COUNTS, NATS))
    assert paired_interval(a, b) == pytest.approx([0.25, 0.25])


def test_a_few_utterances_have_no_interval() -> None:
    assert interval_over_utterances(NATS[:4], COUNTS[:4]) is None
    assert interval_over_utterances(NATS[:5], COUNTS[:5]) is not None
