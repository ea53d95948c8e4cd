"""Relative attention of a window's queries over slots: [compressed memory; memory; window].

Shape letters: B rows, T queries, K slots, D model width, H heads, d = D / H head width, P position features,
E = d + P width of fused queries and keys.

Times are real numbers relative to the start of the current window, so that angles stay small and exact in fp32
however long the stream is: window slot s has time s, the newest memory slot -1.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.engine.interface import fp64_device
from waveform.models.dropout import Dropout
from waveform.system.linear_layers import Linear, linear

_BASE = 10000.0  # the longest wavelength of the sinusoidal encoding, over 2 pi (Vaswani et al. 2017, section 3.5)
VECTOR = 16  # floats; compiled kernels need widths that are multiples of it
_MIN_SCORES = 1 << 18  # scores of a call below which torch is as fast as kernels
_QUERIES = 128  # queries whose weights `received_attention` holds at a time
_LOOK_BACK_POWER = 4.0  # the attention of a local head falls off about as distance ** -4


class Slots(NamedTuple):
    """When the attended slots were read and which of them a query sees; the same for layers with the same sizes."""

    query_times: Tensor  # [1 or B, T]
    slot_times: Tensor  # [1, K]
    query_encoding: Tensor  # [1 or B, T, P], `encode_times` of the above, once for all layers
    slot_encoding: Tensor  # [1, K, P]; [1, K, 2 P] if compressed slots have a projection of their own
    visible: Tensor | None  # [1 or B, 1, T, K], bool; None: query i sees slots up to K - T + i
    # `visible` in the form that `softmax_attention` takes, if it is not None: 0 and -inf, in the dtype of queries; or,
    # on a CPU, if rows differ only in how many slots are empty, the first slot in use of each row
    bias: Tensor | None = None
    first_used: tuple[int, ...] | None = None
    num_compressed: int = 0  # how many of the slots are compressed; they come first

    @property
    def seen(self) -> Tensor:
        """`visible`, or the causal mask that None stands for."""
        if self.visible is not None:
            return self.visible
        return (self.query_times[..., :, None] >= self.slot_times[..., None, :])[:, None]


def encode_times(times: Tensor, *, num_position_features: int, dtype: torch.dtype) -> Tensor:
    """times [...] -> R(t) = [sin(w t); cos(w t)] [..., P] of `dtype`, from angles never below fp32."""
    precise = torch.promote_types(dtype, torch.float32)
    half = torch.arange(num_position_features // 2, dtype=torch.float64, device=fp64_device(times.device))
    w = (_BASE ** (-2.0 * half / num_position_features)).to(precise).to(times.device)
    angles = times.to(precise)[..., None] * w
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def rotate_to_time(a: Tensor, encoding: Tensor) -> Tensor:
    """a [..., T, P], encoding R(t_i) broadcasting to it -> the part of a fused query that meets a slot's R(t_j).

    With a = [a_s; a_c], the inner product of the result with [sin(w t_j); cos(w t_j)] is a . R(t_i - t_j).
    """
    sin, cos = encoding.to(a.dtype).chunk(2, dim=-1)
    a_s, a_c = a.chunk(2, dim=-1)
    return torch.cat([a_c * sin - a_s * cos, a_s * sin + a_c * cos], dim=-1)


class AttentionOutput(NamedTuple):
    """What a call computed. The compression loss uses queries, keys and values again, so that none is made twice."""

    mixed: Tensor  # [B, T, D]
    queries: Tensor  # [B, H, T, d], without biases
    keys: Tensor  # [B, H, K, d], content only
    values: Tensor  # [B, H, K, d]


class RelativeAttention(nn.Module):
    """Multi-head attention with Transformer-XL's relative positions (Dai et al. 2019, section 3.3 and appendix B).

    logit_ij = ((q_i + u) . k_j + (q_i + v) . W_R R(t_i - t_j)) / sqrt(d). `fused` folds the second term into longer
    queries and keys, exact because R is sinusoidal; `reference` evaluates it for each distance and gathers.
    """

    def __init__(self, config: Any) -> None:
        """config: a CompressiveTransformerConfig, whose module imports this one."""
        super().__init__()
        d_model, num_heads, num_position_features = config.d_model, config.num_heads, config.num_position_features
        self.num_heads: int = num_heads
        self.num_position_features: int = num_position_features
        self.implementation, self.clamp_len = config.attention, config.clamp_len
        self.dropout = Dropout(config.attention_dropout)
        self.query = Linear(d_model, d_model, bias=False)
        self.key = Linear(d_model, d_model, bias=False)
        self.value = Linear(d_model, d_model, bias=False)
        self.output = Linear(d_model, d_model, bias=config.output_bias)
        self.position = nn.Linear(num_position_features, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, d_model // num_heads))  # u
        self.position_bias = nn.Parameter(torch.zeros(num_heads, d_model // num_heads))  # v
        self.compressed_apart: bool = config.compressed_apart  # compressed slots have a W_R and a v of their own
        if self.compressed_apart:
            self.compressed_position = nn.Linear(num_position_features, d_model, bias=False)
            self.compressed_position_bias = nn.Parameter(torch.zeros(num_heads, d_model // num_heads))

    @property
    def is_fused(self) -> bool:
        """Whether `fused` is asked for and possible: not with `clamp_len`, nor with dropout of weights in training."""
        return self.implementation == "fused" and not self.clamp_len and not (self.training and self.dropout.p)

    def split_heads(self, x_BTD: Tensor) -> Tensor:
        """-> [B, H, T, d]."""
        return x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def position_queries(self, q_BHTd: Tensor) -> list[Tensor]:
        """(q + v)^T W_R of each head -> [B, H, T, P]; a second one for compressed slots if they are apart."""
        pairs = [(self.position, self.position_bias)]
        if self.compressed_apart:
            pairs.append((self.compressed_position, self.compressed_position_bias))
        return [
            (q_BHTd + v[:, None].to(q_BHTd.dtype)) @ layer.weight.unflatten(0, (self.num_heads, -1)).to(q_BHTd.dtype)
            for layer, v in pairs
        ]

    @torch.no_grad()
    def look_back(self) -> None:
        """Let each head start with a preference for one distance: 0, 1, 2, 4, ...

        The papers name no initial values for v. With zeros every head starts blind to position, and small models spend
        much of a short training on learning to look at their neighbours. But a head that starts local sees nothing
        far away, and learns slowly to find what is in memory by its content, so not every layer should start so
        (results/notes.md has the figures).
        """
        distances = torch.tensor([0.0] + [2.0**h for h in range(self.num_heads - 1)])
        # a . R(x) is largest at x = k for a = R(k): it is the sum of cos(w (x - k)) over the P / 2 frequencies. Away
        # from k those with w |x - k| > 1 cancel out, which leaves P / 2 (1 - log |x - k| / log 10000).
        gain = _LOOK_BACK_POWER * math.log(_BASE) / (self.num_position_features / 2)
        wanted_HP = encode_times(distances, num_position_features=self.num_position_features, dtype=torch.float32)
        weight_HdP = self.position.weight.view(self.num_heads, -1, self.num_position_features)
        v_Hd = nn.init.normal_(self.position_bias)
        missing_HP = gain * wanted_HP * v_Hd.shape[1] ** 0.5 - torch.einsum("hd,hdp->hp", v_Hd, weight_HdP)
        weight_HdP += v_Hd[..., None] * missing_HP[:, None] / v_Hd.square().sum(dim=1)[:, None, None]

    def forward(
        self, x_BTD: Tensor, past: Tensor | None, slots: Slots, *, affine: nn.LayerNorm | None = None
    ) -> AttentionOutput:
        """x_BTD: the queries, which are also the last T slots; past [B, K - T, D]: the slots before them, None if none.

        If `past` holds all K slots (the queries stand at different places of their rows' windows), x_BTD is queries
        only. affine: a norm whose weight and bias are still to be applied to x_BTD and past. They are folded into the
        projections here, so that the gradient of a memory slot, which nothing needs, is never computed to get theirs.
        """
        weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])
        bias = None
        if affine is not None:
            bias, weight = weight @ affine.bias, weight * affine.weight
        widths = [x_BTD.shape[-1], 2 * x_BTD.shape[-1]]  # of queries; of keys and values
        q_weight, kv_weight = weight.split(widths)
        q_bias, kv_bias = (None, None) if bias is None else bias.split(widths)
        if past is not None and past.shape[1] == slots.slot_times.shape[1]:
            q, kv = linear(x_BTD, q_weight, q_bias), linear(past, kv_weight, kv_bias)
        else:
            q, kv = linear(x_BTD, weight, bias).split(widths, dim=-1)
            if past is not None:
                kv = torch.cat([linear(past, kv_weight, kv_bias), kv], dim=1)
        k_BHKd, v_BHKd = (self.split_heads(part) for part in kv.chunk(2, dim=-1))
        q_BHTd = self.split_heads(q)
        if self.is_fused:
            mixed_BHTd = softmax_attention(
                self._fused_queries(q_BHTd, slots),
                k_BHKd,
                v_BHKd,
                scale=q_BHTd.shape[-1] ** -0.5,
                causal=slots.visible is None,
                bias=slots.bias,
                first_used=slots.first_used,
                encoding=slots.slot_encoding.to(q_BHTd.dtype),
            )
        else:
            mixed_BHTd = self.dropout(self.weights(q_BHTd, k_BHKd, slots)) @ v_BHKd
        return AttentionOutput(self.output(mixed_BHTd.transpose(1, 2).flatten(2)), q_BHTd, k_BHKd, v_BHKd)

    def _fused_queries(self, q_BHTd: Tensor, slots: Slots) -> Tensor:
        """-> [B, H, T, d + P], whose products with [k; R(t)] are the logits except for the scale."""
        rotated = [rotate_to_time(query, slots.query_encoding[:, None]) for query in self.position_queries(q_BHTd)]
        return torch.cat([q_BHTd + self.content_bias[:, None].to(q_BHTd.dtype), *rotated], dim=-1)

    def content_logits(self, q_BHTd: Tensor, k_BHKd: Tensor) -> Tensor:
        """(q + u) . k of every query and slot -> [B, H, T, K], before the scale."""
        return (q_BHTd + self.content_bias[:, None].to(q_BHTd.dtype)) @ k_BHKd.transpose(-1, -2)

    def position_logits(self, q_BHTd: Tensor, slots: Slots) -> Tensor:
        """(q + v) . W_R R(t_i - t_j) -> [B, H, T, K] as in the paper: R of every distance, projected, gathered."""
        distances = slots.query_times[..., :, None] - slots.slot_times[..., None, :]  # [1 or B, T, K]
        told_apart = distances.clamp(max=self.clamp_len) if self.clamp_len else distances
        unique, index = torch.unique(told_apart, return_inverse=True)
        encoding = encode_times(unique, num_position_features=self.num_position_features, dtype=q_BHTd.dtype)
        index_BHTK = index.view(distances.shape)[:, None].expand(*q_BHTd.shape[:3], -1)
        logits = [(query @ encoding.t()).gather(-1, index_BHTK) for query in self.position_queries(q_BHTd)]
        if not self.compressed_apart:
            return logits[0]
        is_compressed = torch.arange(index_BHTK.shape[-1], device=index_BHTK.device) < slots.num_compressed
        return torch.where(is_compressed, logits[1], logits[0])

    def weights(self, q_BHTd: Tensor, k_BHKd: Tensor, slots: Slots) -> Tensor:
        """All attention weights [B, H, T, K], which `fused` never holds at once."""
        logits_BHTK = self.content_logits(q_BHTd, k_BHKd) + self.position_logits(q_BHTd, slots)
        return softmax_of_visible(logits_BHTK * q_BHTd.shape[-1] ** -0.5, slots)

    @torch.no_grad()
    def received_attention(self, attended: AttentionOutput, slots: Slots) -> Tensor:
        """Weight that each slot received, summed over the queries and averaged over the heads: [B, K]."""
        if not self.is_fused:
            return self.weights(attended.queries, attended.keys, slots).mean(dim=1).sum(dim=1)
        scale = attended.queries.shape[-1] ** -0.5
        keys_BHEK = long_keys(attended.keys, slots.slot_encoding).transpose(-1, -2)
        received_BK = attended.keys.new_zeros(keys_BHEK.shape[0], keys_BHEK.shape[-1])
        fused = self._fused_queries(attended.queries, slots).split(_QUERIES, dim=2)
        for q_BHTE, seen in zip(fused, slots.seen.split(_QUERIES, dim=2), strict=True):
            weights = (scale * q_BHTE @ keys_BHEK).masked_fill_(~seen, float("-inf")).softmax(dim=-1)
            received_BK += weights.sum(dim=2).mean(dim=1)
        return received_BK


def position_query(attention: RelativeAttention) -> tuple[Tensor, Tensor]:
    """(q + v)^T W_R of an input x [D] as weight x + constant: weight [H, P, D] and constant [H, P].

    If keys are cached, as in decoders, the position term is one complex product per query: the real part of
    (a_c - i a_s) e^{i w t} e^{-i w s}, summed over w, for a query at time t and a slot at time s (`rotate_to_time`).
    Each head's features are a_c, then -a_s.
    """
    w_r, w_q = (layer.weight.unflatten(0, (attention.num_heads, -1)) for layer in (attention.position, attention.query))
    a = torch.einsum("hdp,hdm->hpm", w_r, w_q), torch.einsum("hdp,hd->hp", w_r, attention.position_bias)
    halves = (x.chunk(2, dim=1) for x in a)
    weight, constant = (torch.cat([cosine, -sine], dim=1) for sine, cosine in halves)
    return weight, constant


def softmax_of_visible(logits_BHTK: Tensor, slots: Slots) -> Tensor:
    """Softmax over the slots that each query sees -> [B, H, T, K]."""
    return logits_BHTK.masked_fill(~slots.seen, float("-inf")).softmax(dim=-1)


def attention_bias(visible: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`Slots.bias` [1 or B, 1, T, K]; dtype: of the parameters; under autocast, it has autocast's, as queries do."""
    device = visible.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def content_attention(q_BHTd: Tensor, k_BHKd: Tensor, v_BHKd: Tensor) -> Tensor:
    """Attention by content alone, without positions or biases: [B, H, T, d] of each head (Rae et al. 2019, Alg. 2)."""
    return softmax_attention(q_BHTd, k_BHKd, v_BHKd, scale=q_BHTd.shape[-1] ** -0.5)


def softmax_attention(
    q_BHTE: Tensor,
    k_BHKd: Tensor,
    v_BHKd: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
    first_used: tuple[int, ...] | None = None,
    encoding: Tensor | None = None,
) -> Tensor:
    """softmax(scale q [k; encoding]^T + bias) v by the kernel that is fast on the device, [B, H, T, d].

    encoding [1, K, P]: further columns of every head's keys, without gradient (None if E = d). causal: query i sees
    slots up to K - T + i. bias, first_used: see `Slots`. A torch function mode sees this call as it sees torch's own,
    so that waveform/benchmarks/flops.py can count it.
    """
    if has_torch_function_unary(q_BHTE):
        options: dict[str, Any] = {"causal": causal, "bias": bias, "first_used": first_used, "encoding": encoding}
        return handle_torch_function(softmax_attention, (q_BHTE,), q_BHTE, k_BHKd, v_BHKd, scale=scale, **options)
    if first_used is not None:  # rows with the same number of slots together: a third of the time that a bias takes
        parts, order = [], []
        for first in sorted(set(first_used)):
            rows = [row for row, other in enumerate(first_used) if other == first]
            given = q_BHTE[rows], k_BHKd[rows, :, first:], v_BHKd[rows, :, first:]
            of_rows = None if encoding is None else encoding[:, first:]
            parts.append(softmax_attention(*given, scale=scale, causal=True, encoding=of_rows))
            order += rows
        return torch.cat(parts)[torch.tensor(order).argsort()]
    if bias is None and _takes_kernels(q_BHTE, k_BHKd):
        from waveform.kernels.attention import attention_in_kernels  # here, to load numba only if it is used

        num_missing = -q_BHTE.shape[3] % VECTOR  # features that fill up whole vectors
        padded = None if encoding is None else F.pad(encoding.float(), (0, num_missing))
        given = F.pad(q_BHTE.float(), (0, num_missing)), k_BHKd.float(), v_BHKd.float()  # faster than torch in bf16
        return attention_in_kernels(*given, scale=scale, causal=causal, encoding=padded).to(q_BHTE.dtype)
    # Flash kernels need values as wide as the keys.
    k_BHKE, d_head = long_keys(k_BHKd, encoding), v_BHKd.shape[-1]
    v_BHKE = F.pad(v_BHKd, (0, k_BHKE.shape[-1] - d_head))
    mask = _causal_lower_right(q_BHTE.shape[2], k_BHKE.shape[2]) if causal else bias
    return F.scaled_dot_product_attention(q_BHTE, k_BHKE, v_BHKE, attn_mask=mask, scale=scale)[..., :d_head]


def long_keys(k_BHKd: Tensor, encoding: Tensor | None) -> Tensor:
    """Keys and encoding [1, K, P] side by side: [B, H, K, E]."""
    if encoding is None:
        return k_BHKd
    encoding_BHKP = encoding.to(k_BHKd.dtype)[:, None].expand(*k_BHKd.shape[:3], -1)
    return torch.cat([k_BHKd, encoding_BHKP], dim=-1)


def _causal_lower_right(num_queries: int, num_slots: int) -> Tensor:
    """As torch's `causal_lower_right`, which fails under any dispatch mode, such as a FLOP counter (torch 2.14)."""
    from torch.nn.attention.bias import CausalBias, CausalVariant  # it loads torch.compile, which takes a second

    bias = Tensor._make_subclass(CausalBias, torch.empty(0))
    CausalBias.__init__(bias, CausalVariant.LOWER_RIGHT, num_queries, num_slots)
    return bias


def _takes_kernels(q_BHTE: Tensor, k_BHKd: Tensor) -> bool:
    """Whether compiled kernels can compute this attention, and are the faster way."""
    num_slots, d_head = k_BHKd.shape[2:]
    return (
        q_BHTE.device.type == "cpu"
        and q_BHTE.dtype in (torch.float32, torch.bfloat16)
        and num_slots * q_BHTE.shape[:3].numel() >= _MIN_SCORES
        and not any(size % VECTOR for size in (num_slots, d_head))
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()  # a FLOP counter would not see kernels
    )
