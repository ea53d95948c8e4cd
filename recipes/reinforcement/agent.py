"""The agent: an encoder in place of the embedding of tokens, any sequence model as the trunk, a policy and a value.

    observation, last action, last reward -> encoder -> trunk -> policy (the trunk's head over actions)
                                                              -> value

IMPALA's agent (Espeholt et al. 2018) with its LSTM replaced (Rae et al. 2019, section 5.7). The state goes in and comes
out, as everywhere.

Shape letters: B rows, T steps, D model width, F features of an observation, V values of a cell, A actions.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.reinforcement.environment import Observation
from waveform.engine.interface import SequenceModel, State
from waveform.models.registry import build, model_class
from waveform.system.errors import UserError

MODELS = ("compressive_transformer", "transformer_xl", "lstm")
_IMPALA_STAGES = (16, 32, 32)  # channels; Espeholt et al. 2018, Figure 3, the large network
_IMPALA_FEATURES = 256
_LEAST_VARIANCE = 0.25  # added to that of each 0 or 1, so that rare ones are not amplified without limit


class Inputs(NamedTuple):
    """What the agent reads at each step."""

    observation: Tensor  # [B, T, ...]
    action: Tensor  # [B, T], the one before; the number of actions itself: none yet
    reward: Tensor  # [B, T], after that action, clipped


class AgentStep(NamedTuple):
    """What one call of an agent returns."""

    logits: Tensor  # [B, T, A]
    values: Tensor  # [B, T]
    state: State
    aux_losses: dict[str, Tensor]  # each [B]


class GridEncoder(nn.Module):
    """Cells [B, T, cells] of small whole numbers: one layer on whether each cell has each value, standardised.

    Each such 0 or 1 has its mean subtracted, and is divided by its standard deviation. Otherwise cells that never
    change, or that change together, drown the one object that an agent has to remember (results/notes.md).
    """

    seen: Tensor  # [cells V], how often each cell had each value in training

    def __init__(self, observation: Observation, num_features: int) -> None:
        super().__init__()
        (num_cells,) = observation.shape
        self.num_values = observation.num_values
        self.vectors = nn.EmbeddingBag(num_cells * self.num_values, num_features, mode="sum")
        nn.init.normal_(self.vectors.weight, std=1 / math.sqrt(num_cells))
        self.register_buffer("offsets", torch.arange(num_cells) * self.num_values, persistent=False)
        self.register_buffer("seen", torch.zeros(num_cells * self.num_values, dtype=torch.int64))

    def _ids(self, cells: Tensor) -> Tensor:
        """Values beyond those announced count as the largest."""
        return cells.long().clamp(max=self.num_values - 1) + self.get_buffer("offsets")

    def counts(self, cells_Nc: Tensor) -> Tensor:
        """What N observations add to `seen`."""
        return self._ids(cells_Nc).flatten().bincount(minlength=len(self.seen))

    def forward(self, cells_BTc: Tensor) -> Tensor:
        """-> [B, T, F]."""
        vectors = self.vectors.weight
        num_observations = self.seen[: self.num_values].sum().clamp(min=1)
        share = self.seen.to(vectors.dtype) / num_observations
        scale = (share * (1 - share) + _LEAST_VARIANCE).rsqrt()
        ids_Nc = self._ids(cells_BTc).flatten(0, 1)
        sum_NF = F.embedding_bag(ids_Nc, vectors, mode="sum", per_sample_weights=scale[ids_Nc])
        return F.relu(sum_NF - (share * scale) @ vectors).unflatten(0, cells_BTc.shape[:2])


def vector_encoder(observation: Observation, num_features: int) -> nn.Module:
    """Real numbers [B, T, size] -> [B, T, F], by one layer."""
    (size,) = observation.shape
    return nn.Sequential(OrderedDict(layer=nn.Linear(size, num_features), relu=nn.ReLU()))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class ImageEncoder(nn.Module):
    """Pixels [B, T, height, width, channels] from 0 to 255: the residual network of IMPALA."""

    def __init__(self, observation: Observation, num_features: int) -> None:
        super().__init__()
        height, width, channels = observation.shape
        stages: list[nn.Module] = []
        for out in _IMPALA_STAGES:
            stages += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            stages += [_Residual(out), _Residual(out)]
            height, width, channels = -(-height // 2), -(-width // 2), out
        self.stages = nn.Sequential(*stages)
        self.layer = nn.Linear(height * width * channels, num_features)

    def forward(self, pixels_BThwc: Tensor) -> Tensor:
        """-> [B, T, F]."""
        x = pixels_BThwc.flatten(0, 1).permute(0, 3, 1, 2).to(self.layer.weight.dtype) / 255
        x = F.relu(self.stages(x)).flatten(1)
        return F.relu(self.layer(x)).unflatten(0, pixels_BThwc.shape[:2])


ENCODERS: dict[str, Callable[[Observation, int], nn.Module]] = {
    "grid": GridEncoder,
    "vector": vector_encoder,
    "image": ImageEncoder,
}


class Encoder(nn.Module):
    """The observation, the last action and the last reward, clipped -> what the trunk reads [B, T, D]."""

    def __init__(self, observation: Observation, *, num_actions: int, d_model: int) -> None:
        super().__init__()
        num_features = _IMPALA_FEATURES if observation.kind == "image" else d_model
        self.observation = ENCODERS[observation.kind](observation, num_features)
        self.action = nn.Embedding(num_actions + 1, d_model)  # the last one: no action yet
        self.reward = nn.Linear(1, d_model, bias=False)
        self.mix = nn.Linear(num_features, d_model)
        nn.init.normal_(self.action.weight, std=0.1)

    def forward(self, observation: Tensor, action_BT: Tensor, reward_BT: Tensor) -> Tensor:
        """observation [B, T, ...]; action and reward [B, T] of the step before -> [B, T, D]."""
        features_BTF = self.observation(observation)
        x_BTD: Tensor = self.mix(features_BTF) + self.action(action_BT)
        return x_BTD + self.reward(reward_BT[..., None].to(x_BTD.dtype))


class Agent(nn.Module):
    """See the module's docstring."""

    def __init__(self, model: dict[str, Any], observation: Observation, *, num_actions: int) -> None:
        """model: the section of the configuration, with its `name`. Raises UserError for a model that cannot serve."""
        super().__init__()
        self.num_actions = num_actions
        self.trunk = _trunk(model, num_actions)
        self.window: int | None = model.get("window")  # steps; None for a recurrent trunk
        d_model = int(model["d_model"])
        self.encoder = Encoder(observation, num_actions=num_actions, d_model=d_model)
        self.value = nn.Linear(d_model, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def init_state(self, num_rows: int, *, device: torch.device | str) -> State:
        """The state of rows whose episodes begin."""
        return self.trunk.init_state(num_rows, device=device, dtype=self.value.weight.dtype)

    def forward(self, inputs: Inputs, state: State) -> AgentStep:
        """Any T >= 1; the state comes back detached, as from the trunk."""
        step = self.trunk.forward(self.encoder(*inputs), state)
        logits = self.trunk.head.logits(step.hidden)
        return AgentStep(logits, self.value(step.hidden)[..., 0], step.state, step.aux_losses)


def _trunk(model: dict[str, Any], num_actions: int) -> SequenceModel:
    """The model with a head over actions, which reads vectors. Raises UserError if it cannot."""
    name = model["name"]
    if name not in MODELS:
        raise UserError(f"model={name} cannot be an agent's trunk; choose {', '.join(MODELS[:-1])} or {MODELS[-1]}")
    known = {field.name: field.default for field in fields(model_class(name).Config)}
    for field in ("head", "tie_embeddings"):
        if model.get(field, known[field]) != known[field]:
            raise UserError(f"model.{field} is {model[field]!r}; an agent needs {known[field]!r}")
    trunk = build(name, vocab_size=num_actions, **{key: value for key, value in model.items() if key != "name"})
    assert isinstance(trunk, nn.Module)
    trunk.embedding = nn.Identity()
    return cast(SequenceModel, trunk)
