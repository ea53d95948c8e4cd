"""WaveNet (van den Oord et al. 2016, arXiv 1609.03499), the baseline: tokens and state in, sums of skips out.

    tokens -> embedding -> x -+-> causal dilated convolution -> tanh * sigmoid -+-> 1x1 residual -> + x -> next layer
                                                                                +-> 1x1 skip, summed over the layers
    sum of skips -> ReLU -> 1x1 -> ReLU -> 1x1 -> softmax        (the head)

The paper leaves channels, biases and initial values open; each choice is explained where it is made.

Shape letters: B rows, T steps, L layers, K taps of a kernel, D dilation, H = (K - 1) * D steps of a layer's history,
C residual channels, G gate channels, S skip channels, E end channels, V classes. The trunk runs time first ([T, B, C],
not [B, T, C]): a tap's input is then one block of memory, and every convolution one matrix product over the taps side
by side. Training on two CPU cores at 32 to 416 channels takes 0.75 to 1.03 of the time that `conv1d` takes.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from waveform.engine.interface import Step
from waveform.models.heads import PredictionHead, SoftmaxHead
from waveform.models.model_config import MAX_LAYERS, MAX_WIDTH, ModelConfig, Width
from waveform.models.token_model import Inputs, TokenModel
from waveform.system.errors import UserError
from waveform.system.linear_layers import Linear
from waveform.system.rules import whole_number

_MAX_LAYERS_PER_STACK = 20  # a dilation of 2^19 steps is 22 s at 24 kHz; more is a typing mistake


@dataclass
class WaveNetConfig(ModelConfig):
    """Sizes of a WaveNet; the defaults are the strong baseline (39.6M parameters at 256 classes)."""

    num_stacks: Annotated[int, whole_number(1, MAX_LAYERS)] = 3  # how often the sequence of dilations is repeated
    # Dilations 1, 2, 4, ... 2^(layers_per_stack - 1)
    layers_per_stack: Annotated[int, whole_number(1, _MAX_LAYERS_PER_STACK)] = 10
    kernel_size: Annotated[int, whole_number(2, MAX_WIDTH)] = 3  # taps of a dilated convolution; 2 in the paper
    residual_channels: Width = 416  # C, width of the stream from layer to layer
    gate_channels: Width = 416  # G, width of tanh * sigmoid
    skip_channels: Width = 256  # S, width of the sum of skips
    end_channels: Width | None = None  # E, width of the head; null: as that of the skips

    def __post_init__(self) -> None:
        super().__post_init__()
        num_layers = self.num_stacks * self.layers_per_stack
        if num_layers > MAX_LAYERS:
            raise UserError(
                f"model.num_stacks={self.num_stacks} and model.layers_per_stack={self.layers_per_stack} make "
                f"{num_layers} layers; make at most {MAX_LAYERS}"
            )

    @property
    def head_width(self) -> int:
        """E: channels between the two 1x1 convolutions of the head."""
        return self.skip_channels if self.end_channels is None else self.end_channels

    @property
    def dilations(self) -> list[int]:
        """Of every layer, first to last, in steps."""
        return [2**layer for layer in range(self.layers_per_stack)] * self.num_stacks

    @property
    def histories(self) -> list[int]:
        """H of every layer, first to last, in steps."""
        return [(self.kernel_size - 1) * dilation for dilation in self.dilations]


# The last inputs of every layer's convolution, zeros (the paper's padding) before the stream's first: L of [B, H, C],
# oldest first; H differs from layer to layer
WaveNetState = tuple[Tensor, ...]


def _linear(num_in: int, num_out: int, *, gain: float, bias: bool = True) -> nn.Linear:
    """A linear layer that turns inputs of RMS 1 into outputs of RMS `gain`; biases start at zero."""
    linear = Linear(num_in, num_out, bias=bias)
    nn.init.normal_(linear.weight, std=gain * num_in**-0.5)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class WaveNetHead(nn.Module):
    """ReLU -> 1x1 -> ReLU -> 1x1 -> softmax (section 2.4)."""

    def __init__(self, config: WaveNetConfig) -> None:
        super().__init__()
        self.mix = _linear(config.skip_channels, config.head_width, gain=math.sqrt(2))
        if config.predicted_classes is None:
            self.softmax = SoftmaxHead(config.head_width, vocab_size=config.vocab_size)
        else:  # it is told what linear prediction expects, after the sum of skips
            self.softmax = PredictionHead(config.head_width, classes=config.predicted_classes)

    def _features(self, hidden: Tensor) -> Tensor:
        skips, expected = hidden.tensor_split([self.mix.in_features], dim=-1)
        features = self.mix(skips.relu()).relu()
        return torch.cat([features.to(hidden.dtype), expected], dim=-1) if expected.shape[-1] else features

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, S] -> logits [B, T, V]."""
        return self.softmax.logits(self._features(hidden))

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, T, S], targets [B, T] -> NLL in nats [B, T], computed in at least fp32."""
        return self.softmax.nll(self._features(hidden), targets)


class WaveNet(TokenModel):
    """The trunk and the head; see the module's docstring and `WaveNetConfig`.

    The registered class is this one with its decoders: wavenet_cached.py.
    """

    Config = WaveNetConfig

    def __init__(self, config: WaveNetConfig) -> None:
        taps, c, g = config.kernel_size, config.residual_channels, config.gate_channels
        num_layers = len(config.dilations)
        # Initial values keep every sum near unit variance, however many layers there are; RMS(tanh * sigmoid) is 1/3.
        # Labels are global conditioning (section 2.5), added to the input of the first layer alone, from where the
        # residual stream carries it to all.
        super().__init__(config, nn.Embedding(config.vocab_size + 1, c), width=c, std=1.0)
        self.config = config
        # Inputs: the taps side by side, oldest first. Outputs: tanh's half, then sigmoid's.
        self.convolutions = nn.ModuleList(_linear(taps * c, 2 * g, gain=1) for _ in range(num_layers))
        # The last layer has none: nothing reads its residual stream, so it would never train. They have no biases,
        # because that of the next convolution has the same effect.
        self.residuals = nn.ModuleList(
            _linear(g, c, gain=3 * num_layers**-0.5, bias=False) for _ in range(num_layers - 1)
        )
        # The sum over layers of 1x1 projections, as one product with the gates of all layers side by side.
        self.skip = _linear(num_layers * g, config.skip_channels, gain=3)
        self.head = WaveNetHead(config)

    @property
    def receptive_field(self) -> int:
        """How many inputs, the newest included, an output depends on."""
        return 1 + sum(self.config.histories)

    def empty_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> WaveNetState:
        """As `TokenModel.empty_state`."""
        c = self.config.residual_channels
        return tuple(torch.zeros(batch_size, steps, c, device=device, dtype=dtype) for steps in self.config.histories)

    def trunk(self, inputs: Inputs, state: WaveNetState) -> Step:
        """Sums of skips [B, T, S] and the state after them, detached unless `carry_gradient`."""
        num_steps = inputs.tokens.shape[1]
        x_TBC = self.embedding(inputs.tokens.t())
        if inputs.added is not None:
            x_TBC = x_TBC + inputs.added.transpose(0, 1)
        gates, fifos = [], []
        for layer, dilation in enumerate(self.config.dilations):
            fifo_BHC = state[layer]
            past_TBC = torch.cat([fifo_BHC.transpose(0, 1), x_TBC])  # [H + T, B, C]
            # A copy: a view would keep all of `past_TBC` alive, and bloat a checkpoint.
            last_BHC = past_TBC[num_steps:].transpose(0, 1).to(fifo_BHC.dtype).contiguous()
            fifos.append(last_BHC if self.carry_gradient else last_BHC.detach())
            starts = range(0, past_TBC.shape[0] - num_steps + 1, dilation)
            z_TBG = self.convolutions[layer](torch.cat([past_TBC[s : s + num_steps] for s in starts], dim=-1))
            tanh_half, sigmoid_half = z_TBG.chunk(2, dim=-1)
            gates.append(tanh_half.tanh() * sigmoid_half.sigmoid())
            if layer < len(self.residuals):
                x_TBC = x_TBC + self.residuals[layer](gates[-1])
        hidden_TBS = self.skip(torch.cat(gates, dim=-1))
        return Step(hidden_TBS.transpose(0, 1), tuple(fifos), {})
