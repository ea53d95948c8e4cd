"""NLL of a token set with carried state: sums and counts for each utterance, divided only at the end."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from waveform.engine.interface import SequenceModel, fp64_device, to_device, wide
from waveform.engine.metrics import bits
from waveform.engine.scored_window import ScoredWindow
from waveform.engine.single_pass import DealtWindow, deal, score_once
from waveform.engine.state_ram import fast_rows
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.system.errors import UserError
from waveform.system.progress import Progress
from waveform.system.signals import Stopped, StopRequest

PROTOCOLS = ("utterance", "chunk", "carry", "clip")


@dataclass(frozen=True)
class EvaluateConfig:
    """How tokens are scored. Raises UserError for an unknown protocol, or a chunk that `protocol=chunk` cannot use."""

    window: int  # tokens of one call of the model
    # utterance: state is carried from the utterance's start; chunk: reset at each chunk; carry: carried from each
    # utterance to the next, in the set's order, and never reset; clip: as utterance, on data whose utterances are clips
    protocol: str = "utterance"
    chunk: int | None = None  # tokens between resets with protocol=chunk, a multiple of the window
    autocast: torch.dtype | None = None  # dtype of matrix products; None: the parameters' own
    max_tokens: int | None = None  # about how many to score, for a quick look at utterances spread evenly; None: all

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise UserError(f"protocol {self.protocol!r} does not exist; choose one of {', '.join(PROTOCOLS)}")
        if self.protocol == "chunk" and (self.chunk is None or self.chunk % self.window):
            raise UserError(
                f"protocol=chunk needs a chunk that is a multiple of the window, {self.window}; it is {self.chunk}"
            )

    @property
    def reset_every(self) -> int | None:
        """Tokens between resets; None: state is reset only at the start of an utterance."""
        return self.chunk if self.protocol == "chunk" else None


@dataclass(frozen=True)
class Evaluation:
    """NLL of every utterance of a set, in the set's order."""

    names: list[str]
    nats: np.ndarray  # [N] fp64: sum over the utterance's tokens
    counts: np.ndarray  # [N] int64: tokens
    protocol: str  # as in `EvaluateConfig`
    class_nats: np.ndarray | None = None  # [K] fp64: sum over the tokens of each class, if classes were given
    class_counts: np.ndarray | None = None  # [K] int64: tokens of each class

    @property
    def nats_per_token(self) -> float:
        return float(self.nats.sum() / self.counts.sum())

    @property
    def bits_per_token(self) -> float:
        return bits(self.nats_per_token)


# The class of each target, from 0: by its token id [V], or by its place, in a set as long as the one that is scored.
Classes = Tensor | TokenSet


class Tally:
    """Sums NLL by utterance, and by class of the target if classes are given, as windows are scored."""

    def __init__(self, tokens: TokenSet, *, classes: Classes | None, device: torch.device) -> None:
        self._tokens, self._classes = tokens, classes
        device = fp64_device(device)
        self._nats = torch.zeros(len(tokens), dtype=torch.float64, device=device)
        self._counts = torch.zeros(len(tokens), dtype=torch.int64)
        num_classes = 0
        if classes is not None:
            num_classes = classes.vocab_size if isinstance(classes, TokenSet) else int(classes.max()) + 1
        self._class_nats = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self._class_counts = torch.zeros(num_classes, dtype=torch.int64, device=device)

    def add(self, dealt: DealtWindow, scores: ScoredWindow) -> int:
        """Count one window; returns the number of its tokens."""
        nll, lengths = scores.nll.detach(), dealt.window.scored.sum(dim=1)
        utterances = torch.tensor(dealt.utterances)
        sums = wide(torch.where(scores.scored, nll, 0)).sum(dim=1)
        self._nats.index_add_(0, to_device(utterances, sums.device), sums)
        self._counts.index_add_(0, utterances, lengths)
        if self._classes is not None:
            of_token = self._classes_of(dealt).to(sums.device)
            self._class_nats.index_add_(0, of_token, wide(nll[scores.scored]))
            self._class_counts += torch.bincount(of_token, minlength=len(self._class_counts))
        return int(lengths.sum())

    def _classes_of(self, dealt: DealtWindow) -> Tensor:
        """Classes of the scored targets, row by row."""
        scored = dealt.window.scored
        if not isinstance(self._classes, TokenSet):
            assert self._classes is not None
            return self._classes[dealt.window.targets[scored]]
        lengths = scored.sum(dim=1).tolist()
        parts = [
            self._classes.read(utterance, start=dealt.start, stop=dealt.start + length)
            for utterance, length in zip(dealt.utterances, lengths, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def result(self, *, protocol: str, world: World, whole: bool) -> Evaluation:
        """The sums over all ranks. whole: check that every token of the set was scored."""
        sums = [self._nats, self._counts]
        if self._classes is not None:
            sums += [self._class_nats, self._class_counts]
        nats, counts, *by_class = (world.sum_(each.to(self._nats.device)).cpu().numpy() for each in sums)
        assert not whole or counts.tolist() == self._tokens.lengths, "a token was scored twice or not at all"
        return Evaluation(list(self._tokens.names), nats, counts, protocol, *by_class)


@torch.inference_mode()
def evaluate(
    model: SequenceModel,
    tokens: TokenSet,
    config: EvaluateConfig,
    *,
    world: World | None = None,
    progress: Progress | None = None,
    classes: Classes | None = None,
    stop: StopRequest | None = None,
) -> Evaluation:
    """Score every token of `tokens` once, or only some utterances if `config.max_tokens` is set.

    classes: to sum NLL by class as well. Each rank scores every world.size-th utterance (if they are one stream, the
    first rank scores all), and every rank gets the whole result. Raises Stopped, on every rank, if `stop` was asked of
    one.
    """
    world = world or World()
    one_stream = config.protocol == "carry"
    order = list(range(len(tokens)))
    if config.max_tokens is not None and one_stream:
        order = order[: int(np.searchsorted(np.cumsum(tokens.lengths), config.max_tokens)) + 1]
    elif config.max_tokens is not None:
        num = math.ceil(len(order) * min(1, config.max_tokens / tokens.num_tokens))
        order = np.linspace(0, len(order) - 1, num).round().astype(int).tolist()
    if not one_stream:  # longest first, so that rows end at about the same time
        order.sort(key=lambda i: (-tokens.lengths[i], i))
    own = order[world.rank :: world.size]
    if one_stream:
        own = order if world.is_first else []
    num_all, num_own = (sum(tokens.lengths[i] for i in each) for each in (order, own))
    tally = Tally(tokens, classes=classes, device=world.device)
    rows = None if one_stream else fast_rows(model, window=config.window, device=world.device)
    windows = deal(tokens, own, window=config.window, rows=rows, chunk=config.reset_every)
    for dealt, scores in score_once(model, windows, device=world.device, autocast=config.autocast):
        if stop:
            break
        num_scored = tally.add(dealt, scores)
        if progress is not None:
            progress.update(num_scored * num_all / num_own)  # other ranks get as far meanwhile
    if stop is not None and world.any(bool(stop)):
        raise Stopped
    return tally.result(protocol=config.protocol, world=world, whole=config.max_tokens is None)
