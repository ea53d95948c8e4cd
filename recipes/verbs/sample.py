"""`python -m recipes sample`: text that continues a prompt, or the beginnings of held-out documents."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipes.continuations import NUCLEUS, Continuation, Prefixes, continue_documents, continue_tokens, tokenizer_of
from recipes.corpora.tokenizers import UNKNOWN, TextTokenizer
from recipes.text import load
from waveform.engine.sampler import SamplingConfig
from waveform.runs.opened import TrainedRun
from waveform.system.errors import UserError


def sample(
    run_dir: Path | str,
    *,
    prompt: str = "",
    num_tokens: int = 512,
    sampling: SamplingConfig | None = None,
    prefixes: Prefixes | None = None,
    device: str | None = None,
) -> str:
    """Return, as text, the prompt and the `num_tokens` tokens with which a run continues it.

    prompt: a text, or the path of a file that contains it. prefixes: continue documents instead; each is shown as far
    as the model read it, continued by the model, and as it goes on. Without top_k or top_p the nucleus is 0.98. Raises
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
    if prompt and prefixes.documents is not None:
        raise UserError("--prompt and --documents both say what to continue; give one of them")
    run = load(run_dir, device=device)
    if prefixes.documents is not None:
        continuations = continue_documents(run, prefixes, num_tokens=num_tokens, sampling=sampling)
        return _describe(run, continuations, split=prefixes.split)
    tokenizer = tokenizer_of(run)
    ids = _prompt_ids(tokenizer, prompt)
    return tokenizer.decode([*ids.tolist(), *continue_tokens(run, ids, num_tokens=num_tokens, sampling=sampling)])


def _describe(run: TrainedRun, continuations: list[Continuation], *, split: str) -> str:
    parts = []
    for one in continuations:
        parts += [
            f"=== {one.name}: {one.num_read} tokens of the {split} split",
            one.read,
            f"=== continued by {run.name}, step {run.step}",
            one.made,
            "=== as it goes on",
            one.truth,
            "",
        ]
    return "\n".join(parts)


def _prompt_ids(tokenizer: TextTokenizer, prompt: str) -> np.ndarray:
    """Return the token ids [n] int64 of the prompt; say on stderr how many of its words are unknown."""
    try:
        is_file = Path(prompt).is_file()
    except (OSError, ValueError):  # too long, or otherwise not a path
        is_file = False
    if is_file:
        try:
            prompt = Path(prompt).read_bytes().decode()
        except OSError as error:
            raise UserError(f"cannot read --prompt {prompt}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"--prompt {prompt} is not UTF-8 text ({error.reason})") from error
    ids = tokenizer.encode_prompt(prompt).astype(np.int64)
    if tokenizer.kind == "words":
        unknown = int((ids == tokenizer.encode_prompt(UNKNOWN)[0]).sum())
        if unknown:
            print(f"note: {unknown} of {len(ids)} words of the prompt are not in the vocabulary", file=sys.stderr)
    return ids
