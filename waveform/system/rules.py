"""Rules for settings and options: what each field of a configuration must be, and what to tell the user if it is not.

A rule stands beside the type of its field: `memory: Annotated[int, whole_number(0)] = 768`. One of a field that may be
null stands within: `piece_samples: Annotated[int, whole_number(100)] | None`.
"""

from collections.abc import Callable
from dataclasses import fields
from numbers import Integral
from typing import Any, NamedTuple, get_args, get_type_hints

from waveform.system.errors import UserError


class Rule(NamedTuple):
    """What a setting must be."""

    holds: Callable[[Any], bool]
    remedy: str  # follows "SECTION.FIELD is VALUE; "


# What every number must be: comparisons with NaN are false, and torch counts in 64 bits.
COUNTABLE = Rule(
    lambda value: not isinstance(value, int | float) or abs(value) < 2**63, "it must be a finite number below 2^63"
)
NOT_NEGATIVE = Rule(lambda value: value >= 0, "it must be 0 or more")
POSITIVE = Rule(lambda value: value > 0, "it must be above 0")
PART = Rule(lambda value: 0 < value <= 1, "it must be above 0 and at most 1")
BELOW_1 = Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


def one_of(*choices: str) -> Rule:
    """A rule for a setting with named choices."""
    return Rule(lambda value: value in choices, f"choose {', '.join(choices[:-1])} or {choices[-1]}")


def whole_number(low: int, high: int | None = None) -> Rule:
    """A rule for a count or a size, which True and 2.0 are not."""

    def holds(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and low <= value and (high is None or value <= high)

    return Rule(holds, f"it must be a whole number {f'of at least {low}' if high is None else f'from {low} to {high}'}")


def rules_of(kind: Any) -> list[Rule]:
    """The rules beside a type; in `Annotated[int, rule] | None` the rule is that of a value which is not null."""
    within = [rule for member in get_args(kind) for rule in getattr(member, "__metadata__", ())]
    return [*getattr(kind, "__metadata__", ()), *map(_or_null, within)]


def _or_null(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.remedy}, or null")


def check_rules(config: Any, *, section: str | None = None) -> None:
    """Raises UserError for the first field of `config`, a dataclass, that breaks its own rule or is not countable.

    section: of the configuration; None: its fields are options of a command.
    """
    types = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        value = getattr(config, field.name)
        for rule in (*rules_of(types[field.name]), COUNTABLE):
            if not rule.holds(value):
                if section is None:
                    option = f"--{field.name.replace('_', '-')}"  # null if it is left out
                    raise UserError(f"{option} is {value!r}; {rule.remedy.removesuffix(', or null')}")
                raise UserError(f"{section}.{field.name} is {value!r}; {rule.remedy}")
