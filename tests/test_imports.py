"""The direction of imports (DESIGN: engine <- models <- audio and cli; baselines and recipes import waveform)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
AUDIO_LIBRARIES = {"soundfile", "torchaudio", "librosa"}
# What each part of the tree may import of the project; the first prefix that fits decides.
ALLOWED = {
    "waveform/engine": ("waveform.engine",),
    "waveform/models": ("waveform.engine", "waveform.models"),
    "waveform/audio": ("waveform.engine", "waveform.audio"),
    "waveform": ("waveform",),
    "baselines": ("waveform.engine", "waveform.models", "baselines"),
    "recipes": ("waveform.engine", "waveform.models", "recipes"),
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


def test_recipes_load_no_audio_library() -> None:
    code = f"import sys, recipes, waveform.engine.trainer; print(sorted(set(sys.modules) & {AUDIO_LIBRARIES!r}))"
    assert run_python(code) == "[]"


def test_importing_waveform_and_parsing_are_light() -> None:
    code = """
import sys, waveform, waveform.cli
try: waveform.cli.main(["train", "--help"])
except SystemExit: pass
print(sorted(set(sys.modules) & {"torch", "hydra", "numpy", "librosa"}))"""
    assert run_python(code).splitlines()[-1] == "[]"
