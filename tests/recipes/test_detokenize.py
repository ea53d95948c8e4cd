"""Samples read as print: spaces around punctuation go where the corpora's tokenizers came from."""

import pytest

from recipes.corpora.detokenize import detokenize


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("a well @-@ known sum of 1 @,@ 234 @.@ 5 , or so .", "a well-known sum of 1,234.5, or so."),
        ("the dog 's tail ( the long one ) did n't wag ; why ?", "the dog's tail (the long one) didn't wag; why?"),
        ('he said " wait " , and " go " .', 'he said "wait", and "go".'),
        ("`` no , '' she said", '"no," she said'),
        (" = Title = \n a line . \n", "= Title =\na line.\n"),
        ("rock ' n roll costs $ 5 , <unk> said", "rock ' n roll costs $5, <unk> said"),
    ],
)
def test_punctuation_is_joined(tokens: str, text: str) -> None:
    assert detokenize(tokens) == text
