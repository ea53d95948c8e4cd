"""`python -m recipes topics`: what a folder of texts is about, as in Table 10 of Rae et al. 2019 for PG-19.

Latent Dirichlet allocation (Blei, Ng and Jordan 2003) by scikit-learn; its settings here are our own.
"""

from pathlib import Path
from typing import Any

from recipes.corpora.documents import Document, read_text
from recipes.corpora.sources import open_source
from waveform.system.atomic import require_writable
from waveform.system.errors import UserError
from waveform.system.output import write_json

_MOST_DOCUMENTS = 0.95  # a word in a larger share of the documents tells none of them apart
_VOCABULARY = 20_000  # the most frequent words that are left
_WORDS = 15  # shown of each topic, as in Table 10


def topics(source: Path | str, *, num_topics: int = 7, json_file: Path | str | None = None) -> list[dict[str, Any]]:
    """Print the topics of the .txt files in a folder or an archive, each of which is a document; return their figures.

    num_topics: 7 as in Table 10. Each topic has its `share` of all words, and its most probable words with their
    probabilities, the largest topic first. Common English words are left out. Raises UserError for fewer than two
    texts.
    """
    if num_topics < 1:
        raise UserError(f"--topics is {num_topics}; it must be at least 1")
    require_writable(json_file, option="--json")
    from sklearn.decomposition import LatentDirichletAllocation  # slow to import
    from sklearn.feature_extraction.text import CountVectorizer

    opened = open_source(Path(source))
    files = opened.texts
    if len(files) < 2:
        raise UserError(f"{source} contains {len(files)} .txt files that are not empty; topics need at least 2")
    counter = CountVectorizer(stop_words="english", max_df=_MOST_DOCUMENTS, max_features=_VOCABULARY)
    try:
        counts = counter.fit_transform("".join(read_text(Document.whole(opened, file))) for file in files)
    except ValueError as error:  # scikit-learn's, for an empty vocabulary
        raise UserError(f"{source} has no words that tell its documents apart; topics need other texts") from error
    model = LatentDirichletAllocation(n_components=num_topics, random_state=0).fit(counts)
    names, total = counter.get_feature_names_out(), model.components_.sum()
    found: list[dict[str, Any]] = []
    for weights in sorted(model.components_, key=lambda weights: -weights.sum()):
        best = weights.argsort()[::-1][:_WORDS]
        share = float(weights.sum() / total)
        found.append({"share": share, "words": {str(names[i]): float(weights[i] / weights.sum()) for i in best}})
    print(f"{num_topics} topics of {len(files):,} documents, by their share of the words")
    for topic in found:
        print(f"{topic['share']:>6.1%}  {', '.join(topic['words'])}")
    write_json(json_file, found)
    return found
