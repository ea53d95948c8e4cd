"""Imports between packages go one way, as `ALLOWED` says: baselines and recipes import waveform, never the reverse."""

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AUDIO_LIBRARIES = {"soundfile", "torchaudio", "librosa", "sounddevice"}
TOPS = ("waveform", "baselines", "recipes")
HEAVY = {"torch", "hydra", "omegaconf", "numpy", "scipy", "numba", "librosa", "torchaudio"}
_TRAINING = ("system", "ranks", "engine", "models", "kernels")
_RUNS = (*_TRAINING, "decoding", "runs")
_SPEECH = (*_RUNS, "analyses", "audio", "quality", "report_page", "domain")
# What each package may import of `waveform`, besides itself. Modules at the top of `waveform` count as packages.
ALLOWED: dict[str, tuple[str, ...]] = {
    "waveform.system": (),
    "waveform.ranks": ("system",),
    "waveform.engine": ("system", "ranks"),
    "waveform.models": ("system", "engine", "kernels"),
    "waveform.kernels": ("system", "engine", "models"),
    "waveform.decoding": _TRAINING,
    "waveform.runs": (*_TRAINING, "decoding"),
    "waveform.analyses": _RUNS,
    "waveform.report_page": (*_RUNS, "analyses"),
    "waveform.benchmarks": (*_RUNS, "audio"),
    "waveform.audio": ("system", "engine"),
    "waveform.conf": (),
    "waveform.bundled": (),
    "waveform.quality": (*_RUNS, "audio"),
    "waveform.domain": (*_RUNS, "quality", "report_page"),
    "waveform.speech": _SPEECH,
    "waveform.tuning": (*_RUNS, "quality", "domain"),
    "waveform.verbs": (*_SPEECH, "speech", "benchmarks", "tuning"),
    "waveform.command": ("system",),
    "waveform.cli": ("command",),
    "waveform.__main__": ("cli",),
    "waveform.__init__": ("system", "models", "speech", "verbs"),
    "baselines": (*_TRAINING, "decoding"),
    "recipes": (*_RUNS, "analyses", "report_page", "domain", "verbs", "command", "cli"),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            # `from waveform import runs` names a package, `from waveform.runs import folder` a module of it
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module: str) -> str:
    """`waveform.runs` for `waveform.runs.opened.open_run`; `baselines` and `recipes` for all that is in them."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "waveform" else 1])


def sources(root: Path) -> dict[str, list[str]]:
    """What every module imports: modules, or names in them."""
    paths = sorted(path for top in TOPS for path in (root / top).rglob("*.py"))
    return {".".join(path.relative_to(root).with_suffix("").parts): [*imports(path)] for path in paths}


def wrong_arrows(root: Path) -> list[str]:
    wrong = []
    for name, imported in sources(root).items():
        package = package_of(name)
        allowed = {package, *(f"waveform.{other}" for other in ALLOWED[package])}
        if package == "waveform.audio":
            allowed |= AUDIO_LIBRARIES
        judged = [module for module in imported if module.split(".")[0] in AUDIO_LIBRARIES.union(TOPS)]
        wrong += [f"{name} imports {module}" for module in judged if package_of(module) not in allowed]
    return wrong


def circle(root: Path) -> list[str]:
    """Return modules that import each other in a circle, wherever in a file they do so; an empty list if none do."""
    modules = {name.removesuffix(".__init__"): imported for name, imported in sources(root).items()}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, imported in modules.items():
        for target in imported:
            graph[name] |= {target, target.rpartition(".")[0]} & modules.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_one_way() -> None:
    assert wrong_arrows(ROOT) == []
    assert circle(ROOT) == []


def test_wrong_arrows_and_circles_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "waveform" / "engine"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("import soundfile\nfrom baselines import wavenet\n")
    expected = [f"waveform.engine.a imports {module}" for module in ("soundfile", "baselines.wavenet")]
    assert wrong_arrows(tmp_path) == expected
    (folder / "a.py").write_text("from waveform.engine import b\n")
    (folder / "b.py").write_text("def f():\n    from waveform.engine.a import g\n")
    assert set(circle(tmp_path)) == {"waveform.engine.a", "waveform.engine.b"}


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_recipes_load_no_audio_library(tmp_path: Path) -> None:
    """Every verb, from a folder of text to a sample."""
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("in the beginning was the word " * (20 + i))
    code = f"""
import sys
from recipes.cli import main
place = {str(tmp_path)!r}
train = ["train", place + "/data", place + "/run", "preset=smoke", "train.max_steps=2"]
for command in (
    ["prepare", "folder", place, place + "/data"],
    train + ["--print-config"],
    train,
    ["evaluate", place + "/run"],
    ["sweep", place + "/run", "--compressed", "4", "--json", place + "/sweep.json"],
    ["analyse", place + "/run", "--split", "train", "--tokens", "3000", "--plot", place + "/analysis.png"],
    ["sample", place + "/run", "--tokens", "2"],
):
    assert main(command) == 0
print("loaded:", sorted(set(sys.modules) & {AUDIO_LIBRARIES!r}), "waveform.speech" in sys.modules)"""
    assert run_python(code).splitlines()[-1] == "loaded: [] False"


@pytest.mark.parametrize("program", ["waveform", "recipes"])
def test_help_is_immediate(program: str) -> None:
    """Of the processor's time, for other programs may run; Python itself takes a part of it."""
    code = f"""
import sys, {program}.cli
try: {program}.cli.main(["train", "--help"])
except SystemExit: pass
print(sorted(set(sys.modules) & {HEAVY!r}))"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run_python(code).splitlines()[-1] == "[]"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.slow
def test_nothing_slow_is_loaded_before_it_is_needed() -> None:
    """torch.compile, with sympy and more, would be a third of the time in which `sample` starts."""
    code = """
import sys
import waveform, waveform.audio.corpus.prepare, waveform.audio.plots, waveform.engine.trainer
from waveform.models.registry import model_class, model_names
for name in model_names():
    model_class(name)
waveform.load("speech-en")
print(sorted(set(sys.modules) & {"matplotlib", "librosa", "numba", "torch._dynamo"}))"""
    assert run_python(code) == "[]"
