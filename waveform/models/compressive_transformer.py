"""The Compressive Transformer (Rae et al. 2019): Transformer-XL whose evicted memories are compressed, not dropped.

Shape letters: B rows, T steps of a call, W window, e window slots in use, M memory slots, C compressed slots, K
attended slots, G new compressed slots, c compression rate, D model width, H heads, d = D / H head width, L layers.

Algorithm 1, of one layer with input h:

    a = h + attention of h over [compressed; memory; window]                    Layer.attend
    output = a + feed-forward(a)                                                Layer.feed_forward
    at the window's end:
        evicted = the oldest W of [memory; window]                              memory.evicted
        groups = f_c(evicted), one for each c steps                             Layer.compress
        loss of f_c: what attention reads of groups and of evicted              Layer.compression_loss
        compressed = the newest C of [compressed; groups]                       memory.after_call
        memory = the newest M of [memory; window]                               memory.after_call

A call may hold many windows, or less than one: `CompressiveTransformer.trunk` cuts it at the windows' ends.
models/run_layers.py runs the layers, one after the other or all in kernels.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.engine.interface import Step, detach
from waveform.models import memory
from waveform.models.attention import AttentionOutput, RelativeAttention, Slots
from waveform.models.compression import attention_loss, autoencoding_loss, compression_function
from waveform.models.dropout import Dropout
from waveform.models.embeddings import token_embedding
from waveform.models.heads import output_head
from waveform.models.initial_values import INIT_STD, initialise
from waveform.models.memory import Clock, CompressiveState
from waveform.models.run_layers import RunsLayers
from waveform.models.token_model import Inputs, TokenModel
from waveform.models.transformer_config import ACTIVATIONS, CompressiveTransformerConfig
from waveform.system.errors import UserError
from waveform.system.linear_layers import Linear, linear


class LayerOutput(NamedTuple):
    """What one layer computes in a call within a window."""

    h: Tensor  # [B, T, D]
    read: Tensor  # [B, T, D] input of the layer or of its attention: what memory will hold
    groups: Tensor | None  # [B, G, D] of the evicted steps; None if nothing is evicted
    loss: Tensor | None  # [B] compression loss
    usage: Tensor  # [B, M] or [B, 0], the attention of this call included


class Layer(nn.Module):
    """Attention over [compressed; memory; window], the feed-forward network, and what evicted steps become."""

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = RelativeAttention(config)
        self.feedforward_norm = nn.LayerNorm(config.d_model)
        self.feedforward_in = Linear(config.d_model, config.d_feedforward)
        self.feedforward_out = Linear(config.d_feedforward, config.d_model)
        if config.norm == "both":
            self.attention_norm_after, self.feedforward_norm_after = (nn.LayerNorm(config.d_model) for _ in range(2))
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout)
        if config.compressed:
            function = compression_function(config.compression)
            options = {name: getattr(config, f"compression_{name}") for name in function.options}
            self.compressor = function(config.d_model, rate=config.compression_rate, **options)
            if config.compression_loss == "autoencode" and self.compressor.has_parameters:
                self.compressor.add_decoder(config.d_model, bias=config.compression_bias)

    def step(self, h_BTD: Tensor, slots: Tensor, window: Tensor, usage: Tensor, clock: Clock) -> LayerOutput:
        """Attend, feed forward and, if a window leaves memory, compress.

        slots [B, C + M, D], window [B, W, D], usage [B, M] or [B, 0]: of this layer, before the call. The clock alone
        decides what is done, never a tensor's values, so the CPU need not wait for a GPU, and compiled code is reused.
        """
        read_BTD = self.attention_norm(h_BTD) if self.config.stores_normed else h_BTD
        window = memory.write_window(window, read_BTD, clock)  # [B, e, D] from here on; at its end e = W
        past = memory.attended_slots(self.config, slots, window, clock)
        attended = self.attend(read_BTD, past, clock.slots)
        out_BTD = self.feed_forward(h_BTD + self.dropout(attended.mixed))
        if usage.shape[1]:
            usage = memory.add_usage(usage, self.attention.received_attention(attended, clock.slots), clock)
        if not self.config.compressed or clock.evicts is False:
            return LayerOutput(out_BTD, read_BTD, None, None, usage)
        return LayerOutput(out_BTD, read_BTD, *self.compress(slots, window, usage, clock, attended), usage)

    def forward(
        self,
        h_BTD: Tensor,
        slots: Tensor,
        window: Tensor,
        usage: Tensor,
        clock: Clock,
        run: Callable[..., LayerOutput] = step,
    ) -> LayerOutput:
        """`step`, called through `run`: as it is, compiled, or to be computed again (`RunsLayers.run_one`).

        Everything that uses this layer's parameters happens in here: FSDP gathers them only for a module's forward.
        """
        return run(self, h_BTD, slots, window, usage, clock)

    def attend(self, read_BTD: Tensor, past: Tensor | None, slots: Slots) -> AttentionOutput:
        """Attend from the queries `read`; `past`: see RelativeAttention.forward.

        Memory holds the layer's inputs, normed here whenever they are read, or already normed when they were stored.
        """
        if not self.config.norms_when_read:
            return self.attention(read_BTD, past, slots)
        past = None if past is None else self._standardise(past)
        return self.attention(self._standardise(read_BTD), past, slots, affine=self.attention_norm)

    def _standardise(self, x: Tensor) -> Tensor:
        """The attention's norm without its weight and bias, which the attention folds into its projections."""
        return F.layer_norm(x, self.attention_norm.normalized_shape, eps=self.attention_norm.eps)

    def feed_forward(self, a_BTD: Tensor) -> Tensor:
        """a + feed-forward(a), with the norms before and after it; a: the layer's input plus its attention's output.

        If norms come after sums, the attention's norm is applied here too, first.
        """
        if self.config.norm == "pre":
            return a_BTD + self._feed_forward(self.feedforward_norm(a_BTD))
        if self.config.norm == "post":
            a_BTD = self.attention_norm(a_BTD)
            return self.feedforward_norm(a_BTD + self._feed_forward(a_BTD))
        a_BTD = self.attention_norm_after(a_BTD)
        return self.feedforward_norm_after(a_BTD + self._feed_forward(self.feedforward_norm(a_BTD)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feedforward_out(self.dropout(self.activation(self.feedforward_in(x)))))

    def compress(
        self, slots: Tensor, window: Tensor, usage: Tensor, clock: Clock, attended: AttentionOutput | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compress the evicted steps -> [B, G, D], and the loss [B]; in rows that evict nothing, neither counts.

        window [B, W, D]: the finished window's inputs. attended: what the last call's attention computed; the loss
        needs it.
        """
        config = self.config
        consumed_BnD = memory.evicted(config, slots, window)
        if not clock.through_time:
            consumed_BnD = consumed_BnD.detach()
        use = memory.average_use(config, usage) if usage.shape[1] else None
        groups_BGD = self.compressor(consumed_BnD[:, : config.num_consumed], use)
        loss = None
        if torch.is_grad_enabled() and config.compression_loss != "none" and self.compressor.has_parameters:
            assert attended is not None
            loss = self.compression_loss(consumed_BnD.detach(), groups_BGD, window, attended)
            if isinstance(clock.evicts, Tensor):
                loss = torch.where(clock.evicts, loss, 0)
        return groups_BGD if clock.through_time else groups_BGD.detach(), loss

    def compression_loss(
        self, consumed_BnD: Tensor, groups_BGD: Tensor, window: Tensor, attended: AttentionOutput
    ) -> Tensor:
        """Compression loss [B] (Algorithm 2, or auto-encoding), from which only the compressor learns.

        With `compression_gradient=as_run`, as the authors' code runs, the key and value projections learn too, and
        steps that do not fill a group count. Raises UserError if there is then no memory.
        """
        config, attention, as_run = self.config, self.attention, self.config.compression_gradient == "as_run"
        consumed_BnD = consumed_BnD if as_run else consumed_BnD[:, : config.num_consumed]
        if config.compression_loss == "autoencode":
            return autoencoding_loss(self.compressor, groups_BGD, consumed_BnD)
        q_BHWd = attended.queries
        with torch.no_grad():
            if q_BHWd.shape[2] != config.window:  # the window came in several calls
                q_BHWd = self.projection(window, attention.query)
            # What was attended ends with [memory; window], whose oldest steps were consumed.
            first = attended.keys.shape[2] - config.window - config.memory
            old = [x[:, :, first : first + consumed_BnD.shape[1]] for x in (attended.keys, attended.values)]
        if as_run:  # queries that come after what was consumed
            if not config.memory:
                raise UserError(
                    "model.compression_gradient=as_run learns from queries after the steps that are compressed, but "
                    "with model.memory=0 there are none; give it a memory, or set model.compression_gradient=intended"
                )
            q_BHWd = q_BHWd[:, :, max(0, consumed_BnD.shape[1] - config.memory) :]
            old = [self.projection(consumed_BnD, x, frozen=False) for x in (attention.key, attention.value)]
        new = [self.projection(groups_BGD, x, frozen=not as_run) for x in (attention.key, attention.value)]
        return attention_loss(q_BHWd, old=old, new=new, trains_old=as_run)

    def projection(self, slots_BKD: Tensor, layer: nn.Linear, *, frozen: bool = True) -> Tensor:
        """Per-head projection of slots -> [B, H, K, d]; gradient flows to slots, and to the weight unless frozen."""
        if self.config.norms_when_read:
            norm = self.attention_norm
            slots_BKD = F.layer_norm(
                slots_BKD, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
            )
        return self.attention.split_heads(linear(slots_BKD, layer.weight.detach() if frozen else layer.weight))


class CompressiveTransformer(TokenModel, RunsLayers):
    """Compressive Transformer over tokens 0..V - 1, with V as the begin-of-utterance input.

    The registered class is this one with its decoders: waveform/decoding/compressive_transformer.py.
    """

    Config: type = CompressiveTransformerConfig

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        std = INIT_STD if config.norm != "post" else 1.0
        rectified, projected = config.input_activation == "relu", config.project_first
        embedding = token_embedding(config.d_model, config, std=std, project_first=projected, rectified=rectified)
        super().__init__(config, embedding, width=config.d_model, std=std)
        self.config, self.kinds = config, config.kinds
        self.dropout = Dropout(config.dropout)
        layers = nn.ModuleList(Layer(kind.config) for kind in self.kinds for _ in kind.layers)
        self.layers = cast(Sequence[Layer], layers)
        has_final_norm = config.norm != "post" and config.final_norm
        self.final_norm = nn.LayerNorm(config.d_model) if has_final_norm else nn.Identity()
        self.head = output_head(config.d_model, config, embedding=embedding, project_first=projected)
        initialise(self)

    def empty_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> CompressiveState:
        """As `TokenModel.empty_state`; slots are of `dtype`."""
        return memory.empty_state(self.config, batch_size, device=device, dtype=dtype)

    def trunk(self, inputs: Inputs, state: CompressiveState) -> Step:
        """Any T >= 1 -> hidden [B, T, D], the new state, and the compression loss of each row.

        The loss ("compression", [B]) is a mean over layers, summed over the windows that end in this call; it is
        computed only if gradients are enabled.
        """
        hiddens, losses = [], []
        # A compressor that has a loss of its own gets no gradient from later windows.
        through_time = self.carry_gradient and not self.compressor_parameters()
        dtype, device = next(self.parameters()).dtype, inputs.tokens.device
        windows = memory.windows(
            self.kinds, state.steps, inputs.tokens.shape[1], device=device, dtype=dtype, through_time=through_time
        )
        for part, clocks in windows:
            h_BTD = inputs.add_to(self.embed(inputs.tokens[:, part], state.steps), part)
            h_BTD, state, loss_B = self.run_layers(self.dropout(h_BTD), state, clocks)
            state = state if self.carry_gradient else detach(state)
            hiddens.append(h_BTD)
            losses += [] if loss_B is None else [loss_B]
        hidden_BTD = self.final_norm(torch.cat(hiddens, dim=1) if len(hiddens) > 1 else hiddens[0])
        aux_losses = {"compression": torch.stack(losses).sum(dim=0)} if losses else {}
        return Step(hidden_BTD, state, aux_losses)

    def embed(self, tokens_BT: Tensor, steps_B: Tensor) -> Tensor:
        """What the first layer reads [B, T, D], before dropout.

        steps_B: tokens that the rows have read before, on the CPU; Transformer-XL's absolute positions need them.
        """
        return self.embedding(tokens_BT)

    # What the engine may use besides `forward` (`OptionalParts` in engine/interface.py)

    def compressor_parameters(self) -> list[nn.Parameter]:
        """Those of every layer's compressor, unless only BPTT trains them."""
        layers = self.layers if self.config.compression_loss != "none" else []
        return [parameter for layer in layers if layer.config.compressed for parameter in layer.compressor.parameters()]

    @property
    def trains_through_time(self) -> bool:
        """Whether the compressor has parameters and no loss of its own."""
        compressors = [layer.compressor for layer in self.layers if layer.config.compressed]
        return self.config.compression_loss == "none" and any(each.has_parameters for each in compressors)

    @property
    def receptive_field(self) -> int:
        """Steps that one layer attends to from the end of a window; layers above reach further through its memory."""
        longest: int = max(kind.config.memory for kind in self.kinds)
        return longest if self.config.same_length else self.config.window + self.config.reach
