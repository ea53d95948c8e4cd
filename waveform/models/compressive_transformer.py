"""The Compressive Transformer (Rae et al. 2019): Transformer-XL whose evicted memories are compressed, not dropped.

Shape letters: B rows, T steps of a call, W window, M memory slots, C compressed slots, D model width, L layers,
c compression rate.

Windows lie at multiples of W in each row's stream, however the stream is cut into calls:

    slots that window w attends to          [ compressed, c steps each | memory | window w up to the query ]
    at its end                               evict the oldest W of [memory; window], compress, append

Everything that the state's masks need follows from one counter a row, the number of tokens read.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from waveform.engine.interface import Decoder, OptionalParts, Step, detach, to_device
from waveform.models import attention, compression, heads
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots, content_attention
from waveform.models.compression import Compressor, mean_square_by_row
from waveform.models.embeddings import check_cutoffs, token_embedding
from waveform.system.errors import UserError

_INIT_STD = 0.02


@dataclass
class CompressiveTransformerConfig:
    """Fields of `model=compressive_transformer`; the defaults are the 40M-parameter speech model."""

    vocab_size: int
    num_layers: int = 20
    d_model: int = 384
    num_heads: int = 6
    d_feedforward: int = 1024
    window: int = 768  # steps that attend to each other directly
    memory: int = 768  # slots, one step each
    compressed: int = 768  # slots, compression_rate steps each; 0 makes this a Transformer-XL
    compression: str = "conv"  # conv | max | mean | most_used | dilated
    compression_rate: int = 4
    compression_loss: str = "attention"  # attention | autoencode | none
    norm: str = "pre"  # pre: more stable when deep; post: Algorithm 1
    attention: str = "fused"  # fused | reference
    num_position_features: int = 64  # P, width of the sinusoidal encoding
    empty_memory: str = "mask"  # mask: empty slots are not attended; zeros: they are zero vectors (Algorithm 1)
    compressed_position: str = "time"  # time: centre of the steps covered; contiguous: unit steps behind memory
    dropout: float = 0.0
    head: str = "softmax"  # softmax | adaptive: for large vocabularies sorted by frequency; inputs are adaptive too
    cutoffs: list[int] = field(default_factory=list)  # first ids of the adaptive head's clusters after the first
    div_value: int = 4  # a cluster's vectors are so many times narrower than the one's before
    tie_embeddings: bool = False  # the head uses the vectors (and projections) of the input embedding

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "d_feedforward", "window", "compression_rate"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("memory", "compressed"):
            if getattr(self, name) < 0:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be 0 or more")
        choices = {
            "compression": compression.FUNCTIONS,
            "compression_loss": compression.LOSSES,
            "norm": ("pre", "post"),
            "attention": attention.IMPLEMENTATIONS,
            "empty_memory": ("mask", "zeros"),
            "compressed_position": ("time", "contiguous"),
            "head": heads.KINDS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"model.{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        check_cutoffs(self.cutoffs, vocab_size=self.vocab_size, div_value=self.div_value)
        if bool(self.cutoffs) != (self.head == "adaptive"):
            raise UserError(
                f"model.cutoffs is {self.cutoffs} with model.head={self.head}; head=adaptive needs some, such as "
                "[20000,40000,200000], and softmax takes none"
            )
        if self.d_model % self.num_heads:
            raise UserError(f"model.d_model {self.d_model} is no multiple of model.num_heads {self.num_heads}")
        if self.num_position_features < 2 or self.num_position_features % 2:
            raise UserError(f"model.num_position_features is {self.num_position_features}; it must be even, 2 or more")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must be in [0, 1)")
        if self.compressed and self.compression == "most_used" and self.memory < self.window:
            raise UserError(
                f"model.compression=most_used ranks slots by their use while in memory, so model.memory "
                f"({self.memory}) must be at least model.window ({self.window})"
            )

    @property
    def compressor_has_parameters(self) -> bool:
        return self.compressed > 0 and self.compression in ("conv", "dilated")

    @property
    def temporal_range(self) -> int:
        """Steps that a stack reaches back from the start of a window: L (M + c C).

        Exact where c divides W and W divides M; else steps that wait for their group add up to c - 1 a layer.
        """
        return self.num_layers * (self.memory + self.compression_rate * self.compressed)


class CompressiveState(NamedTuple):
    """Memories of B streams. Slots are right-aligned: the newest is last, empty ones are first."""

    steps: Tensor  # [B] int64 on the CPU: tokens read since the row's reset
    window: tuple[Tensor, ...]  # L x [B, W, D]: inputs of each layer in the unfinished window, from slot 0
    memory: tuple[Tensor, ...]  # L x [B, M, D]: inputs of each layer
    compressed: tuple[Tensor, ...]  # L x [B, C, D]
    pending: tuple[Tensor, ...]  # L x [B, c - 1, D]: evicted, waiting for their group to fill
    usage: tuple[Tensor, ...]  # L x [B, c - 1 + M]: attention received by [pending; memory]; most_used only


class _LayerMemory(NamedTuple):
    """One layer's part of the state, but for the window; each [B, n, D], usage [B, n]."""

    memory: Tensor
    compressed: Tensor
    pending: Tensor
    usage: Tensor


class _Fill(NamedTuple):
    """How full the memories are, a function of the number of steps; each [B] int64 on the CPU."""

    phase: Tensor  # steps into the window
    memory: Tensor  # slots in use
    evicted: Tensor  # steps that ever left memory
    compressed: Tensor  # slots in use
    pending: Tensor  # evicted, not yet compressed


@dataclass(frozen=True)
class _Piece:
    """What all layers share in one call within a window. No tuple, so that FSDP leaves its CPU counters where they are.

    `through_time` is kept here because a layer that is computed again in the backward pass must do what it did before.
    """

    before: _Fill
    after: _Fill
    done: Tensor  # [B] bool on the CPU: the row's window ends with this piece
    num_new: int
    end: int  # window slots in use after this piece
    num_memory: int
    num_compressed: int
    slots: Slots
    through_time: bool  # gradient reaches the compressor from later windows


class _LayerOutput(NamedTuple):
    """What one layer makes of one piece."""

    h: Tensor  # [B, T, D]
    window: Tensor  # [B, W, D]
    memory: _LayerMemory
    loss: Tensor | None  # [B] compression loss


class Layer(nn.Module):
    """One layer: attention over [compressed; memory; window], then the feed-forward network."""

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = RelativeAttention(
            config.d_model,
            num_heads=config.num_heads,
            num_position_features=config.num_position_features,
            implementation=config.attention,
        )
        self.feedforward_norm = nn.LayerNorm(config.d_model)
        self.feedforward_in = nn.Linear(config.d_model, config.d_feedforward)
        self.feedforward_out = nn.Linear(config.d_feedforward, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        if config.compressed:
            autoencode = config.compression_loss == "autoencode" and config.compressor_has_parameters
            self.compressor = Compressor(
                config.d_model, function=config.compression, rate=config.compression_rate, autoencode=autoencode
            )
            self.compression_loss = nn.Identity()  # this layer's loss [B] passes it, for forward hooks to see

    def forward(
        self,
        advance: Callable[["Layer", Tensor, Tensor, _LayerMemory, _Piece], _LayerOutput],
        h: Tensor,
        window: Tensor,
        memory: _LayerMemory,
        piece: _Piece,
        *,
        checkpointed: bool = False,
    ) -> _LayerOutput:
        """`advance(self, h, window, memory, piece)`: all that uses this layer's parameters in a model's forward.

        One call, compression and its loss included, so that FSDP can gather the parameters around it, and so that
        with `checkpointed` nothing inside is kept for the backward pass, which computes it again.
        """
        if checkpointed:
            dropout = self.dropout.p > 0
            return checkpoint(
                advance, self, h, window, memory, piece, use_reentrant=False, preserve_rng_state=dropout
            )  # fmt: skip
        return advance(self, h, window, memory, piece)

    def transform(self, h: Tensor, past: Tensor | None, slots: Slots) -> tuple[Tensor, AttentionOutput]:
        """h [B, T, D] -> output [B, T, D] and what the attention computed; `past`: see RelativeAttention."""
        if self.pre_norm:
            past = None if past is None else self._standardise(past)
            attended = self.attention(self._standardise(h), past, slots, affine=self.attention_norm)
            h = h + self.dropout(attended.mixed)
            return h + self._feedforward(self.feedforward_norm(h)), attended
        attended = self.attention(h, past, slots)
        h = self.attention_norm(h + self.dropout(attended.mixed))
        return self.feedforward_norm(h + self._feedforward(h)), attended

    def _standardise(self, x: Tensor) -> Tensor:
        """The attention's norm without its weight and bias, which the attention folds into its projections."""
        return F.layer_norm(x, self.attention_norm.normalized_shape, eps=self.attention_norm.eps)

    def _feedforward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feedforward_out(self.dropout(F.gelu(self.feedforward_in(x)))))

    def frozen_projection(self, slots: Tensor, projection: nn.Linear) -> Tensor:
        """Per-head projection of raw slots [B, K, D] -> [B, H, K, d] with detached weights: gradient flows to slots."""
        if self.pre_norm:
            norm = self.attention_norm
            slots = F.layer_norm(slots, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)
        return self.attention.split_heads(F.linear(slots, projection.weight.detach()))


class _Boundary(NamedTuple):
    """What one layer hands to compression at the end of a window."""

    layer: Layer
    window: Tensor  # [B, W, D] the finished window's inputs
    queries: Tensor | None  # [B, H, W, d] of the whole window, where the call covered it
    keys: Tensor  # [B, H, K, d] of the attended slots; the last M' + W of them are memory and window
    values: Tensor
    through_time: bool  # as in _Piece


class CompressiveTransformer(nn.Module, OptionalParts):
    """Compressive Transformer over tokens 0..V - 1, with V as the begin-of-utterance input."""

    Config: type = CompressiveTransformerConfig
    has_int8_decoder = True

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self.embedding = token_embedding(
            config.d_model,
            vocab_size=config.vocab_size,
            cutoffs=config.cutoffs,
            div_value=config.div_value,
            tie_embeddings=config.tie_embeddings,
            std=self._embedding_std,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.head = heads.output_head(
            config.d_model,
            vocab_size=config.vocab_size,
            cutoffs=config.cutoffs,
            div_value=config.div_value,
            tied_to=self.embedding if config.tie_embeddings else None,
        )
        self._initialise()

    @property
    def _embedding_std(self) -> float:
        return _INIT_STD if self.config.norm == "pre" else 1.0

    def _initialise(self) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers) if self.config.norm == "pre" else _INIT_STD
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=self._embedding_std)
        for layer in self._layers():
            for linear in (layer.attention.query, layer.attention.key, layer.attention.value, layer.attention.position):
                nn.init.xavier_uniform_(linear.weight)
            layer.attention.look_back()
            for linear in (layer.attention.output, layer.feedforward_out):
                nn.init.normal_(linear.weight, std=residual_std)
            nn.init.xavier_uniform_(layer.feedforward_in.weight)
            nn.init.zeros_(layer.feedforward_in.bias)
            nn.init.zeros_(layer.feedforward_out.bias)
            if self.config.compressor_has_parameters and self.config.compression == "conv":
                # Starts as mean pooling (the papers name no initialisation): compressed slots lie where memory's do.
                convolution = layer.compressor.convolution
                nn.init.normal_(convolution.weight, std=1e-3)
                assert convolution.bias is not None
                nn.init.zeros_(convolution.bias)
                with torch.no_grad():
                    convolution.weight += torch.eye(self.config.d_model)[..., None] / self.config.compression_rate

    def _layers(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Those of every layer's compressor, unless only BPTT trains them."""
        if self.config.compression_loss == "none" or not self.config.compressed:
            return []
        return [parameter for layer in self._layers() for parameter in layer.compressor.parameters()]

    def sharding_units(self, window: int) -> list[nn.Module]:
        """The layers; none if neither `window` nor the model's window is a multiple of the other.

        The number of pieces that a call is cut into then depends on the rows' phases.
        """
        own = self.config.window
        return list(self.layers) if not (window % own and own % window) else []

    @property
    def trains_through_time(self) -> bool:
        """Whether the compressor has parameters and no loss of its own."""
        return self.config.compression_loss == "none" and self.config.compressor_has_parameters

    @property
    def receptive_field(self) -> int:
        """Steps that one layer attends to from the end of a window; layers above reach further through its memory."""
        return self.config.window + self.config.memory + self.config.compression_rate * self.config.compressed

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> CompressiveState:
        """State of `batch_size` streams of which nothing has been read; slots are [B, n, D] of `dtype`."""
        config = self.config

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(batch_size, *shape, device=device, dtype=dtype) for _ in range(config.num_layers))

        waiting = config.compression_rate - 1 if config.compressed else 0
        tracked = waiting + config.memory if config.compressed and config.compression == "most_used" else 0
        return CompressiveState(
            steps=torch.full((batch_size,), self._first_step, dtype=torch.int64),
            window=zeros(config.window, config.d_model),
            memory=zeros(config.memory, config.d_model),
            compressed=zeros(config.compressed, config.d_model),
            pending=zeros(waiting, config.d_model),
            usage=zeros(tracked, dtype=torch.promote_types(dtype, torch.float32)),  # bf16 sums would lose small weights
        )

    @property
    def _first_step(self) -> int:
        """0; or, where empty memory counts as zeros, so many steps that every slot holds one."""
        if self.config.empty_memory == "mask":
            return 0
        config = self.config
        return config.window * -(-(config.memory + config.compression_rate * (config.compressed + 1)) // config.window)

    def _fill(self, steps: Tensor) -> _Fill:
        config = self.config
        finished = steps // config.window * config.window
        evicted = (finished - config.memory).clamp(min=0)
        groups = evicted // config.compression_rate
        return _Fill(
            phase=steps % config.window,
            memory=finished.clamp(max=config.memory),
            evicted=evicted,
            compressed=groups.clamp(max=config.compressed),
            pending=evicted % config.compression_rate,
        )

    def forward(self, tokens: Tensor, state: CompressiveState) -> Step:
        """tokens [B, T], any T >= 1 -> hidden [B, T, D], the new state, and the compression loss of each row.

        The loss ("compression", [B]) is a mean over layers, summed over the windows that end in this call; it is
        computed only where gradients are enabled.
        """
        pieces, losses = [], []
        start = 0
        while start < tokens.shape[1]:
            # No row's window may end inside a piece.
            length = self.config.window - int((state.steps % self.config.window).max())
            piece, state, loss = self._within_window(tokens[:, start : start + length], state)
            pieces.append(piece)
            losses += [loss] if loss is not None else []
            start += length
        hidden = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        aux_losses = {"compression": torch.stack(losses).sum(dim=0)} if losses else {}
        return Step(self.final_norm(hidden), state, aux_losses)

    def _within_window(self, tokens: Tensor, state: CompressiveState) -> tuple[Tensor, CompressiveState, Tensor | None]:
        config, num_new = self.config, tokens.shape[1]
        before, after = self._fill(state.steps), self._fill(state.steps + num_new)
        done = before.phase + num_new == config.window
        end = int(before.phase.max()) + num_new
        num_memory, num_compressed = int(before.memory.max()), int(before.compressed.max())
        slots = self._slots(
            before,
            num_new=num_new,
            end=end,
            num_memory=num_memory,
            num_compressed=num_compressed,
            device=tokens.device,
        )
        through_time = self.carry_gradient and not self.compressor_parameters()
        piece = _Piece(before, after, done, num_new, end, num_memory, num_compressed, slots, through_time)
        h = self.dropout(self.embedding(tokens))
        windows, memories = [], []
        total_loss: Tensor | None = None
        checkpointed = self.checkpoint_activations and torch.is_grad_enabled()
        for i, layer in enumerate(self._layers()):
            memory = _LayerMemory(state.memory[i], state.compressed[i], state.pending[i], state.usage[i])
            h, window, memory, loss = layer(
                self._advance_layer, h, state.window[i], memory, piece, checkpointed=checkpointed
            )
            if loss is not None:
                loss = layer.compression_loss(loss)
                total_loss = loss if total_loss is None else total_loss + loss
            windows.append(window)
            memories.append(memory)
        new_state = CompressiveState(state.steps + num_new, tuple(windows), *zip(*memories, strict=True))
        if total_loss is not None:
            total_loss = total_loss / config.num_layers
        return h, new_state if self.carry_gradient else detach(new_state), total_loss

    def _advance_layer(
        self, layer: Layer, h: Tensor, old_window: Tensor, memory: _LayerMemory, piece: _Piece
    ) -> _LayerOutput:
        """Attend and feed forward, write the window and, where it ends, evict and compress."""
        config, phase = self.config, piece.before.phase
        window = self._write_window(old_window, h, phase, end=piece.end)
        one_phase = bool((phase == phase[0]).all())
        past = torch.cat(
            [
                memory.compressed[:, config.compressed - piece.num_compressed :],
                memory.memory[:, config.memory - piece.num_memory :],
                # Rows that are equally far go on where they stopped; others have their steps in between.
                old_window[:, : piece.end - piece.num_new].to(h.dtype) if one_phase else window,
            ],
            dim=1,
        )
        h, attended = layer.transform(h, past if past.shape[1] else None, piece.slots)
        if memory.usage.shape[1]:
            received = layer.attention.received_attention(attended, piece.slots)
            memory = memory._replace(
                usage=self._add_usage(memory.usage, received, piece.num_compressed, piece.num_memory)
            )
        loss = None
        if piece.done.any():
            queries = attended.queries if piece.num_new == config.window else None
            boundary = _Boundary(layer, window, queries, attended.keys, attended.values, piece.through_time)
            memory, loss = self._end_window(memory, boundary, piece.before, piece.after, piece.done)
        if not piece.done.all():
            old_window = torch.cat([window.to(old_window.dtype), old_window[:, piece.end :]], dim=1)
        return _LayerOutput(h, old_window, memory, loss)

    def _slots(
        self, fill: _Fill, *, num_new: int, end: int, num_memory: int, num_compressed: int, device: torch.device
    ) -> Slots:
        """Times and visibility of [compressed; memory; window], for all rows at once where they agree."""
        config = self.config
        aligned = all(
            bool((field == field[0]).all()) for field in (fill.phase, fill.memory, fill.compressed, fill.pending)
        )
        if aligned:
            fill = _Fill(*(field[:1] for field in fill))
        query_times = fill.phase[:, None] + torch.arange(num_new)
        times = self._slot_times(fill.pending, num_compressed=num_compressed, num_memory=num_memory, end=end)
        # Vectors go to the device, and what is quadratic is made there.
        query_times, times = to_device(query_times, device), to_device(times, device)
        visible = None
        if not aligned:
            in_use = torch.cat(
                [
                    torch.arange(num_compressed) >= num_compressed - fill.compressed[:, None],
                    torch.arange(num_memory) >= num_memory - fill.memory[:, None],
                    torch.ones(len(fill.phase), end, dtype=torch.bool),
                ],
                dim=1,
            )
            in_use = to_device(in_use, device)
            visible = (in_use[:, None] & (times[:, None, :] <= query_times[:, :, None]))[:, None]
        query_encoding, slot_encoding = (
            attention.encode_times(
                t, num_position_features=config.num_position_features, dtype=next(self.parameters()).dtype
            )
            for t in (query_times, times)
        )
        return Slots(query_times, times, query_encoding, slot_encoding, visible)

    def _slot_times(self, pending: Tensor, *, num_compressed: int, num_memory: int, end: int) -> Tensor:
        """Times of slots relative to the window's start, [rows of `pending`, K] in fp64."""
        config = self.config
        age = torch.arange(num_compressed - 1, -1, -1, dtype=torch.float64)  # 0 is the newest
        if config.compressed_position == "time":
            rate = config.compression_rate
            newest = -(config.memory + pending.to(torch.float64)) - (rate + 1) / 2
            compressed_times = newest[:, None] - rate * age
        else:
            compressed_times = (-config.memory - 1 - age).expand(len(pending), -1)
        unit_steps = torch.arange(-num_memory, end, dtype=torch.float64).expand(len(pending), -1)
        return torch.cat([compressed_times, unit_steps], dim=1)

    @staticmethod
    def _write_window(old: Tensor, new: Tensor, phase: Tensor, *, end: int) -> Tensor:
        """The first `end` slots of the window with `new` [B, T, D] written at each row's phase."""
        first = int(phase[0])
        if bool((phase == first).all()):
            return torch.cat([old[:, :first].to(new.dtype), new], dim=1) if first else new
        index = to_device(phase[:, None] + torch.arange(new.shape[1]), new.device)
        return old[:, :end].to(new.dtype).scatter(1, index[..., None].expand_as(new), new)

    def _add_usage(self, usage: Tensor, received: Tensor, num_compressed: int, num_memory: int) -> Tensor:
        """Add attention received [B, K] to the memory slots that took part."""
        added = received[:, num_compressed : num_compressed + num_memory]
        return usage + F.pad(added, (usage.shape[1] - num_memory, 0)).to(usage.dtype)

    def _end_window(
        self, memory: _LayerMemory, boundary: _Boundary, before: _Fill, after: _Fill, done: Tensor
    ) -> tuple[_LayerMemory, Tensor | None]:
        """Evict, compress and shift in the rows whose window is `done`; fills are of before and after this piece."""
        config, window = self.config, boundary.window
        # Slots that wait or are evicted now; complete groups among them, from the oldest on, are compressed.
        available = torch.where(done, before.pending + after.evicted - before.evicted, 0)
        old = memory.memory.to(window.dtype)
        # Without going through [memory; window], which the new memory would keep alive as a whole.
        evicted = torch.cat([old[:, : config.window], window[:, : max(config.window - config.memory, 0)]], dim=1)
        kept = torch.cat([old[:, config.window :], window[:, max(config.window - config.memory, 0) :]], dim=1)
        new_memory = _where_rows(done, kept, memory.memory)
        compressed, pending, usage = memory.compressed, memory.pending, memory.usage
        loss = None
        if config.compressed:
            source_usage, kept_usage = self._split_usage(memory.usage)
            usage = _where_rows(done, kept_usage, memory.usage)
            if bool(available.any()):
                source = torch.cat([memory.pending.to(window.dtype), evicted], dim=1)
                compressed, loss = self._compress(boundary, source, source_usage, memory.compressed, available, before)
                pending = _where_rows(done, source[:, config.window :], memory.pending)
        return _LayerMemory(new_memory, compressed, pending, usage), loss

    def num_compressed_between(self, steps: Tensor, later: Tensor) -> int:
        """Compressed slots that one row gains between two numbers of steps; they may be more than fit."""
        return int(self._fill(later).evicted // self.config.compression_rate) - int(
            self._fill(steps).evicted // self.config.compression_rate
        )

    @torch.no_grad()
    def close_window(self, state: CompressiveState) -> CompressiveState:
        """The state at the next window's start, for a decoder: `state.window` is full, all rows are equally far.

        `state.steps` may still count from anywhere within that window.
        """
        steps = state.steps + self.config.window - state.steps % self.config.window
        before, after = self._fill(state.steps), self._fill(steps)
        none, done = torch.empty(0), torch.ones(len(steps), dtype=torch.bool)
        memories = []
        for i, layer in enumerate(self._layers()):
            memory = _LayerMemory(state.memory[i], state.compressed[i], state.pending[i], state.usage[i])
            boundary = _Boundary(layer, state.window[i], None, none, none, through_time=False)
            memories.append(self._end_window(memory, boundary, before, after, done)[0])
        return CompressiveState(steps, state.window, *zip(*memories, strict=True))

    def _split_usage(self, usage: Tensor) -> tuple[Tensor, Tensor]:
        """usage of [pending; memory] -> average use of [pending; evicted], and the usage to keep after the shift."""
        config = self.config
        if not usage.shape[1]:
            return usage, usage
        waiting = config.compression_rate - 1
        evicted = torch.arange(config.window, device=usage.device)
        windows_seen = -((evicted - config.memory) // config.window)  # each slot's windows in memory
        average = usage[:, waiting : waiting + config.window] / (windows_seen * config.window)
        source = torch.cat([usage[:, :waiting], average], dim=1)
        kept = F.pad(usage[:, waiting + config.window :], (0, config.window))
        return source, torch.cat([source[:, config.window :], kept], dim=1)

    def _compress(
        self,
        boundary: _Boundary,
        source: Tensor,
        usage: Tensor,
        compressed: Tensor,
        available: Tensor,
        before: _Fill,
    ) -> tuple[Tensor, Tensor | None]:
        """Compress the complete groups at the end of source [B, c - 1 + W, D]; rows with equal counts go together."""
        config = self.config
        total_loss: Tensor | None = None
        for count in sorted({int(n) for n in available if n >= config.compression_rate}):
            chosen = available == count
            # A slice where all rows go together, for views instead of copies.
            index = None if bool(chosen.all()) else to_device(chosen.nonzero()[:, 0], source.device)
            rows = slice(None) if index is None else index
            num_groups = count // config.compression_rate
            start = source.shape[1] - count
            consumed = source[rows, start : start + num_groups * config.compression_rate]
            use = usage[rows, start : start + consumed.shape[1]] if usage.shape[1] else None
            groups = boundary.layer.compressor(consumed if boundary.through_time else consumed.detach(), use)
            if torch.is_grad_enabled() and config.compression_loss != "none" and config.compressor_has_parameters:
                shared = start - (config.compression_rate - 1) if not bool(before.pending[chosen].any()) else None
                loss = self._compression_loss(boundary, rows, consumed.detach(), groups, shared)
                if index is not None:
                    loss = loss.new_zeros(len(available)).index_put((index,), loss)
                total_loss = loss if total_loss is None else total_loss + loss
            kept = groups if boundary.through_time else groups.detach()
            newest = torch.cat([compressed[rows], kept.to(compressed.dtype)], dim=1)[:, -config.compressed :]
            compressed = newest if index is None else compressed.index_put((index,), newest)
        return compressed, total_loss

    def _compression_loss(
        self, boundary: _Boundary, rows: slice | Tensor, consumed: Tensor, groups: Tensor, shared: int | None
    ) -> Tensor:
        """Loss of each of `rows` (Algorithm 2, or auto-encoding): only the compressor gets gradient.

        `shared`: place of the consumed slots in [memory; window], where the keys and values of the main attention
        serve again; None where some of them left memory earlier.
        """
        layer, config = boundary.layer, self.config
        if config.compression_loss == "autoencode":
            return mean_square_by_row(layer.compressor.reconstruct(groups), consumed)
        with torch.no_grad():
            if boundary.queries is not None:
                queries = boundary.queries[rows]
            else:
                queries = layer.frozen_projection(boundary.window[rows], layer.attention.query)
            if shared is not None:
                # The attended slots end with [memory in use; window], so count from their end.
                first = boundary.keys.shape[2] - config.window - config.memory + shared
                keys = boundary.keys[rows, :, first : first + consumed.shape[1]]
                values = boundary.values[rows, :, first : first + consumed.shape[1]]
            else:
                keys = layer.frozen_projection(consumed, layer.attention.key)
                values = layer.frozen_projection(consumed, layer.attention.value)
            target = content_attention(queries, keys, values)
        keys = layer.frozen_projection(groups, layer.attention.key)
        values = layer.frozen_projection(groups, layer.attention.value)
        return mean_square_by_row(content_attention(queries.detach(), keys, values), target)

    def decoder(self, state: CompressiveState, *, int8: bool = False) -> Decoder | None:
        """A decoder with cached keys and values; None if the rows are not equally far into their streams.

        int8: weights and cache in 8 bits, for fp32 models on a CPU with a plain softmax. Raises UserError for others.
        """
        # Imported here: those modules import this one, and compiled kernels are for who samples.
        from waveform.decoding.cached import CachedDecoder

        weight = next(self.parameters())
        in_step = not bool((state.steps != state.steps[0]).any())
        plain = isinstance(self.embedding, nn.Embedding) and isinstance(self.head, heads.SoftmaxHead)
        if in_step and plain and weight.device.type == "cpu" and weight.dtype == torch.float32:
            from waveform.decoding.compiled import CompiledDecoder

            return CompiledDecoder(self, state, int8=int8)
        if int8:
            raise UserError(
                "int8 sampling is for fp32 models on a CPU, without adaptive or tied embeddings; sample without it"
            )
        return CachedDecoder(self, state) if in_step else None


def _where_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows where `rows` [B] is true, `old` elsewhere; always of `old`'s dtype."""
    new = new.to(old.dtype)
    if bool(rows.all()):
        return new
    return torch.where(to_device(rows, old.device).view(-1, *[1] * (old.dim() - 1)), new, old)
