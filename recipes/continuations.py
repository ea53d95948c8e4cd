"""How runs on text go on with a text: the beginnings of held-out documents, beside how these go on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from recipes.corpora.detokenize import detokenize
from recipes.corpora.tokenizers import TextTokenizer, load_tokenizer
from waveform.engine.dataset import is_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.token_set import TokenSet
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import own_tokens
from waveform.system.errors import UserError

NUCLEUS = 0.98  # Rae et al. 2019, appendix E


@dataclass(frozen=True)
class Prefixes:
    """Held-out documents to continue (Dai et al. 2019 and Rae et al. 2019, appendices E)."""

    documents: int | None = None  # how many, evenly spaced; a split of fewer is cut into pieces; None: a prompt instead
    prefix: int = 512  # tokens of each that the model reads
    split: str = "test"

    def __post_init__(self) -> None:
        if (self.documents is not None and self.documents < 1) or self.prefix < 1:
            raise UserError(f"--documents is {self.documents} and --prefix is {self.prefix}; both must be at least 1")


def tokenizer_of(run: TrainedRun) -> TextTokenizer:
    """The tokenizer in the run's data set. Raises UserError if it is gone, or is not the one of training."""
    folder = Path(run.config["dataset"]["path"])
    if not is_dataset(folder):
        raise UserError(f"the data set of {run.given}, {folder}, which contains its vocabulary, is gone; put it back")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != run.config["dataset"]["vocab_size"]:
        raise UserError(f"{folder} has a different vocabulary from the one that {run.given} was trained with")
    return tokenizer


def continue_tokens(run: TrainedRun, ids: np.ndarray, *, num_tokens: int, sampling: SamplingConfig) -> list[int]:
    """The tokens with which a run continues `ids` [n]."""
    made = sample_tokens(
        run.model,
        vocab_size=int(run.config["dataset"]["vocab_size"]),
        num_streams=1,
        num_steps=num_tokens,
        config=sampling,
        prompt=torch.from_numpy(ids) if len(ids) else None,
    )
    return made[0].tolist()


@dataclass(frozen=True)
class Continuation:
    """The beginning of a held-out document, what a run makes of it, and how it goes on, as text."""

    name: str
    num_read: int  # tokens of it that the run has read
    read: str
    made: str
    truth: str


def continue_documents(
    run: TrainedRun, prefixes: Prefixes, *, num_tokens: int, sampling: SamplingConfig
) -> list[Continuation]:
    """Continue the beginnings of held-out documents by `num_tokens` tokens. Raises UserError if the data is gone."""
    tokenizer = tokenizer_of(run)
    tokens = own_tokens(run, split=prefixes.split)

    def shown(ids: list[int]) -> str:
        text = tokenizer.decode(ids)
        return detokenize(text) if tokenizer.kind == "words" else text

    continuations = []
    tokens, chosen = _evenly_spaced(tokens, prefixes.documents or 1)
    for index in chosen:
        read = tokens.read(index, start=0, stop=prefixes.prefix).astype(np.int64)
        made = continue_tokens(run, read, num_tokens=num_tokens, sampling=sampling)
        truth = tokens.read(index, start=len(read), stop=len(read) + num_tokens)
        texts = (shown(ids) for ids in (read.tolist(), made, truth.tolist()))
        continuations.append(Continuation(tokens.names[index], len(read), *texts))
    return continuations


def _evenly_spaced(tokens: TokenSet, num: int) -> tuple[TokenSet, list[int]]:
    """`num` documents of a split, by their index; those of a split that has fewer are cut into pieces first."""
    if len(tokens) < num:
        tokens = tokens.cut(-(-tokens.num_tokens // num))
    num = min(num, len(tokens))
    return tokens, [i * len(tokens) // num for i in range(num)]
