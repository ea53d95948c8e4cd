"""The Compressive Transformer (Rae et al. 2019): Transformer-XL whose evicted memories are compressed, not dropped.

Shape letters: B rows, T steps of a call, W window, M memory slots, C compressed slots, K attended slots, n consumed
slots, G new compressed slots (n = G c), c compression rate, D model width, H heads, d = D / H head width, L layers.

Algorithm 1, of one layer with input h:

    output = feed-forward(attention of h over [compressed; memory; window])     Layer.transform
    at the window's end:                                                        Layer.end_window
        evicted = the oldest W of [memory; window], memory = the rest
        compressed = the newest C of [compressed; f_c(evicted)]
        loss of f_c: what attention reads of f_c(evicted) and of evicted        Layer._compression_loss

A call may hold many windows, or less than one: `CompressiveTransformer.forward` cuts it at the windows' ends.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from waveform.engine.interface import OptionalParts, Step, detach
from waveform.models import compressive_state, heads
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.models.compression import Convolution, attention_loss, autoencoding_loss, compression_function
from waveform.models.compressive_state import (
    Advance,
    CompressiveState,
    LayerState,
    PartToCompress,
    Piece,
    put_rows,
    where_rows,
)
from waveform.models.dropout import Dropout
from waveform.models.embeddings import token_embedding
from waveform.models.label_embedding import label_embedding
from waveform.models.linear import Linear, linear
from waveform.models.linear_prediction import linear_prediction, with_prediction
from waveform.models.read_inputs import read_inputs
from waveform.models.transformer_config import ACTIVATIONS, CompressiveTransformerConfig
from waveform.system.errors import UserError

if TYPE_CHECKING:
    from waveform.models.compiled_layers import Compression, DropoutFactors, LayerParameters

INIT_STD = 0.02  # of embeddings, and of what is added to the residual stream
_MIN_QUERIES = 8  # of a call, from which compiled kernels are faster


class LayerOutput(NamedTuple):
    """What one layer makes of one piece."""

    h: Tensor  # [B, T, D]
    state: LayerState
    loss: Tensor | None  # [B] compression loss


class NewSlots(NamedTuple):
    """What evicted slots of b rows were compressed to."""

    groups: Tensor  # [b, G, D]
    loss: Tensor | None  # [b]
    times: Tensor | None = None  # [b, G] relative to the next window's start, if compressed slots have their own


class Layer(nn.Module):
    """One layer: attention over [compressed; memory; window], the feed-forward network, and what becomes of memory."""

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.pre_norm = config.norm == "pre"
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = RelativeAttention(
            config.d_model,
            num_heads=config.num_heads,
            num_position_features=config.num_position_features,
            implementation=config.attention,
            clamp_len=config.clamp_len,
            dropout=config.attention_dropout,
        )
        self.feedforward_norm = nn.LayerNorm(config.d_model)
        self.feedforward_in = Linear(config.d_model, config.d_feedforward)
        self.feedforward_out = Linear(config.d_feedforward, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout)
        if config.compressed:
            self.compressor = compression_function(config.compression)(config.d_model, rate=config.compression_rate)
            if config.compression_loss == "autoencode" and self.compressor.has_parameters:
                self.compressor.add_decoder(config.d_model)
        self.compression_loss = nn.Identity()  # lets forward hooks see this layer's loss [B]

    def initialise(self, *, residual_std: float, local: bool) -> None:
        """residual_std: of the weights whose outputs are added to the residual stream; local: heads look nearby."""
        attention = self.attention
        for projection in (attention.query, attention.key, attention.value, attention.position):
            nn.init.xavier_uniform_(projection.weight)
        if local:
            attention.look_back()
        for projection in (attention.output, self.feedforward_out):
            nn.init.normal_(projection.weight, std=residual_std)
        nn.init.xavier_uniform_(self.feedforward_in.weight)
        nn.init.zeros_(self.feedforward_in.bias)
        nn.init.zeros_(self.feedforward_out.bias)
        if self.config.compressed and self.config.compression_init == "mean":
            self.compressor.initialise()

    def forward(
        self,
        h_BTD: Tensor,
        state: LayerState,
        piece: Piece,
        *,
        checkpointed: bool = False,
        compiled: bool = False,
    ) -> LayerOutput:
        """Attend and feed forward, write the window and, if it ends, evict and compress.

        All that uses this layer's parameters happens in this one call, compression and its loss included, so that
        FSDP can gather them around it. checkpointed: nothing inside is kept for the backward pass, which computes it
        again. compiled: by torch.compile.
        """
        step = compiled_step() if compiled else Layer.step
        if checkpointed:
            dropout = self.dropout.p > 0 or self.attention.dropout.p > 0
            output = checkpoint(step, self, h_BTD, state, piece, use_reentrant=False, preserve_rng_state=dropout)
        else:
            output = step(self, h_BTD, state, piece)
        return output if output.loss is None else output._replace(loss=self.compression_loss(output.loss))

    def step(self, h_BTD: Tensor, state: LayerState, piece: Piece) -> LayerOutput:
        """`forward`, each operation by itself; nothing in it depends on values of tensors."""
        config = self.config
        window = compressive_state.write_window(state.window, h_BTD, piece)
        past = compressive_state.attended_slots(config, state, window, piece)
        slots = compressive_state.with_own_times(config, state, piece)
        h_BTD, attended = self.transform(h_BTD, past, slots)
        if state.usage.shape[1]:
            received = self.attention.received_attention(attended, slots)
            state = state._replace(usage=compressive_state.add_usage(state.usage, received, piece))
        return LayerOutput(h_BTD, *self.advance(state, window, piece, attended))

    def advance(
        self,
        state: LayerState,
        window: Tensor,
        piece: Piece,
        attended: AttentionOutput | None,
        *,
        new_slots: NewSlots | None = None,
    ) -> tuple[LayerState, Tensor | None]:
        """The state after a piece, of which `window` holds the inputs, and the loss [B] of what was compressed.

        attended, new_slots: as in `end_window`.
        """
        loss = None
        if piece.advance.some_done:
            state, loss = self.end_window(
                state, window, piece.advance, attended, through_time=piece.through_time, new_slots=new_slots
            )
        if not piece.advance.all_done:
            window = torch.cat([window.to(state.window.dtype), state.window[:, piece.end :]], dim=1)
            state = state._replace(window=window)
        return state, loss

    def parameters_for_kernels(self) -> "LayerParameters":
        """The weights that compiled kernels take."""
        from waveform.models.compiled_layers import LayerParameters

        attention, norm = self.attention, self.attention_norm
        feed_norm, feed_in, feed_out = self.feedforward_norm, self.feedforward_in, self.feedforward_out
        return LayerParameters(
            *(norm.weight, norm.bias, attention.query.weight, attention.key.weight, attention.value.weight),
            *(attention.content_bias, attention.position_bias, attention.position.weight, attention.output.weight),
            *(feed_norm.weight, feed_norm.bias, feed_in.weight, feed_in.bias, feed_out.weight, feed_out.bias),
        )

    def dropout_for_kernels(self, h_BTD: Tensor) -> "DropoutFactors":
        """What the layer's dropout multiplies with, drawn in the order in which `transform` draws."""
        from waveform.models.compiled_layers import DropoutFactors

        widths = (self.config.d_model, self.config.d_feedforward, self.config.d_model)
        return DropoutFactors(*(self.dropout(h_BTD.new_ones(*h_BTD.shape[:2], width)) for width in widths))

    def transform(self, h_BTD: Tensor, past: Tensor | None, slots: Slots) -> tuple[Tensor, AttentionOutput]:
        """h -> output [B, T, D] and what the attention computed; `past`: see RelativeAttention.forward."""
        if self.pre_norm:
            past = None if past is None else self._standardise(past)
            attended = self.attention(self._standardise(h_BTD), past, slots, affine=self.attention_norm)
            h_BTD = h_BTD + self.dropout(attended.mixed)
            return h_BTD + self._feedforward(self.feedforward_norm(h_BTD)), attended
        attended = self.attention(h_BTD, past, slots)
        h_BTD = self.attention_norm(h_BTD + self.dropout(attended.mixed))
        return self.feedforward_norm(h_BTD + self._feedforward(h_BTD)), attended

    def _standardise(self, x: Tensor) -> Tensor:
        """The attention's norm without its weight and bias, which the attention folds into its projections."""
        return F.layer_norm(x, self.attention_norm.normalized_shape, eps=self.attention_norm.eps)

    def _feedforward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feedforward_out(self.dropout(self.activation(self.feedforward_in(x)))))

    def end_window(
        self,
        state: LayerState,
        window_BWD: Tensor,
        advance: Advance,
        attended: AttentionOutput | None = None,
        *,
        through_time: bool = False,
        new_slots: NewSlots | None = None,
    ) -> tuple[LayerState, Tensor | None]:
        """Evict, compress and shift in the rows whose window is done; also the loss [B] of what was compressed.

        window_BWD: the finished window's inputs. attended: what the last call's attention computed, if there was one;
        the loss needs it. new_slots: what the one part to compress has become, if that is known.
        `state.window` stays as it is.
        """
        config, done = self.config, advance.done_mask
        evicted_BWD, kept_BMD = compressive_state.evict(config, state.memory, window_BWD)
        ended = state._replace(memory=where_rows(done, kept_BMD, state.memory))
        if not config.compressed:
            return ended, None
        use, kept_use = compressive_state.split_usage(config, state.usage)
        ended = ended._replace(usage=where_rows(done, kept_use, state.usage))
        if state.times is not None:
            ended = ended._replace(times=where_rows(done, state.times - config.window, state.times))
        if not advance.evicts:
            return ended, None  # memory is not full yet
        source = torch.cat([state.pending.to(window_BWD.dtype), evicted_BWD], dim=1)  # [B, c - 1 + W, D]
        compressed_BCD, times_BC, total_loss = state.compressed, ended.times, None
        for part in advance.parts:
            made = new_slots
            if made is None:
                consumed_BnD = source[part.rows, part.first : part.last]
                use_Bn = use[part.rows, part.first : part.last] if use.shape[1] else None
                consumed_BnD = consumed_BnD if through_time else consumed_BnD.detach()
                made = self._compress(part, consumed_BnD, use_Bn, window_BWD, attended)
            if made.loss is not None:
                loss = put_rows(part.rows, made.loss, made.loss.new_zeros(len(source)))
                total_loss = loss if total_loss is None else total_loss + loss
            kept = made.groups if through_time else made.groups.detach()
            compressed_BCD = _append(kept, part, compressed_BCD)
            if made.times is not None and times_BC is not None:
                times_BC = _append(made.times, part, times_BC)
        pending = where_rows(done, source[:, config.window :].contiguous(), state.pending)
        return ended._replace(compressed=compressed_BCD, pending=pending, times=times_BC), total_loss

    def _compress(
        self,
        part: PartToCompress,
        consumed_BnD: Tensor,
        use_Bn: Tensor | None,
        window_BWD: Tensor,
        attended: AttentionOutput | None,
    ) -> NewSlots:
        groups_BGD, loss = self.compressor(consumed_BnD, use_Bn), None
        if torch.is_grad_enabled() and self.config.compression_loss != "none" and self.compressor.has_parameters:
            assert attended is not None
            loss = self._compression_loss(part, consumed_BnD.detach(), groups_BGD, window_BWD, attended)
        times_bG = None
        if self.config.keeps_times:
            times_n = compressive_state.source_times(self.config, device=consumed_BnD.device)[part.first : part.last]
            times_bG = times_n[self.compressor.kept(consumed_BnD, use_Bn)]
        return NewSlots(groups_BGD, loss, times_bG)

    def _compression_loss(
        self,
        part: PartToCompress,
        consumed_BnD: Tensor,
        groups_BGD: Tensor,
        window_BWD: Tensor,
        attended: AttentionOutput,
    ) -> Tensor:
        """Loss [rows of `part`] of what was compressed (Algorithm 2, or auto-encoding); only the compressor learns."""
        config = self.config
        if config.compression_loss == "autoencode":
            return autoencoding_loss(self.compressor, groups_BGD, consumed_BnD)
        query, key, value = self.attention.query, self.attention.key, self.attention.value
        with torch.no_grad():
            if attended.queries.shape[2] == config.window:
                q_BHWd = attended.queries[part.rows]
            else:  # the window came in several calls
                q_BHWd = self.frozen_projection(window_BWD[part.rows], query)
            if part.was_attended:
                # The attended slots end with [memory in use; window]: count the consumed ones from the end.
                memory_start = attended.keys.shape[2] - config.window - config.memory
                first = memory_start + part.first - (config.compression_rate - 1)
                last = first + consumed_BnD.shape[1]
                k_BHnd, v_BHnd = (x[part.rows, :, first:last] for x in (attended.keys, attended.values))
            else:
                k_BHnd, v_BHnd = (self.frozen_projection(consumed_BnD, x) for x in (key, value))
        k_BHGd, v_BHGd = (self.frozen_projection(groups_BGD, x) for x in (key, value))
        return attention_loss(q_BHWd, old=(k_BHnd, v_BHnd), new=(k_BHGd, v_BHGd))

    def frozen_projection(self, slots_BKD: Tensor, projection: nn.Linear) -> Tensor:
        """Per-head projection of raw slots -> [B, H, K, d] with detached weights: gradient flows to the slots."""
        if self.pre_norm:
            norm = self.attention_norm
            slots_BKD = F.layer_norm(
                slots_BKD, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
            )
        return self.attention.split_heads(linear(slots_BKD, projection.weight.detach()))


def _append(new_bGx: Tensor, part: PartToCompress, old_BCx: Tensor) -> Tensor:
    """`old_BCx` whose rows of `part` end with `new_bGx`; the oldest slots leave."""
    # Copies: views would keep all that they were cut from alive, and their strides would tell how they came.
    newest = new_bGx[:, -old_BCx.shape[1] :].to(old_BCx.dtype)
    return put_rows(part.rows, torch.cat([old_BCx[part.rows, newest.shape[1] :], newest], dim=1), old_BCx)


@functools.cache
def compiled_step() -> Callable[[Layer, Tensor, LayerState, Piece], LayerOutput]:
    """`Layer.step` by torch.compile: compiled once for all layers, for each of the few shapes of a steady piece."""
    return torch.compile(Layer.step, dynamic=False)


class CompressiveTransformer(nn.Module, OptionalParts):
    """Compressive Transformer over tokens 0..V - 1, with V as the begin-of-utterance input.

    What is registered is this model with its decoders: waveform/decoding/compressive_transformer.py.
    """

    Config: type = CompressiveTransformerConfig

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self._compiles = False
        pre_norm = config.norm == "pre"
        embedding_std = INIT_STD if pre_norm else 1.0
        self.embedding = token_embedding(
            config.d_model,
            vocab_size=config.vocab_size,
            cutoffs=config.cutoffs,
            div_value=config.div_value,
            tie_embeddings=config.tie_embeddings,
            project_first=config.project_first,
            std=embedding_std,
        )
        self.label_embedding = label_embedding(
            config.d_model, num_labels=config.num_labels, vocab_size=config.vocab_size
        )
        self.linear_prediction = linear_prediction(config.d_model, config.prediction, config.classes, std=embedding_std)
        self.dropout = Dropout(config.dropout)
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(config) for _ in range(config.num_layers)))
        self.final_norm = nn.LayerNorm(config.d_model) if pre_norm else nn.Identity()
        self.head = heads.output_head(
            config.d_model,
            vocab_size=config.vocab_size,
            cutoffs=config.cutoffs,
            div_value=config.div_value,
            project_first=config.project_first,
            tied_to=self.embedding if config.tie_embeddings else None,
            classes=config.classes if self.linear_prediction is not None else None,
        )
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=embedding_std)
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers) if pre_norm else INIT_STD
        for i, layer in enumerate(self.layers):
            layer.initialise(residual_std=residual_std, local=i < int(config.local_layers * config.num_layers))

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Those of every layer's compressor, unless only BPTT trains them."""
        if self.config.compression_loss == "none" or not self.config.compressed:
            return []
        return [parameter for layer in self.layers for parameter in layer.compressor.parameters()]

    def sharding_units(self, window: int) -> list[nn.Module]:
        """The layers; none if neither `window` nor the model's window is a multiple of the other.

        The number of pieces that a call is cut into then depends on the rows' phases.
        """
        own = self.config.window
        return list(self.layers) if not (window % own and own % window) else []

    def compile_layers(self, window: int) -> bool:
        """Steady windows of training (`is_steady`) run in compiled layers from now on; others, and kernels', do not."""
        if self.config.attention != "fused":
            raise UserError(
                f"train.compile=true cannot compile model.attention={self.config.attention}; set model.attention=fused "
                "or train.compile=false"
            )
        if self.config.compressed and self.layers[0].compressor.uses_attention:
            raise UserError(
                f"train.compile=true cannot compile model.compression={self.config.compression}, which looks at "
                "attention weights; leave it false, or choose another compression"
            )
        if window % self.config.window:
            raise UserError(
                f"train.compile=true compiles whole windows of the model, but training reads {window} tokens at once; "
                f"set train.window to a multiple of model.window={self.config.window}, or train.compile=false"
            )
        self._compiles = True
        return True

    @property
    def trains_through_time(self) -> bool:
        """Whether the compressor has parameters and no loss of its own."""
        config = self.config
        return config.compression_loss == "none" and config.compressed > 0 and self.layers[0].compressor.has_parameters

    @property
    def brings_threads(self) -> bool:
        """If there are compiled kernels for its sizes, as for all small models, and its layers are left to them."""
        return (
            self.config.has_kernels
            and not self._compiles
            and not (self.checkpoint_activations and torch.is_grad_enabled())
            and type(self.layers[0].attention_norm.weight) is nn.Parameter  # not sharded
        )

    def prepare_kernels(self) -> None:
        """Compile those of small models, which takes some 15 s unless they are on disk."""
        if self.config.has_kernels and not self._compiles:  # for evaluations even if no step runs in them
            from waveform.models.compiled_layers import compile_kernels  # here: others do without numba

            compile_kernels()

    @property
    def receptive_field(self) -> int:
        """Steps that one layer attends to from the end of a window; layers above reach further through its memory."""
        config = self.config
        if config.same_length:
            return config.memory
        return config.window + config.memory + config.compression_rate * config.compressed

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> CompressiveState:
        """State of `batch_size` streams of which nothing has been read; slots are of `dtype`."""
        empty = compressive_state.empty_state(self.config, batch_size, device=device, dtype=dtype)
        if self.label_embedding is not None:
            empty = empty._replace(labels=self.label_embedding.init_state(batch_size, device=device))
        if self.linear_prediction is not None:
            empty = empty._replace(predictors=self.linear_prediction.init_state(batch_size, device=device))
        return empty

    def forward(self, tokens_BT: Tensor, state: CompressiveState) -> Step:
        """Any T >= 1 -> hidden [B, T, D], the new state, and the compression loss of each row.

        The loss ("compression", [B]) is a mean over layers, summed over the windows that end in this call; it is
        computed only if gradients are enabled.
        """
        pieces, losses = [], []
        inputs = read_inputs(self, tokens_BT, state.labels, state.predictors)
        tokens_BT, added_BTD, start = inputs.tokens, inputs.added, 0
        while start < tokens_BT.shape[1]:
            # No row's window may end inside a piece.
            length = self.config.window - int((state.steps % self.config.window).max())
            part = slice(start, start + length)
            piece, state, loss = self._within_window(
                tokens_BT[:, part], None if added_BTD is None else added_BTD[:, part], state
            )
            pieces.append(piece)
            losses += [loss] if loss is not None else []
            start += length
        hidden_BTD = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        aux_losses = {"compression": torch.stack(losses).sum(dim=0)} if losses else {}
        hidden_BTD = with_prediction(self.final_norm(hidden_BTD), inputs.prediction)
        return Step(hidden_BTD, state._replace(**inputs.kept), aux_losses)

    def embed(self, tokens_BT: Tensor, steps_B: Tensor) -> Tensor:
        """What the first layer reads [B, T, D], before dropout; steps_B: what the rows have read before, on the CPU."""
        return self.embedding(tokens_BT)

    def _within_window(
        self, tokens_BT: Tensor, added_BTD: Tensor | None, state: CompressiveState
    ) -> tuple[Tensor, CompressiveState, Tensor | None]:
        """Hidden vectors, the state but for what `read_inputs` keeps, and the loss; see `forward`."""
        num_new = tokens_BT.shape[1]
        piece = compressive_state.next_piece(
            self.config,
            state.steps,
            num_new,
            device=tokens_BT.device,
            dtype=next(self.parameters()).dtype,
            through_time=self.carry_gradient and not self.compressor_parameters(),
        )
        h_BTD = self.embed(tokens_BT, state.steps)
        if added_BTD is not None:
            h_BTD = h_BTD + added_BTD
        h_BTD = self.dropout(h_BTD)
        layer_states, total_loss = [], None
        checkpointed = self.checkpoint_activations and torch.is_grad_enabled()
        if self._takes_kernels(h_BTD, piece):
            return self._by_kernels(h_BTD, state, piece)
        compiled = (
            self._compiles
            and torch.is_grad_enabled()
            and compressive_state.is_steady(self.config, piece)
            and not is_in_torch_dispatch_mode()  # as above
        )
        for layer, layer_state in zip(self.layers, state.layers(), strict=True):
            h_BTD, layer_state, loss = layer(h_BTD, layer_state, piece, checkpointed=checkpointed, compiled=compiled)
            layer_states.append(layer_state)
            if loss is not None:
                total_loss = loss if total_loss is None else total_loss + loss
        new_state = CompressiveState.of_layers(state.steps + num_new, layer_states)
        if total_loss is not None:
            total_loss = total_loss / self.config.num_layers
        return h_BTD, new_state if self.carry_gradient else detach(new_state), total_loss

    def _by_kernels(
        self, h_BTD: Tensor, state: CompressiveState, piece: Piece
    ) -> tuple[Tensor, CompressiveState, Tensor | None]:
        """The rest of `_within_window`, from the embedding on, by compiled kernels."""
        from waveform.models.compiled_layers import compiled_layers, pack_encodings  # here: others do without numba

        old_states = state.layers()
        dropout = None
        if self.training and self.config.dropout:
            dropout = [layer.dropout_for_kernels(h_BTD) for layer in self.layers]
        made = compiled_layers(
            h_BTD,
            [compressive_state.attended_slots(self.config, old, h_BTD, piece) for old in old_states],
            pack_encodings(piece.slots),
            [layer.parameters_for_kernels() for layer in self.layers],
            self._compression_for_kernels(piece),
            dropout,
            epsilon=self.layers[0].attention_norm.eps,
        )
        states, losses = [], []
        for i, (layer, old) in enumerate(zip(self.layers, old_states, strict=True)):
            window = compressive_state.write_window(old.window, made.inputs[i], piece)
            attended = new_slots = None
            if made.queries is not None and made.keys is not None and made.values is not None:
                attended = AttentionOutput(made.out, made.queries[i], made.keys[i], made.values[i])
            if made.groups is not None:
                new_slots = NewSlots(made.groups[i], None if made.losses is None else made.losses[i])
            new, loss = layer.advance(old, window, piece, attended, new_slots=new_slots)
            states.append(new)
            losses += [] if loss is None else [layer.compression_loss(loss)]
        total_loss = torch.stack(losses).mean(dim=0) if losses else None
        return made.out, detach(CompressiveState.of_layers(state.steps + piece.num_new, states)), total_loss

    def _compression_for_kernels(self, piece: Piece) -> "Compression | None":
        """What kernels can compress at the end of `piece`: memory that it attends to, for the loss that they know."""
        from waveform.models.compiled_layers import Compression

        config, parts = self.config, piece.advance.parts
        if not config.compressed or config.compression != "conv" or config.compression_loss != "attention":
            return None
        if len(parts) != 1 or piece.num_new < config.window or config.window > config.memory:
            return None
        (part,) = parts
        if part.rows != slice(None) or not part.was_attended:
            return None
        convolutions = [cast(Convolution, layer.compressor).convolution for layer in self.layers]
        return Compression(
            weights=[convolution.weight for convolution in convolutions],
            biases=[cast(nn.Parameter, convolution.bias) for convolution in convolutions],
            first=part.first - (config.compression_rate - 1) + piece.num_compressed + piece.num_memory - config.memory,
            num_groups=(part.last - part.first) // config.compression_rate,
            has_loss=torch.is_grad_enabled(),
        )

    def _takes_kernels(self, h_BTD: Tensor, piece: Piece) -> bool:
        """Whether compiled kernels can run the layers, and are the faster way."""
        return (
            self.brings_threads
            and h_BTD.device.type == "cpu"
            and h_BTD.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and piece.num_new >= _MIN_QUERIES
            and piece.slots.visible is None
            and not self.carry_gradient
            and not self.layers[0].attention.observed
            and not is_in_torch_dispatch_mode()  # which would not see what they do
        )

    @torch.no_grad()
    def close_window(self, state: CompressiveState) -> CompressiveState:
        """The state at the next window's start, for a decoder: `state.window` is full, all rows are equally far.

        `state.steps` may still count from anywhere within that window.
        """
        num_left = self.config.window - state.steps % self.config.window
        device = state.memory[0].device
        advance = compressive_state.advance(self.config, state.steps, num_left, device=device)
        layers = zip(self.layers, state.layers(), strict=True)
        closed = [layer.end_window(memory, memory.window, advance)[0] for layer, memory in layers]
        return CompressiveState.of_layers(state.steps + num_left, closed)
