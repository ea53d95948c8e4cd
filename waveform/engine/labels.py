"""Labels of utterances (a speaker, a word, a class): what they may be called, and how a run numbers them.

A data set knows the name of each utterance's label. A run numbers the names that its training split has, from 1 on;
0 is unknown: an utterance without a label, or with one that the run was not trained on.
"""

import hashlib
import json
from collections.abc import Iterable

from waveform.engine.token_set import TokenSet
from waveform.system.errors import UserError

UNKNOWN = 0
MAX_LABELS = 10_000  # their names are in every run's config.yaml
MAX_LABEL_BYTES = 100  # they are in names of files, too
# Brackets and $ mean something else in a configuration, slashes in the name of a file.
NOT_IN_LABELS = "$[]{}/\\"
LABELS_ARE = f"1 to {MAX_LABEL_BYTES} bytes, all printable, none of {NOT_IN_LABELS}, and no space at an end"


def is_label(name: str) -> bool:
    """Whether an utterance may have the label `name`; `LABELS_ARE` says it to a user."""
    if not name.isprintable() or name != name.strip() or set(NOT_IN_LABELS) & set(name):
        return False
    return 0 < len(name.encode()) <= MAX_LABEL_BYTES


def label_names(tokens: TokenSet) -> list[str]:
    """The labels that a run trained on `tokens` knows, in the order of their numbers. Raises UserError if too many."""
    names = sorted({label for label in tokens.labels if label is not None})
    if len(names) > MAX_LABELS:
        raise UserError(f"the training data has {len(names):,} labels; a run can have {MAX_LABELS:,}")
    return names


def labels_checksum(splits: Iterable[TokenSet]) -> str:
    """Hex digest of which utterance has which label."""
    digest = hashlib.blake2b(digest_size=16)
    for tokens in splits:
        digest.update(json.dumps([tokens.names, tokens.labels]).encode())
    return digest.hexdigest()
