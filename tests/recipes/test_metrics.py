"""The papers' metrics from sums and counts, gains by frequency as in Table 7 of Rae et al. 2019, and tables of runs."""

import math
from typing import Any

import numpy as np
import pytest

from recipes.corpora.catalogue import find_recipe
from recipes.metrics import FREQUENCY_BUCKETS, frequency_bucket, perplexity, recall_metrics, text_metrics
from recipes.text_figures import frequencies_of, rows_of, with_gain
from waveform.engine.evaluator import Evaluation

CLASSES = {"class_nats": np.array([4.0, 0.0, 36.0]), "class_counts": np.array([8, 0, 12])}
RESULT = Evaluation(["a", "b"], np.array([30.0, 10.0]), np.array([12, 8]), "utterance", **CLASSES)


def test_buckets_are_the_papers() -> None:
    counts = np.array([10**6, 10_001, 10_000, 1_000, 999, 100, 99, 0])
    names = [FREQUENCY_BUCKETS[i] for i in frequency_bucket(counts)]
    assert names == [">10K", ">10K", "1K-10K", "1K-10K", "100-1K", "100-1K", "<100", "<100"]


def test_words_have_a_perplexity_which_is_infinite_for_a_hopeless_model() -> None:
    metrics = text_metrics(RESULT, find_recipe("wikitext103"), tokens="words", num_bytes=77, num_words=15)
    by_frequency = metrics.pop("perplexity_by_frequency")
    assert metrics == {"perplexity": pytest.approx(math.exp(40 / 20))} and list(by_frequency) == [">10K", "100-1K"]
    assert by_frequency[">10K"] == {"perplexity": pytest.approx(math.exp(4 / 8)), "num_tokens": 8}
    assert by_frequency["100-1K"] == {"perplexity": pytest.approx(math.exp(3)), "num_tokens": 12}
    assert perplexity(1e6, 10) == math.inf and perplexity(6990.0, 10) == pytest.approx(math.exp(699))


@pytest.mark.parametrize(
    ("recipe", "tokens", "expected"),
    [
        ("pg19", "subwords", {"word_perplexity": math.exp(40 / 16), "bits_per_byte": 40 / 80 / math.log(2)}),
        ("text8", "characters", {"bits_per_character": 40 / 80 / math.log(2)}),
        ("text8", "symbols", {"bits_per_character": 40 / 20 / math.log(2)}),  # of a published model, per token
    ],
)
def test_nats_are_divided_by_what_papers_count(recipe: str, tokens: str, expected: dict[str, float]) -> None:
    """And there are no other metrics."""
    metrics = text_metrics(RESULT, find_recipe(recipe), tokens=tokens, num_bytes=80, num_words=16)
    assert metrics == pytest.approx(expected)


def test_recall_has_ten_equal_buckets_of_distances() -> None:
    counts = np.array([99, *[1] * 18, 0, 0])  # class 0 is no answer; the last bucket has none
    by_class = {"class_nats": np.log(2) * counts * np.arange(21), "class_counts": counts}
    found = recall_metrics(Evaluation(["a"], np.ones(1), np.ones(1), "utterance", **by_class), chance_bits=2.0)
    assert found["bits_per_answer"] == pytest.approx(sum(range(1, 19)) / 18) and found["chance_bits"] == 2.0
    buckets = [tuple(bucket.values()) for bucket in found["bits_by_distance"]]
    assert buckets == [(start, start + 1, pytest.approx(start + 0.5), 2) for start in range(1, 19, 2)]


def figures(run: str, by_frequency: list[float], total: float, *, num_tokens: int = 9) -> dict[str, Any]:
    by_bucket = zip(FREQUENCY_BUCKETS, by_frequency, strict=False)
    perplexities = {bucket: {"perplexity": value, "num_tokens": num_tokens} for bucket, value in by_bucket}
    known = {"run": run, "model": run.removeprefix("runs/")}
    return known | {"perplexity": total, "perplexity_by_frequency": perplexities}


def test_gains_are_table_7s() -> None:
    """The paper prints 2.6%, 9.5%, 21%, 19.9% and 5.8%; its third does not follow from the perplexities it prints."""
    first = figures("runs/txl", [7.8, 61.2, 188, 1123], 18.1)
    header, rows = frequencies_of([first, with_gain(figures("runs/ct", [7.6, 55.9, 158, 937], 17.1), first)])
    assert header == ["run", ">10K", "1K-10K", "100-1K", "<100", "all"]
    assert rows[0] == ["txl", "7.80", "61.20", "188.00", "1,123.00", "18.10"]
    assert rows[2] == ["  gain over the first", "+2.6%", "+9.5%", "+19.0%", "+19.9%", "+5.8%"]


def test_buckets_of_other_words_are_not_compared() -> None:
    """Runs with one vocabulary may have different training splits, of which one has no word of a bucket."""
    first = figures("runs/a", [7.8, 61.2], 18.1)
    fewer, others = figures("runs/b", [9], 17.1), figures("runs/c", [7.6, 55.9], 17.1, num_tokens=8)
    _, rows = frequencies_of([first, with_gain(fewer, first), with_gain(others, first)])
    assert rows[1:] == [["b", "9.00", "-", "17.10"], ["c", "7.60", "55.90", "17.10"]]


def test_runs_of_two_recipes_are_compared_by_what_both_have() -> None:
    known = {"model": "lstm", "nats_per_token": 1.0, "num_parameters": 1, "train_tokens_seen": 5e4, "train_seconds": 1}
    known |= {"difference_nats": 0.1, "interval_95": None, "bits_per_byte": 2.0, "unit": "token"}
    first = {**known, "run": "a/run", "headline": "bits_per_byte", "word_perplexity": 3.0}
    header, rows = rows_of([first, {**known, "run": "b/run", "headline": "bits_per_character", "origin": "c"}])
    assert header[:3] == ["run", "bits per byte", "nats/token"] and [row[1] for row in rows] == ["2.0000", "2.0000"]
    assert [row[0] for row in rows] == ["lstm (a/run)", "lstm (b/run)"]  # the folders have one name
    assert [row[-1] for row in rows] == ["0.05 M tokens, 1 s", "0.05 M tokens, 1 s, after c"]
