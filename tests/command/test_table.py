"""A table of verbs becomes a command line; the tables of both commands fit the functions that they name."""

import re
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from pytest import MonkeyPatch

import recipes.cli
import waveform.cli
from recipes.reinforcement.domain import Agents
from recipes.text import Text
from tests.calling import Capsys
from waveform.command.arguments import overrides, setting
from waveform.command.table import OF_DOMAIN, Argument, Verb, number, run_command, switch
from waveform.domain import Domain
from waveform.speech.domain import Speech

CALLS: list[tuple[str, dict[str, Any]]] = []


@dataclass
class Size:
    width: int = 3
    height: int = 4
    length: float = 1.0


@dataclass
class Drawn:
    stopped_by: int


def draw(path: str, *, names: list[str] | None = None, size: Size, overrides: tuple[str, ...] = ()) -> Drawn:
    CALLS.append(("draw", {"path": path, "names": names, "size": size, "overrides": list(overrides)}))
    return Drawn(len(path))


def explain(overrides: tuple[str, ...] = ()) -> None:
    CALLS.append(("explain", {"overrides": list(overrides)}))


def sample_shapes(run_dir: Path) -> None:
    CALLS.append(("sample_shapes", {"run_dir": run_dir}))


HERE = "tests.command.test_table"
DRAW = Verb(
    "draw",
    "draw something",
    f"{HERE}:draw",
    (
        Argument("path"),
        Argument("--name", dest="names", nargs="+"),
        number("--width"),
        Argument("--length", type=float),
        setting("--ink", "pen.ink", "its colour", metavar="NAME"),
        switch("--explain", instead=f"{HERE}:explain"),
        overrides("a=1"),
    ),
    computes=False,
)


def run(*arguments: str) -> tuple[int, tuple[str, dict[str, Any]]]:
    """The exit code of `test draw ARGUMENTS`, and the function that it called, with what."""
    return run_command("test", "test", "A test.", [DRAW], ["draw", *arguments]), CALLS.pop()


def test_arguments_reach_fields_and_settings_and_defaults_are_the_functions_own() -> None:
    assert run("ab") == (128 + 2, ("draw", {"path": "ab", "names": None, "size": Size(3, 4), "overrides": []}))
    code, (_, values) = run("a", "x=1", "--width", "7", "--ink", "black", "y=2", "--name", "n", "m", "z=3")
    assert code == 128 + 1 and values["size"] == Size(7, 4) and values["names"] == ["n", "m"]
    assert sorted(values["overrides"]) == ["pen.ink=black", "x=1", "y=2", "z=3"]


def test_another_function_gets_the_arguments_that_it_takes() -> None:
    assert run("a", "x=1", "--explain", "--width", "2") == (0, ("explain", {"overrides": ["x=1"]}))


def test_a_domain_of_another_package_names_its_verbs(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    known = {"kind": "shapes", "runs": "shapes", "verbs": {"sample": f"{HERE}:sample_shapes"}}
    shapes = type("Shapes", (Domain,), known)
    shapes.__abstractmethods__ = frozenset()
    registered = SimpleNamespace(load=lambda: shapes)
    monkeypatch.setattr("waveform.domain.entry_points", lambda group, name: [registered] if name == "shapes" else [])
    monkeypatch.setattr("waveform.domain.read_config", lambda run_dir: {"dataset": {"modality": {"kind": "shapes"}}})
    assert waveform.cli.main(["sample", str(tmp_path)]) == 0
    assert CALLS.pop() == ("sample_shapes", {"run_dir": tmp_path})


@pytest.mark.parametrize("wrong", [["--length", "nan"], ["--length", "1e30"], ["--width", str(2**63)]])
def test_a_number_that_no_machine_can_count_is_one_line(wrong: list[str], capsys: Capsys) -> None:
    with pytest.raises(IndexError, match="pop"):  # the verb is not called
        run("a", *wrong)
    assert re.fullmatch(r"test draw: --\w+ is \S+; it must be a finite number below 2\^63\n", capsys.readouterr().err)
    assert run("a", "--length", "inf")[1][1]["size"].length == float("inf")  # without an end, which a verb may allow


def loaded(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def functions(verb: Verb) -> list[str]:
    if verb.function != OF_DOMAIN:
        return [verb.function]
    return sorted({domain.verbs[verb.name] for domain in (Speech, Text, Agents) if verb.name in domain.verbs})


@pytest.mark.parametrize("verb", [*waveform.cli.VERBS, *recipes.cli.VERBS], ids=lambda verb: verb.name)
def test_functions_take_the_arguments_of_their_verbs(verb: Verb) -> None:
    """Each argument is known to one of the verb's functions at least; and every function can be called."""
    unknown = {arg.name for arg in verb.arguments if arg.instead is None}
    for name in functions(verb):
        function = loaded(name)
        assert len(signature(function).parameters) <= 8
        unknown -= parameters_of(function)
    if verb.function == OF_DOMAIN:
        kinds = [kind for domain in (Speech, Text) for kind in domain.asked.values()]
        unknown -= {field.name for kind in kinds for field in fields(kind)}
    assert not unknown
    for arg in verb.arguments:
        if arg.instead is not None:
            others = {other.name for other in verb.arguments}
            required = signature(loaded(arg.instead)).parameters.values()
            assert {each.name for each in required if each.default is each.empty} <= others


def parameters_of(function: Any) -> set[str]:
    """Names under which a command line can give it something."""
    known = set(signature(function).parameters)
    for hint in get_type_hints(function).values():
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and is_dataclass(kind):
                known |= {field.name for field in fields(kind)}
    return known
