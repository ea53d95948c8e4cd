"""The direction of imports (DESIGN: engine <- models <- audio and cli; baselines and recipes import waveform)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
AUDIO_LIBRARIES = {"soundfile", "torchaudio", "librosa"}
# Modules of the command that know no modality: runs on text are made of them too.
SHARED = (
    "waveform.analyses",
    "waveform.command_line",
    "waveform.composing",
    "waveform.cpu",
    "waveform.run_folder",
    "waveform.run_training",
    "waveform.scoring",
)
# What each part of the tree may import of the project; the first prefix that fits decides.
ALLOWED = {
    "waveform/engine": ("waveform.engine",),
    "waveform/models": ("waveform.engine", "waveform.models"),
    "waveform/audio": ("waveform.engine", "waveform.audio"),
    "waveform": ("waveform",),
    "baselines": ("waveform.engine", "waveform.models", "baselines"),
    "recipes": ("waveform.engine", "waveform.models", *SHARED, "recipes"),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def wrong_arrows(root: Path) -> list[str]:
    wrong = []
    for part, allowed in ALLOWED.items():
        for path in sorted((root / part).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if next(prefix for prefix in ALLOWED if name.startswith(prefix)) != part:
                continue
            for module in imports(path):
                top = module.split(".")[0]
                ours = top in ("waveform", "baselines", "recipes")
                if ours and module != "waveform" and not module.startswith(allowed):
                    wrong.append(f"{name} imports {module}")
                if top in AUDIO_LIBRARIES and part != "waveform/audio":
                    wrong.append(f"{name} imports {module}")
    return wrong


def test_imports_go_one_way() -> None:
    assert wrong_arrows(ROOT) == []


def test_a_wrong_arrow_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "waveform" / "engine"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("import soundfile\nfrom baselines import wavenet\n")
    assert wrong_arrows(tmp_path) == [
        "waveform/engine/a.py imports soundfile",
        "waveform/engine/a.py imports baselines",
    ]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_recipes_load_no_audio_library(tmp_path: Path) -> None:
    """Every verb, from a folder of text to a sample."""
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("in the beginning was the word " * (20 + i))
    code = f"""
import sys
from recipes.__main__ import main
place = {str(tmp_path)!r}
train = ["train", "folder", place + "/data", "--run", place + "/run", "preset=smoke", "train.max_steps=2"]
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
print("loaded:", sorted(set(sys.modules) & {AUDIO_LIBRARIES!r}), "waveform.run" in sys.modules)"""
    assert run_python(code).splitlines()[-1] == "loaded: [] False"


def test_importing_waveform_and_parsing_are_light() -> None:
    code = """
import sys, waveform, waveform.cli
try: waveform.cli.main(["train", "--help"])
except SystemExit: pass
print(sorted(set(sys.modules) & {"torch", "hydra", "numpy", "librosa"}))"""
    assert run_python(code).splitlines()[-1] == "[]"
    code = code.replace("waveform.cli.main", "recipes.__main__.main").replace("waveform.cli", "recipes.__main__")
    assert run_python(code).splitlines()[-1] == "[]"
