"""`python -m recipes sample`: text that continues a prompt."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from recipes.corpora.tokenizers import UNKNOWN, TextTokenizer, load_tokenizer
from recipes.text import load
from waveform.engine.dataset import is_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.system.errors import UserError

NUCLEUS = 0.98  # Rae et al. 2019, appendix E


def sample(
    run_dir: Path | str,
    *,
    prompt: str = "",
    num_tokens: int = 512,
    sampling: SamplingConfig | None = None,
    device: str | None = None,
) -> str:
    """Return, as text, the prompt and the `num_tokens` tokens with which a run continues it.

    prompt: a text, or the path of a file that contains it. Without top_k or top_p the nucleus is 0.98. Raises UserError
    for settings out of range, for a prompt that the vocabulary cannot express, and if there is no complete run or its
    data set, which contains the vocabulary, is gone.
    """
    if num_tokens < 1:
        raise UserError(f"--tokens is {num_tokens}; it must be at least 1")
    sampling = sampling or SamplingConfig()
    if sampling.top_k is None and sampling.top_p is None:
        sampling = replace(sampling, top_p=NUCLEUS)
    run = load(run_dir, device=device)
    folder = Path(run.config["dataset"]["path"])
    if not is_dataset(folder):
        raise UserError(f"the data set of {run_dir}, {folder}, which contains its vocabulary, is gone; put it back")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != run.config["dataset"]["vocab_size"]:
        raise UserError(f"{folder} has a different vocabulary from the one that {run_dir} was trained with")
    ids = _prompt_ids(tokenizer, prompt)
    made = sample_tokens(
        run.model,
        vocab_size=tokenizer.vocab_size,
        num_streams=1,
        num_steps=num_tokens,
        config=sampling,
        prompt=torch.from_numpy(ids) if len(ids) else None,
    )
    return tokenizer.decode([*ids.tolist(), *made[0].tolist()])


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
