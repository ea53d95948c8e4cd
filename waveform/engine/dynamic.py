"""Naive dynamic evaluation: the model keeps learning from the test stream, from each window once it is scored.

Krause et al. 2018, "Dynamic evaluation of neural sequence models", without their decay towards the initial weights.
Rae et al. 2019, section 5.3, load a checkpoint and continue training for one epoch of WikiText-103's test split: that
is the optimiser `continued`, except that dropout is off here. The settings of the others are our own.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from waveform.engine.checkpoint import Checkpoint, restore_optimiser
from waveform.engine.evaluator import Classes, EvaluateConfig, Evaluation, Tally
from waveform.engine.interface import SequenceModel
from waveform.engine.learner import clip, parameter_groups
from waveform.engine.single_pass import deal, score_once
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.system.errors import UserError
from waveform.system.progress import Progress

# Each the best of four for a Compressive Transformer on held-out speech (results/notes.md).
_DEFAULT_LR = {"sgd": 3e-2, "adam": 3e-5}
OPTIMISERS = (*_DEFAULT_LR, "continued")


@dataclass(frozen=True)
class DynamicConfig:
    """How the model learns while it is evaluated."""

    optimiser: str = "sgd"  # sgd | adam, which start afresh | continued: Adam as a checkpoint left it
    lr: float | None = None  # constant; None: 3e-2 with sgd, 3e-5 with adam
    checkpoint: Checkpoint | None = None  # of the model, for `continued`
    beta2: float = 0.999  # of `continued`, as in training
    clip_norm: float = 0.1  # limit on the gradient norms of trunk and compressor, as in training
    aux_weight: float = 1.0  # of the compression loss, which lets the compressor keep up with the trunk
    rows: int = 16  # utterances side by side, which share each update: with fewer, each learns sooner from the others

    def __post_init__(self) -> None:
        continued = self.optimiser == "continued"
        assert not continued or (self.lr is not None and self.checkpoint is not None), "what is to be continued?"

    @property
    def learning_rate(self) -> float:
        return _DEFAULT_LR[self.optimiser] if self.lr is None else self.lr

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser of parameters in the order of training. Raises UserError if the checkpoint does not fit."""
        if self.optimiser == "sgd":
            return torch.optim.SGD(parameters, lr=self.learning_rate)
        adam = torch.optim.Adam(parameters, lr=self.learning_rate, betas=(0.9, self.beta2))
        if self.optimiser == "continued":
            assert self.checkpoint is not None
            restore_optimiser(self.checkpoint, adam)
        return adam


def evaluate_dynamically(
    model: SequenceModel,
    tokens: TokenSet,
    config: EvaluateConfig,
    dynamic: DynamicConfig,
    *,
    world: World,
    progress: Progress | None = None,
    classes: Classes | None = None,
) -> Evaluation:
    """Score every token of `tokens` once, in the set's order, with one update on each window after it is scored.

    At a learning rate of 0 this equals `evaluate`. A copy of the model learns; `model` does not change. The ranks share
    the rows of each window and every update, so their number changes figures only by rounding. Raises UserError, on
    every rank, if the loss stops being finite.
    """
    assert config.max_tokens is None, "dynamic evaluation learns from all tokens"
    learner = copy.deepcopy(model)
    assert isinstance(learner, nn.Module)
    learner.requires_grad_(True).eval()  # no dropout: one pass gives the score and the gradient
    groups = parameter_groups(learner, learner)
    optimiser = dynamic.build([parameter for group in groups.values() for parameter in group])
    tally = Tally(tokens, classes=classes, device=world.device)
    order, rows = range(len(tokens)), None if config.protocol == "carry" else dynamic.rows
    # Each rank has every world.size-th of the rows that are read side by side; one stream is the first rank's.
    own = [i for i in order if (world.is_first if rows is None else i % rows % world.size == world.rank)]
    owned = set(own)
    with torch.enable_grad():
        own_rows = None if rows is None else max(1, len(range(world.rank, rows, world.size)))
        windows = deal(tokens, own, window=config.window, rows=own_rows, chunk=config.reset_every)
        scored = score_once(learner, windows, device=world.device, autocast=config.autocast)
        # The windows that all ranks read together; a rank without a row in one waits for the others' gradients.
        for everyone in deal(tokens, order, window=config.window, rows=rows, chunk=config.reset_every):
            num_scored, num_whole = int(everyone.window.scored.sum()), int(everyone.window.whole.sum())
            loss = torch.zeros(())
            has_row = not owned.isdisjoint(everyone.utterances)
            if has_row:
                dealt, scores = next(scored)
                tally.add(dealt, scores)
                loss = scores.nats / num_scored + scores.aux * (dynamic.aux_weight / max(num_whole, 1))
            if world.any(not bool(torch.isfinite(loss))):
                raise UserError(
                    f"dynamic evaluation diverged (its loss is not finite); lower its learning rate, "
                    f"{dynamic.learning_rate:g}"
                )
            optimiser.zero_grad(set_to_none=True)
            if has_row:
                loss.backward()
            world.sum_gradients(learner.parameters())
            clip(groups, dynamic.clip_norm)
            optimiser.step()
            if progress is not None:
                progress.update(num_scored)
    return tally.result(protocol=config.protocol, world=world, whole=True)
