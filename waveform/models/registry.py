"""Finds models by the entry-point group `waveform.models`, so that any installed package can add one."""

import dataclasses
import difflib
from typing import Any

from waveform.engine.interface import SequenceModel
from waveform.system.errors import UserError
from waveform.system.plugins import entry_points
from waveform.system.rules import check_rules

_GROUP = "waveform.models"
DECIDED_BY_DATA = ("vocab_size", "num_labels", "classes")  # fields of a Config that no user sets


def model_names() -> list[str]:
    """Names of every registered model, sorted."""
    return sorted(entry_points(group=_GROUP).names)


def model_class(name: str) -> Any:
    """The class registered as `name`; it has a dataclass `Config` whose first field is `vocab_size`.

    Raises UserError for an unknown name.
    """
    found = entry_points(group=_GROUP, name=name)
    if not found:
        raise UserError(f"unknown model {name!r}; the registered models are {', '.join(model_names())}")
    return next(iter(found)).load()


def build(name: str, *, vocab_size: int, **fields: Any) -> SequenceModel:
    """Build the model registered as `name` with the given config fields (its `Config` documents them).

    Raises UserError for an unknown model, an unknown field, or a value that its Config refuses.
    """
    cls = model_class(name)
    known = [field.name for field in dataclasses.fields(cls.Config)]
    if "num_labels" in fields and "num_labels" not in known:
        raise UserError(f"model {name!r} does not know labels of utterances; train it with data.labels=none")
    for field in fields:
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1)
            own = [field for field in known if field not in DECIDED_BY_DATA]
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(own)}"
            raise UserError(f"model {name!r} has no field {field!r}{hint}")
    config = cls.Config(vocab_size=vocab_size, **fields)
    check_rules(config, section="model")  # one of another package may have no rules of its own
    if fields.get("prediction", "none") != "none" and fields.get("classes") is None:
        raise UserError("model.prediction=linear is for sound, which these tokens are not; set model.prediction=none")
    return cls(config)
