"""The table of a comparison of runs on text."""

from recipes.text_figures import rows_of


def test_runs_of_two_recipes_are_compared_by_what_both_have() -> None:
    known = {"model": "lstm", "nats_per_token": 1.0, "num_parameters": 1, "train_tokens_seen": 5e4, "train_seconds": 1}
    known |= {"difference_nats": 0.1, "interval_95": None, "bits_per_byte": 2.0, "unit": "token"}
    first = {**known, "run": "a/run", "headline": "bits_per_byte", "word_perplexity": 3.0}
    header, rows = rows_of([first, {**known, "run": "b/run", "headline": "bits_per_character", "origin": "c"}])
    assert header[:3] == ["run", "bits per byte", "nats/token"] and [row[1] for row in rows] == ["2.0000", "2.0000"]
    assert [row[0] for row in rows] == ["a/run (lstm)", "b/run (lstm)"]  # the folders have one name
    assert [row[-1] for row in rows] == ["0.05 M tokens, 1 s", "0.05 M tokens, 1 s, after c"]
