"""What a fast path knows of a model's settings: an explicit list, so that it leaves alone whatever it does not know.

A fast path computes what `forward` does in another form. A field that is added to a config may change what `forward`
does; until the fast path's list names it, models that have it are computed by `forward`.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor


class KnownSettings(NamedTuple):
    """The fields of a config with which a fast path computes the same as `forward`."""

    any_value: Collection[str]  # whatever their value
    others: Mapping[str, Collection[Any]] = {}  # with their default value, and with these other values

    def unknown(self, config: Any) -> str | None:
        """The first setting of `config` that is not known, as model.field=value; None if all are."""
        for field in fields(config):
            value, others = getattr(config, field.name), self.others.get(field.name)
            if field.name not in self.any_value and (others is None or value not in (field.default, *others)):
                return f"model.{field.name}={value}"
        return None

    def supports(self, config: Any) -> bool:
        """Whether every setting of `config` is known."""
        return self.unknown(config) is None

    def why_not_in_kernels(self, config: Any, weight: Tensor) -> str | None:
        """Why compiled steps that know these settings cannot take a model with such weights; None: they can."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return "int8 sampling is for fp32 models on a CPU"
        unknown = self.unknown(config)
        return None if unknown is None else f"int8 sampling does not support {unknown}"
