"""Naive dynamic evaluation: the model keeps learning from the test stream, from each window once it is scored.

Krause et al. 2018, "Dynamic evaluation of neural sequence models", without their decay towards the initial weights;
Rae et al. 2019 report one such epoch on WikiText-103. Neither gives settings for these models: ours are our own.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from waveform.engine.clipping import clip, parameter_groups
from waveform.engine.evaluator import Classes, EvaluateConfig, Evaluation, Tally
from waveform.engine.interface import SequenceModel
from waveform.engine.single_pass import score_once
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.system.errors import UserError
from waveform.system.progress import Progress

# The best of four each on held-out speech (results/notes.md).
_DEFAULT_LR = {"sgd": 3e-2, "adam": 3e-5}
OPTIMISERS = tuple(_DEFAULT_LR)


@dataclass(frozen=True)
class DynamicConfig:
    """How the model learns while it is evaluated."""

    optimiser: str = "sgd"  # sgd | adam, which starts from a fresh state
    lr: float | None = None  # constant; None: 3e-2 with sgd, 3e-5 with adam
    clip_norm: float = 0.1  # limit on the gradient norms of trunk and compressor, as in training
    aux_weight: float = 1.0  # of the compression loss, which lets the compressor keep up with the trunk
    rows: int = 16  # utterances side by side, which share each update: with fewer, each learns sooner from the others

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise UserError(f"the dynamic optimiser is {self.optimiser!r}; choose one of {', '.join(OPTIMISERS)}")
        if self.lr is not None and not 0 <= self.lr < float("inf"):
            raise UserError(f"the dynamic learning rate is {self.lr}; it must be 0 or more")

    @property
    def learning_rate(self) -> float:
        return _DEFAULT_LR[self.optimiser] if self.lr is None else self.lr

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser with a fresh state."""
        cls = torch.optim.Adam if self.optimiser == "adam" else torch.optim.SGD
        return cls(parameters, lr=self.learning_rate)


def evaluate_dynamically(
    model: SequenceModel,
    tokens: TokenSet,
    config: EvaluateConfig,
    dynamic: DynamicConfig,
    *,
    device: torch.device,
    progress: Progress | None = None,
    classes: Classes | None = None,
) -> Evaluation:
    """Score every token of `tokens` once, in the set's order, with one update on each window after it is scored.

    At a learning rate of 0 this equals `evaluate`. A copy of the model learns; `model` does not change. One process
    only: the order of the stream decides what was learned when. Raises UserError if the loss stops being finite.
    """
    assert config.max_tokens is None, "dynamic evaluation learns from all tokens"
    learner = copy.deepcopy(model)
    assert isinstance(learner, nn.Module)
    learner.requires_grad_(True).eval()  # no dropout: one pass gives the score and the gradient
    groups = parameter_groups(learner)
    optimiser = dynamic.build([parameter for group in groups.values() for parameter in group])
    tally = Tally(tokens, classes=classes, device=device)
    with torch.enable_grad():
        for dealt, scores in score_once(
            learner,
            tokens,
            range(len(tokens)),
            window=config.window,
            rows=None if config.protocol == "carry" else dynamic.rows,
            chunk=config.reset_every,
            device=device,
            autocast=config.autocast,
        ):
            num_scored = tally.add(dealt, scores)
            loss = scores.nats / num_scored + scores.aux * (dynamic.aux_weight / len(dealt.utterances))
            if not bool(torch.isfinite(loss)):
                raise UserError(
                    f"dynamic evaluation diverged (its loss is {loss.item()}); lower its learning rate, "
                    f"{dynamic.learning_rate:g}"
                )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            clip(groups, dynamic.clip_norm)
            optimiser.step()
            if progress is not None:
                progress.update(num_scored)
    return tally.result(protocol=config.protocol, world=World(device=device), whole=True)
