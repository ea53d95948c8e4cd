"""`python -m recipes sample`: how runs on text continue a prompt, or the beginnings of held-out documents."""

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from recipes.corpora.tokenizers import UNKNOWN, TextTokenizer, detokenize, load_tokenizer
from waveform.domain import domain_of_runs
from waveform.engine.dataset import is_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import SCORING_TIMEOUT_S, World, job
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions, own_tokens
from waveform.system.console import counted
from waveform.system.errors import UserError
from waveform.system.rules import check_rules, whole_number

NUCLEUS = 0.98  # Rae et al. 2019, appendix E


@dataclass(frozen=True)
class Prefixes:
    """Held-out documents to continue (Dai et al. 2019 and Rae et al. 2019, appendices E)."""

    # How many, evenly spaced; a split with fewer is cut into pieces; None: continue a prompt instead
    documents: Annotated[int, whole_number(1)] | None = None
    prefix: Annotated[int, whole_number(1)] = 512  # tokens of each that the model reads
    split: str = "test"

    def __post_init__(self) -> None:
        check_rules(self)


def sample(
    run_dir: Path | str,
    *,
    prompt: str = "",
    num_tokens: int = 512,
    sampling: SamplingConfig | None = None,
    prefixes: Prefixes | None = None,
    device: str | None = None,
) -> str | None:
    """Return, as text, the prompt and the `num_tokens` tokens with which a run continues it.

    prompt: a text, or the path of a file that contains it. prefixes: continue documents instead; each is shown as far
    as the model read it, continued by the model, and as it goes on. Without top_k or top_p the nucleus is 0.98. Under
    torchrun every process calls this and continues a share of the documents; the first one returns the text. Raises
    UserError for settings out of range, for a prompt that the vocabulary cannot express, and if there is no complete
    run or its data set, which contains the vocabulary, is gone.
    """
    if num_tokens < 1:
        raise UserError(f"--tokens is {num_tokens}; it must be at least 1")
    sampling, prefixes = sampling or SamplingConfig(), prefixes or Prefixes()
    if sampling.int8:
        raise UserError("--int8 is for runs on audio; leave it out")
    if sampling.top_k is None and sampling.top_p is None:
        sampling = replace(sampling, top_p=NUCLEUS)
    if prefixes.documents is None and prefixes != Prefixes():
        raise UserError("--prefix and --split are for --documents; give it too")
    if prompt and prefixes.documents is not None:
        raise UserError("--prompt and --documents both say what to continue; give one of them")
    with job(device=device, timeout_s=SCORING_TIMEOUT_S) as world:
        run = domain_of_runs([run_dir]).load_to_score(run_dir, EvaluateOptions(), world=world)
        if prefixes.documents is not None:
            every = continue_documents(run, prefixes, num_tokens=num_tokens, sampling=sampling, world=world)
            text = "\n".join(
                f"=== {one.name}: {counted(one.num_read, 'token')} of the {prefixes.split} split\n{one.read}\n"
                f"=== continued by {run.name}, step {run.step}\n{one.made}\n=== as it goes on\n{one.truth}\n"
                for one in every
            )
            return text if world.is_first else None
        if not world.is_first:  # there is one stream
            return None
        tokenizer = tokenizer_of(run)
        ids = _prompt_ids(tokenizer, prompt)
        return tokenizer.decode([*ids.tolist(), *_continue_tokens(run, ids, num_tokens=num_tokens, sampling=sampling)])


def tokenizer_of(run: TrainedRun) -> TextTokenizer:
    """The tokenizer in the run's data set. Raises UserError if it is gone, or its size is not that of training."""
    folder = Path(run.config["dataset"]["path"])
    if not is_dataset(folder):
        raise UserError(f"the data set of {run.given}, {folder}, which contains its vocabulary, is gone; put it back")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != run.config["dataset"]["vocab_size"]:
        raise UserError(f"{folder} has a different vocabulary from the one that {run.given} was trained with")
    return tokenizer


def _prompt_ids(tokenizer: TextTokenizer, prompt: str) -> np.ndarray:
    """Return the token ids [n] int64 of the prompt; say on stderr how many of its words are unknown."""
    try:
        text = Path(prompt).read_bytes().decode() if os.path.isfile(prompt) else prompt
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompt {prompt} as UTF-8 text: {error}") from error
    ids = tokenizer.encode_prompt(text).astype(np.int64)
    if tokenizer.kind == "words" and (unknown := int((ids == tokenizer.encode_prompt(UNKNOWN)[0]).sum())):
        print(f"note: {unknown} of {len(ids)} words of the prompt are not in the vocabulary", file=sys.stderr)
    return ids


def _continue_tokens(run: TrainedRun, ids: np.ndarray, *, num_tokens: int, sampling: SamplingConfig) -> list[int]:
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
    """The beginning of a held-out document, how a run continues it, and how it really goes on, as text."""

    name: str
    num_read: int  # tokens of it that the run has read
    read: str
    made: str
    truth: str


def continue_documents(
    run: TrainedRun, prefixes: Prefixes, *, num_tokens: int, sampling: SamplingConfig, world: World | None = None
) -> list[Continuation]:
    """Continue the beginnings of held-out documents by `num_tokens` tokens. Raises UserError if the data is gone."""
    tokenizer = tokenizer_of(run)
    tokens, chosen = _evenly_spaced(own_tokens(run, split=prefixes.split), prefixes.documents or 1)

    def continued(index: int) -> Continuation:
        read = tokens.read(index, start=0, stop=prefixes.prefix).astype(np.int64)
        made = _continue_tokens(run, read, num_tokens=num_tokens, sampling=replace(sampling, first_stream=index))
        truth = tokens.read(index, start=len(read), stop=len(read) + num_tokens)
        texts = (tokenizer.decode(ids) for ids in (read.tolist(), made, truth.tolist()))
        shown = map(detokenize, texts) if tokenizer.kind == "words" else texts
        return Continuation(tokens.names[index], len(read), *shown)

    return (world or World()).share([partial(continued, index) for index in chosen])


def _evenly_spaced(tokens: TokenSet, num: int) -> tuple[TokenSet, list[int]]:
    """Choose `num` documents of a split, by their index; if it has fewer, they are cut into pieces first."""
    if len(tokens) < num:
        tokens = tokens.cut(-(-tokens.num_tokens // num))
    num = min(num, len(tokens))
    return tokens, [i * len(tokens) // num for i in range(num)]
