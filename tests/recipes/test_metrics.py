"""The papers' metrics from sums and counts."""

import math

import numpy as np
import pytest

from recipes.corpora.catalogue import find_recipe
from recipes.metrics import FREQUENCY_BUCKETS, frequency_bucket, perplexity, text_metrics
from waveform.engine.evaluator import Evaluation

RESULT = Evaluation(
    ["a", "b"],
    np.array([30.0, 10.0]),
    np.array([12, 8]),
    "utterance",
    class_nats=np.array([4.0, 0.0, 36.0]),
    class_counts=np.array([8, 0, 12]),
)


def test_buckets_are_the_papers() -> None:
    counts = np.array([10**6, 10_001, 10_000, 1_000, 999, 100, 99, 0])
    names = [FREQUENCY_BUCKETS[i] for i in frequency_bucket(counts)]
    assert names == [">10K", ">10K", "1K-10K", "1K-10K", "100-1K", "100-1K", "<100", "<100"]


def test_words() -> None:
    metrics = text_metrics(RESULT, find_recipe("wikitext103"), tokens="words", num_bytes=77, num_words=15)
    assert metrics["perplexity"] == pytest.approx(math.exp(40 / 20))
    assert metrics["perplexity_by_frequency"] == {
        ">10K": {"perplexity": pytest.approx(math.exp(4 / 8)), "num_tokens": 8},
        "100-1K": {"perplexity": pytest.approx(math.exp(3)), "num_tokens": 12},
    }
    assert "bits_per_byte" not in metrics and "word_perplexity" not in metrics


def test_subwords_are_divided_by_words_and_bytes() -> None:
    metrics = text_metrics(RESULT, find_recipe("pg19"), tokens="subwords", num_bytes=80, num_words=16)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(40 / 16))
    assert metrics["bits_per_byte"] == pytest.approx(40 / 80 / math.log(2))
    assert "perplexity" not in metrics


def test_characters() -> None:
    metrics = text_metrics(RESULT, find_recipe("text8"), tokens="characters", num_bytes=20, num_words=5)
    assert metrics["bits_per_character"] == pytest.approx(2 / math.log(2))
    assert "word_perplexity" not in metrics


def test_a_hopeless_model_has_an_infinite_perplexity() -> None:
    assert perplexity(1e6, 10) == math.inf and perplexity(6990.0, 10) == pytest.approx(math.exp(699))
