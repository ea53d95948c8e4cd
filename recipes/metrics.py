"""The metrics that papers quote: bits per character or byte, and perplexity per token, per word and by frequency.

Each is a sum of nats divided once by a count.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.corpora.recipe import Recipe
from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import bits

NUM_DISTANCES = 10  # buckets of the distances of recall

# Rae et al. 2019, Table 7: by how often a word occurs in the training split.
FREQUENCY_BUCKETS = (">10K", "1K-10K", "100-1K", "<100")

UNITS = {
    "bits_per_character": "bits per character",
    "bits_per_byte": "bits per byte",
    "perplexity": "perplexity",
    "word_perplexity": "word-level perplexity",
    "bits_per_answer": "bits per answer",
}


def bits_per(nats: float, count: int) -> float:
    """Bits per item counted."""
    return bits(nats / count)


def perplexity(nats: float, count: int) -> float:
    """exp(nats per item); infinite if it exceeds the range of fp64."""
    mean = nats / count
    return math.exp(mean) if mean < 700 else math.inf


def frequency_bucket(train_counts: np.ndarray) -> Tensor:
    """Counts of each token in the training split [V] -> its index in FREQUENCY_BUCKETS [V]."""
    thresholds = np.array([100, 1_000, 10_001])
    return torch.from_numpy(3 - np.searchsorted(thresholds, train_counts, side="right"))


def text_metrics(result: Evaluation, recipe: Recipe, *, tokens: str, num_bytes: int, num_words: int) -> dict[str, Any]:
    """Return every metric that `tokens` allow, by name; `num_bytes` and `num_words` are those of the entire split."""
    nats = float(result.nats.sum())
    num_tokens = int(result.counts.sum())
    metrics: dict[str, Any] = {"nats_per_token": nats / num_tokens, "bits_per_token": bits_per(nats, num_tokens)}
    if tokens == "words":
        metrics["perplexity"] = perplexity(nats, num_tokens)
        if result.class_nats is not None and result.class_counts is not None:
            metrics["perplexity_by_frequency"] = {
                bucket: {"perplexity": perplexity(float(sum_), int(count)), "num_tokens": int(count)}
                for bucket, sum_, count in zip(
                    FREQUENCY_BUCKETS, _padded(result.class_nats), _padded(result.class_counts), strict=True
                )
                if count
            }
        return metrics
    if recipe.headline == "bits_per_character":  # of enwik8 and text8, whose characters are bytes
        # What published models do not know is not counted either.
        metrics["bits_per_character"] = bits_per(nats, num_tokens if tokens == "symbols" else num_bytes)
    else:
        metrics["bits_per_byte"] = bits_per(nats, num_bytes)
        metrics["word_perplexity"] = perplexity(nats, num_words)
    return metrics


def recall_metrics(result: Evaluation, *, chance_bits: float) -> dict[str, Any]:
    """Return bits per answer, in total and by equal buckets of distance; its classes are distances, 0 is no answer.

    chance_bits: of a model that remembers nothing. A bucket without answers is left out.
    """
    assert result.class_nats is not None and result.class_counts is not None
    nats, counts = result.class_nats, result.class_counts
    nats_per_token = float(result.nats.sum() / result.counts.sum())
    width = -(-(len(nats) - 1) // NUM_DISTANCES)
    starts = range(1, len(nats), width)
    return {
        "bits_per_answer": bits_per(float(nats[1:].sum()), int(counts[1:].sum())),
        "chance_bits": chance_bits,
        "bits_by_distance": [
            {
                "from": start,
                "to": start + width - 1,
                "bits": bits_per(float(nats[start : start + width].sum()), num_answers),
                "num_answers": num_answers,
            }
            for start in starts
            if (num_answers := int(counts[start : start + width].sum()))
        ],
        "nats_per_token": nats_per_token,
        "bits_per_token": bits(nats_per_token),
    }


def _padded(by_class: np.ndarray) -> np.ndarray:
    """Pad to one entry per bucket: the vocabulary may have no token of the last ones."""
    return np.pad(by_class, (0, len(FREQUENCY_BUCKETS) - len(by_class)))
