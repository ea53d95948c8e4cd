"""What `recipes compare` adds to single evaluations: gains by frequency, as in Table 7 of Rae et al. 2019."""

from typing import Any

from recipes.metrics import FREQUENCY_BUCKETS
from recipes.text_figures import frequencies_of, relative_gain


def figures(run: str, by_frequency: list[float], total: float) -> dict[str, Any]:
    by_bucket = zip(FREQUENCY_BUCKETS, by_frequency, strict=True)
    perplexities = {bucket: {"perplexity": value} for bucket, value in by_bucket}
    return {"run": run, "perplexity": total, "perplexity_by_frequency": perplexities}


def test_gains_are_table_7s() -> None:
    """The paper prints 2.6%, 9.5%, 21%, 19.9% and 5.8%; its third does not follow from the perplexities it prints."""
    first = figures("runs/txl", [7.8, 61.2, 188, 1123], 18.1)
    compressive = figures("runs/ct", [7.6, 55.9, 158, 937], 17.1)
    compressive["relative_gain_over_first"] = relative_gain(compressive, first)
    header, rows = frequencies_of([first, compressive])
    assert header == ["run", ">10K", "1K-10K", "100-1K", "<100", "all"]
    assert rows[0] == ["txl", "7.80", "61.20", "188.00", "1,123.00", "18.10"]
    assert rows[2] == ["  gain over the first", "+2.6%", "+9.5%", "+19.0%", "+19.9%", "+5.8%"]
