"""Settings that nobody would mean: random keys, values, types, nesting, deletions, additions, interpolations."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from recipes.cli import main as recipes
from tests.faults.calling import Outcome, call
from tests.faults.fault import fault
from waveform.cli import main as waveform
from waveform.system.console import printable

_KEYS = [
    "train.lr", "train.max_steps", "train.batch_size", "train.state", "train.window", "train.device", "model",
    "model.name", "model.d_model", "model.num_layers", "model.compression", "model.cutoffs", "model.cutoffs.0", "data",
    "data.split", "data.split.by", "data.split.valid", "data.num_workers", "preset", "seed", "train", "preset_model",
    "hydra", "hydra.run.dir", "hydra.searchpath", "hydra/launcher", "defaults", "dataset", "dataset.path", "recipe",
    "study", "train.max_step", "nothing", "model.nothing", "train.lr.x", "model/nothing", "model@train", "_self_",
    "_target_", "model._target_", "a.b.c.d", "..", "train..lr", "train.", ".train", "ключ", "train.lr ", "", " ", "/",
    "@", ":", "train.lr@x", "model@:x", "0", "-1", "null", "train[lr]", "[0]", "$", "${seed}", "*", "train.*", "\n",
    "train.\nlr", "\ud800", "model.\udcff", "é.ü", "x" * 3000, "a." * 300 + "a",
]  # fmt: skip
_VALUES = [
    "", "1", "-1", "0", "1e400", "-inf", "nan", "inf", "9" * 400, "9" * 5000, "0x7f", "1_000", "1e-400", "true",
    "null", "~", "none", "[]", "[1,2", "[1,[2,[3]]]", "{}", "{a:1}", "{a:{b:[c]}}", "{a", "}", "]", "'", '"', "'a",
    "\\", "\\n", "\n", "\t", "a b", "a=b", "a,b", "1,2,3", "range(1,4)", "choice(a,b)", "glob(*)", "sort(3,1)",
    "interval(0,1)", "tag(a,b)", "shuffle(1,2)", "extend_list(1)", "str(1)", "int(x)", "float(1e400)",
    "${seed}", "${nothing}", "${train.lr}", "${oc.env:HOME}", "${oc.env:NOT_SET}", "${oc.env:NOT_SET,1}",
    "${oc.decode:1}", "${oc.create:{a:1}}", "${oc.select:seed}", "${oc.deprecated:seed}", "${oc.dict.keys:train}",
    "${hydra:runtime.cwd}", "${now:%Y}", "${python_version:}", "${${seed}}", "${", "${}", "${a:}", "$", "${.lr}",
    "${..seed}", "${train}", "???", "привет", "日本", "\ud800", "\udcff", "\x00", "\x1b[31m", "x" * 5000, "[" * 300,
    "[" * 60 + "]" * 60, "{a:" * 60 + "1" + "}" * 60, "${oc.env:" * 40, "/etc/passwd", "../../x", "file:///etc",
    "compressive_transformer", "transformer_xl", "os.system", "builtins.eval", "small", "demo", "../small", "cpu",
    "cuda", "wavenet", "1.5", "256", "fused",
]  # fmt: skip
_RIGHT = [
    "train.lr=1e-2", "train.max_steps=null", "train.max_seconds=5", "model=wavenet", "model.num_layers=3", "seed=7",
    "preset=demo", "preset=small", "train.state=carry", "train.window=512", "data.num_workers=2",
    "+model.compression=max", "data.split.by=folder", "train.lr=${train.clip_norm}", "train.batch_size=${oc.decode:4}",
    "~train.lr", "+note=any",
]  # fmt: skip
_PREFIXES = ["", "", "", "", "", "+", "++", "~", "~~", "+~", "-", "--"]
_SEPARATORS = ["=", "=", "=", "=", "=", "=", "=", "==", ":=", " = ", "", "@=", "+="]


def _override(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(_RIGHT)
    if kind < 0.5:  # an existing setting
        return f"{rng.choice(_KEYS[:22])}={rng.choice(_VALUES)}"
    key, value = rng.choice(_KEYS), rng.choice(_VALUES)
    if rng.random() < 0.15:
        key = ".".join(rng.choice(_KEYS) for _ in range(2))
    if rng.random() < 0.15:
        value = rng.choice(["[{}]", "{{a:{}}}", "'{}'", '"{}"', "{},{}", "${{{}}}", "{}{}"]).replace("{}", value)
    if rng.random() < 0.1:
        value = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(1, 0x3000)])) for _ in range(8))
    return rng.choice(_PREFIXES) + key + rng.choice(_SEPARATORS) + value


def _names(err: str, override: str) -> bool:
    """Whether the line names the setting as it was given, or its key (escaped if a terminal would not show it)."""
    key = override.lstrip("+~-").partition("=")[0].strip(" :@+")
    first, _, _ = key.partition(".")
    # Such as: unknown model 'inf', of model.name=1e400.
    names = (f"unknown {first} ", f"{first}: ", repr(key.rpartition(".")[2]), key, printable(key), override)
    return not key.strip() or any(name[:100] in err for name in names)


def _judge(outcome: Outcome, overrides: list[str], case: int) -> str:
    context = f"case {case}: {overrides!r}\n{outcome.err[-3000:]}\n{outcome.out[-200:]}"
    if "--help` says what it takes" in outcome.err:  # argparse mistook it for an option
        assert outcome.code == 2 and any(override.startswith("-") for override in overrides), context
        return "no such option"
    if not outcome.refused(context) or "it holds nothing; audio is" in outcome.err:
        return "composed"
    assert len(outcome.err) < 2000, f"a line of {len(outcome.err)} characters: {context}"
    assert outcome.err.isascii() or outcome.err.isprintable() or "\x1b" not in outcome.err, context
    assert any(_names(outcome.err, override) for override in overrides), f"the setting is not named: {context}"
    return "refused"


@fault("strange settings", short=40, long=2000)
def fuzz(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: composed, or one line names the setting, exit code 2; nothing is written.

    Print the configuration, or train on an empty folder, with one to three random settings each.
    """
    os.environ.pop("NOT_SET", None)
    empty = folder / "audio"
    empty.mkdir()
    outcomes: Counter[str] = Counter()
    for case in range(cases):
        overrides = [_override(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        where = rng.random()
        command = ["train", empty, folder / "run", *([] if where < 0.4 else ["--print-config"]), *overrides]
        outcome = call(waveform if where < 0.7 else recipes, command)
        outcomes[_judge(outcome, overrides, case)] += 1
        assert list(folder.rglob("*")) == [empty], f"case {case} wrote {list(folder.rglob('*'))}"
    return {"outcomes": dict(sorted(outcomes.items()))}
