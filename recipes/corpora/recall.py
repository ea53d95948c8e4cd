"""Recall: generated episodes in which facts are asked for again, to see what a model remembers and from how far back.

    . . k3 k3=5 . . . . k1 k1=0 . . k3 k3=5 . . . .
                                       ^ an answer: known from the fact 10 steps before it

Each key has one value for the whole episode. A key is followed by its fact, wherever it stands, and dots fill the rest.
From a key's second mention on, its fact is an answer, which a model can give if it remembers the first mention; without
memory it costs log2(values) bits. Key number n of an episode comes up in proportion to 1 / n, so that some answers are
a few steps from the last mention and others hundreds. (Known as associative recall: Graves et al. 2014, section 4.3.)

This file is the task's settings; recipes.corpora.episodes draws episodes and writes them.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from waveform.system.errors import UserError
from waveform.system.rules import BELOW_1, check_rules, whole_number

NAME = "recall"
_MAX_TOKENS = 1 << 30
_Episodes = Annotated[int, whole_number(1)]


@dataclass
class RecallConfig:
    """Settings of `prepare recall`."""

    keys: Annotated[int, whole_number(1, 1000)] = 16
    values: Annotated[int, whole_number(2, 1000)] = 8
    episode: Annotated[int, whole_number(8, 1 << 20)] = 640  # tokens
    fillers: Annotated[float, BELOW_1] = 0.6  # share of an episode's tokens that are neither keys nor facts
    train: _Episodes = 4096  # episodes
    valid: _Episodes = 128
    test: _Episodes = 2048  # many, because answers from far away are few
    seed: Annotated[int, whole_number(0, 2**31 - 1)] = 0

    def __post_init__(self) -> None:
        check_rules(self, section="corpus")
        if self.mentions < 2:
            raise UserError(
                f"corpus.fillers={self.fillers} leaves no room for an answer in {self.episode} tokens; "
                "lower it, or raise corpus.episode"
            )
        num_tokens = (self.train + self.valid + self.test) * self.episode
        if num_tokens > _MAX_TOKENS:
            raise UserError(
                f"corpus.train, valid and test of {self.episode} tokens each come to {num_tokens:,} tokens; "
                f"at most {_MAX_TOKENS:,} are made"
            )

    @property
    def mentions(self) -> int:
        """How often an episode mentions a key."""
        return round((1 - self.fillers) * (self.episode // 2))

    @property
    def chance_bits(self) -> float:
        """Bits per answer of a model that knows the values, and remembers nothing."""
        return math.log2(self.values)
