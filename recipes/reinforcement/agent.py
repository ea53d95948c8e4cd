"""The agent: an encoder in place of the embedding, any model of sequences as the trunk, a policy and a value.

    observation, last action, last reward -> encoder -> trunk -> policy (the trunk's head over actions)
                                                              -> value

IMPALA's agent (Espeholt et al. 2018) with its LSTM replaced (Rae et al. 2019, section 5.7). The state goes in and comes
out, as everywhere. Shape letters: B rows, T steps, D model width, A actions.
"""

from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recipes.reinforcement.encoders import Encoder
from recipes.reinforcement.environment import Observation
from waveform.engine.interface import SequenceModel, State
from waveform.models.registry import build, model_class
from waveform.system.errors import UserError

MODELS = ("compressive_transformer", "transformer_xl", "lstm")


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
