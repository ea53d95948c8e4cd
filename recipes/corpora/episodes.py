"""Draws episodes of recall and writes them as a data set; a second one says how far back each answer was last seen.

Shape letters: E episodes, T tokens of each, M mentions of a key, K keys.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipes.corpora.documents import END_OF_LINE, SPLITS
from recipes.corpora.recall import NAME, RecallConfig
from recipes.corpora.tokenizers import UNKNOWN, WordTokenizer, save_tokenizer
from waveform.engine.dataset import Dataset, read_dataset, write_dataset
from waveform.engine.shards import ShardWriter
from waveform.engine.token_set import TokenSet
from waveform.runs.opened import TrainedRun
from waveform.system.atomic import explain_write_errors
from waveform.system.errors import UserError
from waveform.system.progress import Progress

_DISTANCES = "distances"  # folder, in the data set, of the second data set: the distance of each token
_BLOCK_TOKENS = 1 << 17  # made at a time


def vocabulary(config: RecallConfig) -> list[str]:
    """Return the words of recall in the order of their ids: filler, keys, facts, and two that stay unused."""
    keys = [f"k{key}" for key in range(config.keys)]
    facts = [f"{key}={value}" for key in keys for value in range(config.values)]
    return [".", *keys, *facts, END_OF_LINE, UNKNOWN]


class Episodes(NamedTuple):
    """Tokens, and how far back the fact of each answer was last seen."""

    tokens_ET: np.ndarray
    distances_ET: np.ndarray  # steps from an answer back to its fact; 0: not an answer


def make_episodes(num: int, config: RecallConfig, rng: np.random.Generator) -> Episodes:
    """Draw `num` episodes."""
    num_places, num_mentions = config.episode // 2, config.mentions
    # Keys stand at even places, each followed by its fact.
    places_EM = 2 * np.sort(rng.random((num, num_places)).argsort(axis=1)[:, :num_mentions], axis=1)
    frequency_K = 1 / np.arange(1, config.keys + 1)
    ranks_EM = rng.choice(config.keys, size=(num, num_mentions), p=frequency_K / frequency_K.sum())
    key_of_rank_EK = rng.random((num, config.keys)).argsort(axis=1)
    keys_EM = np.take_along_axis(key_of_rank_EK, ranks_EM, axis=1)
    values_EM = np.take_along_axis(rng.integers(config.values, size=(num, config.keys)), keys_EM, axis=1)
    tokens_ET = np.zeros((num, config.episode), dtype=np.int32)
    np.put_along_axis(tokens_ET, places_EM, 1 + keys_EM, axis=1)
    np.put_along_axis(tokens_ET, places_EM + 1, 1 + config.keys + keys_EM * config.values + values_EM, axis=1)
    distances_EM = np.zeros_like(places_EM)
    last_EK = np.full((num, config.keys), -1)
    rows = np.arange(num)
    for i in range(num_mentions):
        key, place = keys_EM[:, i], places_EM[:, i]
        last = last_EK[rows, key]
        distances_EM[:, i] = np.where(last >= 0, place - last, 0)
        last_EK[rows, key] = place
    distances_ET = np.zeros_like(tokens_ET)
    np.put_along_axis(distances_ET, places_EM + 1, distances_EM, axis=1)
    return Episodes(tokens_ET, distances_ET)


def write_recall(folder: Path, config: RecallConfig, show_progress: bool) -> str:
    """Write the data set, and beside its tokens the distance of each; return what it contains.

    Raises UserError if it cannot be written, and if a split has no answers.
    """
    tokenizer = WordTokenizer(vocabulary(config))

    with explain_write_errors(folder):
        (folder / _DISTANCES).mkdir()
    total = sum(getattr(config, split) for split in SPLITS)
    lines = [
        f"{NAME} of {config.keys} keys with {config.values} values, {config.chance_bits:.2f} bits per answer by chance"
    ]
    block = max(1, _BLOCK_TOKENS // config.episode)
    with Progress(f"prepare {NAME}", total=total, unit="episode", enabled=show_progress) as progress:
        for number, split in enumerate(SPLITS):
            rng, num_episodes = np.random.default_rng([config.seed, number]), getattr(config, split)
            num_answers = 0
            name = f"{split}.shard"
            with (
                ShardWriter(folder / name, vocab_size=tokenizer.vocab_size) as tokens,
                ShardWriter(folder / _DISTANCES / name, vocab_size=config.episode) as distances,
            ):
                for first in range(0, num_episodes, block):
                    episodes = make_episodes(min(block, num_episodes - first), config, rng)
                    num_answers += int(np.count_nonzero(episodes.distances_ET))
                    for i, (tokens_T, distances_T) in enumerate(zip(*episodes, strict=True), start=first):
                        tokens.write(f"{split}-{i:08d}", [tokens_T])
                        distances.write(f"{split}-{i:08d}", [distances_T])
                        progress.update()
            if not num_answers:  # there would be nothing to report
                raise UserError(
                    f"no key comes up twice in the {split} split; lower corpus.keys ({config.keys}) or corpus.fillers, "
                    f"or raise corpus.episode or corpus.{split}"
                )
            num_tokens = num_episodes * config.episode
            lines.append(
                f"  {split:5}  {num_tokens:>13,} tokens  {num_answers:>11,} answers  in {num_episodes:,} episodes"
            )
    save_tokenizer(tokenizer, folder)
    modality = {"kind": "text", "recipe": NAME, "tokens": tokenizer.kind, "chance_bits": config.chance_bits}
    splits, sources = {split: [f"{split}.shard"] for split in SPLITS}, {"checked": True, "settings": vars(config)}
    for into, vocab_size in ((folder, tokenizer.vocab_size), (folder / _DISTANCES, config.episode)):
        write_dataset(Dataset(into, vocab_size, modality, splits, sources))
    return "\n".join(lines)


def is_recall(run: TrainedRun) -> bool:
    """Whether a run was trained on recall."""
    return run.config["dataset"]["modality"].get("recipe") == NAME


def read_distances(data: Dataset, split: str) -> TokenSet:
    """Return the distance of each token of a split, 0 for those that are not answers. Raises UserError if damaged."""
    distances = read_dataset(data.folder / _DISTANCES).open_split(split)
    tokens = data.open_split(split)
    if (distances.names, distances.lengths) != (tokens.names, tokens.lengths):
        raise UserError(f"{data.folder / _DISTANCES} does not belong to the tokens beside it; prepare the data again")
    return distances
