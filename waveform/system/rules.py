"""Rules for settings: what each field of a configuration must be, and what to tell the user if it is not."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral
from typing import Any, NamedTuple

from waveform.system.errors import UserError


class Rule(NamedTuple):
    """What a setting must be."""

    holds: Callable[[Any], bool]
    remedy: str  # follows "SECTION.FIELD is VALUE; "


# What every number must be: comparisons with NaN are false, and torch counts in 64 bits.
COUNTABLE = Rule(
    lambda value: not isinstance(value, int | float) or abs(value) < 2**63, "it must be a finite number below 2^63"
)


def one_of(*choices: str) -> Rule:
    """A rule for a setting with named choices."""
    return Rule(lambda value: value in choices, f"choose {', '.join(choices[:-1])} or {choices[-1]}")


def whole_number(low: int, high: int | None = None) -> Rule:
    """A rule for a count or a size, which True and 2.0 are not."""

    def holds(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and low <= value and (high is None or value <= high)

    return Rule(holds, f"it must be a whole number {f'of at least {low}' if high is None else f'from {low} to {high}'}")


def or_null(rule: Rule, meaning: str = "") -> Rule:
    """The rule for a setting that may be left open; meaning: what null is, for example "for no limit"."""
    remedy = f"{rule.remedy}, or null {meaning}".rstrip()
    return Rule(lambda value: value is None or rule.holds(value), remedy)


def check_rules(config: Any, rules: Mapping[str, Rule], *, section: str) -> None:
    """Raises UserError for the first field of `config`, a dataclass, that breaks its own rule or is not countable."""
    for field in fields(config):
        value = getattr(config, field.name)
        for rule in (rules.get(field.name, COUNTABLE), COUNTABLE):
            if not rule.holds(value):
                raise UserError(f"{section}.{field.name} is {value!r}; {rule.remedy}")
