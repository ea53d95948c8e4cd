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
    nats, num_tokens = float(result.nats.sum()), int(result.counts.sum())
    if tokens == "words":
        assert result.class_nats is not None and result.class_counts is not None
        # The vocabulary may have no token of the last buckets.
        by_bucket = zip(FREQUENCY_BUCKETS, result.class_nats.tolist(), result.class_counts.tolist(), strict=False)
        return {
            "perplexity": perplexity(nats, num_tokens),
            "perplexity_by_frequency": {
                bucket: {"perplexity": perplexity(of_bucket, count), "num_tokens": count}
                for bucket, of_bucket, count in by_bucket
                if count
            },
        }
    if recipe.headline == "bits_per_character":  # of enwik8 and text8, whose characters are bytes
        # Characters that a published model leaves out do not count either.
        return {"bits_per_character": bits_per(nats, num_tokens if tokens == "symbols" else num_bytes)}
    return {"bits_per_byte": bits_per(nats, num_bytes), "word_perplexity": perplexity(nats, num_words)}


def recall_metrics(result: Evaluation, *, chance_bits: float) -> dict[str, Any]:
    """Return bits per answer, in total and by equal buckets of distance; its classes are distances, 0: not an answer.

    chance_bits: of a model that remembers nothing. A bucket without answers is left out.
    """
    assert result.class_nats is not None and result.class_counts is not None
    nats, counts = result.class_nats, result.class_counts
    width = -(-(len(nats) - 1) // NUM_DISTANCES)
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
            for start in range(1, len(nats), width)
            if (num_answers := int(counts[start : start + width].sum()))
        ],
    }
