"""Text as it is read from the tokens of published corpora, which have spaces around punctuation: for samples only.

Undoes what the corpora's own tokenizers did (WikiText-103's " @-@ ", Penn Treebank's " 's "), as far as that is known:
the sides of a quotation mark are told by counting.
"""

import re

_JOINED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), ("`` ", '"'), (" ''", '"'))
_BEFORE = re.compile(r" +([,.;:!?%)\]}]|n't\b|'(?:s|S|re|ve|ll|d|m)\b)")
_AFTER = re.compile(r"([(\[{$£€]) +")
_QUOTED = re.compile(r'(^|\s)" ?([^"\n]*?) ?"(?=\s|[,.;:!?)]|$)')


def detokenize(text: str) -> str:
    """Return `text` with spaces as in print."""
    for token, written in _JOINED:
        text = text.replace(token, written)
    text = _QUOTED.sub(r'\1"\2"', text)
    text = _AFTER.sub(r"\1", _BEFORE.sub(r"\1", text))
    return "\n".join(line.strip() for line in text.split("\n"))
