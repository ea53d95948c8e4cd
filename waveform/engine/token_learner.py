"""Learns from a stream of tokens: model, optimiser, stream and state of one training.

One update: for `period` chunks, for each window: forward, NLL and auxiliary losses, backward; then sum gradients over
ranks, clip trunk and compressor separately, Adam. Losses are sums over tokens divided by the number of scored tokens of
the whole update on all ranks, auxiliary ones by that of rows without padding, so the gradient does not depend on how
rows are dealt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from waveform.engine.checkpoint import TrainingProgress
from waveform.engine.evaluator import EvaluateConfig, Evaluation, evaluate
from waveform.engine.interface import SequenceModel, State, detach, optional_parts, wide
from waveform.engine.learner import Learner, clip
from waveform.engine.metrics import bits
from waveform.engine.model_options import apply_options
from waveform.engine.nonfinite import FiniteWatch, Update
from waveform.engine.scored_window import ScoredForward, score_window
from waveform.engine.streams import Chunk, TokenStream
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.ranks import fsdp
from waveform.ranks.distributed import World
from waveform.system.signals import StopRequest


class TokenLearner(Learner):
    """Trains a model on a token stream. A loss or gradient that is not finite reaches no checkpoint and no evaluation.

    `train.on_nonfinite=stop` raises Diverged: on a CPU at that step, on a GPU at the latest when figures are next
    logged, because looking makes it wait. `skip` looks at every step: if one is not finite on any rank, all ranks leave
    weights and optimiser as they are, the rows whose loss or state went bad start afresh, and training continues with
    the next step; after more than `train.max_skipped` consecutive ones it stops.
    """

    config: TrainConfig

    def __init__(
        self, model: SequenceModel, config: TrainConfig, *, tokens: TokenSet, window: int, seed: int, world: World
    ) -> None:
        """window: tokens of one forward. Raises UserError for settings that do not fit the model."""
        assert isinstance(model, nn.Module)
        sharded = config.sharding == "fsdp" and world.size > 1
        apply_options(model, config, window=window, device=world.device, sharded=sharded)
        model.to(world.device)
        world.broadcast_([*model.parameters(), *model.buffers()])
        self._scored = ScoredForward(model)
        self._watch: fsdp.GradientWatch | None = None
        if sharded:
            self._watch = fsdp.shard(self._scored, optional_parts(model).sharding_units(window), world=world)
        dtype = next(iter(model.parameters())).dtype
        fresh = model.init_state(config.batch_size // world.size, device=world.device, dtype=dtype)
        super().__init__(model, model, config, fresh=fresh, world=world)
        self.state, self.window = fresh, window
        self.stream = TokenStream(tokens, config, window=window, seed=seed, world=world)
        self.finite = FiniteWatch(config, world=world, tokens=tokens)
        self._row_nats: list[Tensor] = []
        self._norms: dict[str, Tensor] = {}  # of the last update

    def _update(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns this rank's sums of [nats, tokens, auxiliary losses, rows without padding], and norms."""
        config = self.config
        period = config.chunks_of_update(self.step)
        chunks = [self.stream.next_chunk() for _ in range(period)]
        sums = self.accumulate_gradients(chunks)
        self.reduce_gradients()
        # Without any gradient (nothing evicted yet) a norm is a zero on the CPU.
        norms = {name: fsdp.whole(n).to(self.world.device) for name, n in clip(self.groups, config.clip_norm).items()}
        seen = sums + 0 * wide(torch.stack(list(norms.values())).sum())
        spans = [rows for chunk in chunks for rows in chunk.spans]
        bad = self.finite.look(Update(self.step, spans, period, seen, torch.stack(self._row_nats)))
        if bad is None:
            self.optimiser.step()
            self.finite.consecutive_skips = 0
        else:
            self.state = self.finite.skip(bad, parameters=self.module.parameters(), state=self.state, fresh=self.fresh)
            sums, norms = torch.zeros_like(sums), {name: torch.zeros_like(norm) for name, norm in norms.items()}
        self.optimiser.zero_grad(set_to_none=True)
        self.step += period
        self.tokens_seen += sum(chunk.num_scored for chunk in chunks)
        self.sums += sums
        self._norms = norms
        return sums, norms

    def reduce_gradients(self) -> None:
        """Sum what `accumulate_gradients` left on all ranks; FSDP did so in each backward pass."""
        if self._watch is not None:
            self._watch.drop_missing(world=self.world)
        else:
            self.world.sum_gradients(self.module.parameters())

    def accumulate_gradients(self, chunks: list[Chunk]) -> Tensor:
        """Forward and backward of `chunks`; gradients are of the mean over all ranks' tokens.

        Returns the sums that `_update` returns.
        """
        config, device = self.config, self.world.device
        num_scored = max(sum(chunk.num_scored for chunk in chunks), 1)
        windows = [window for chunk in chunks for window in chunk.windows]
        num_whole = max(sum(chunk.num_whole for chunk in chunks), 1)
        sums = torch.zeros_like(self.sums)
        self._row_nats = []
        if not self.module.training:  # train() visits every module
            self.module.train()
        for begin in range(0, len(windows), config.unroll):
            group = windows[begin : begin + config.unroll]
            loss = torch.zeros((), device=device)
            for i, window in enumerate(group):
                self.parts.carry_gradient = i + 1 < len(group)
                scores = score_window(
                    self._scored, window, self.state, fresh=self.fresh, device=device, autocast=config.autocast(device)
                )
                self.state, nats = scores.state, scores.nats
                self._row_nats.append(scores.row_nats)
                loss = loss + nats / num_scored + scores.aux * (config.aux_weight / num_whole)
                sums[:3] += torch.stack([wide(t.detach()) for t in (nats, scores.scored.sum(), scores.aux)])
            loss.backward()
            self.state = detach(self.state)
        sums[3] += sum(int(window.whole.sum()) for window in windows)
        self.parts.carry_gradient = False
        return sums

    def require_finite(self) -> None:
        self.finite.check()

    @property
    def skipped(self) -> int:
        return self.finite.skipped

    def _figures(self, *sums: float) -> tuple[dict[str, Any], str]:
        nats, num_tokens, aux, num_whole = sums
        nll = nats / max(num_tokens, 1)
        figures = {
            "nll_nats": nll,
            "nll_bits": bits(nll),
            "aux_loss": aux / max(num_whole, 1),
            "epoch": self.stream.epoch,
            "skipped": self.finite.skipped,
            "waited_s": round(self.waited_s, 3),
            **{f"grad_norm_{name}": float(norm) for name, norm in self._norms.items()},
        }
        return figures, f"{nll:.3f} nats, "

    def progress(self, **others: Any) -> TrainingProgress:
        skipped = (self.finite.skipped, self.finite.consecutive_skips)
        return super().progress(cursor=self.stream.cursor(), skipped=skipped, **others)

    def restore(self, progress: TrainingProgress, state: State) -> None:
        super().restore(progress, state)
        self.finite.skipped, self.finite.consecutive_skips = progress.skipped
        self.stream.seek(progress.cursor)

    @contextmanager
    def evaluated(self, tokens: TokenSet, stop: StopRequest) -> Iterator[Evaluation]:
        """Score `tokens` of the validation split; within the block, all weights are whole on every rank.

        Raises Stopped, on every rank, if a stop is asked for.
        """
        config = EvaluateConfig(
            window=self.window,
            protocol="chunk" if self.config.state == "chunk" else "utterance",
            chunk=self.config.chunk,
            autocast=self.config.autocast(self.world.device),
            max_tokens=self.config.evaluate_tokens,
        )
        self.module.eval()
        with fsdp.gathered(self._scored):
            yield evaluate(self.model, tokens, config, world=self.world, stop=stop)
