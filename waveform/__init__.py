"""Compressive Transformer for raw audio waveforms, compared with WaveNet and Transformer-XL.

`build` makes any registered model, `load` opens a trained run, `metrics` its log, and `listen` plays sounds in a
notebook; `prepare`, `train`, `tune`, `evaluate`, `sample`, `export`, `compare`, `race`, `bench`, `analyse`, `report`
and `serve` are the functions behind the verbs of the `waveform` command. All are imported on first use, so that
`import waveform` is instant and loads neither torch nor an audio library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waveform.models.registry import build as build
    from waveform.speech.notebook import listen as listen
    from waveform.speech.notebook import metrics as metrics
    from waveform.speech.run import load as load
    from waveform.system.errors import UserError as UserError
    from waveform.verbs.analyse import analyse as analyse
    from waveform.verbs.bench import bench as bench
    from waveform.verbs.compare import compare as compare
    from waveform.verbs.evaluate import evaluate as evaluate
    from waveform.verbs.export import export as export
    from waveform.verbs.prepare import prepare as prepare
    from waveform.verbs.race import race as race
    from waveform.verbs.report import report as report
    from waveform.verbs.sample import sample as sample
    from waveform.verbs.serve import serve as serve
    from waveform.verbs.train import train as train
    from waveform.verbs.tune import tune as tune

_VERBS = ("analyse", "bench", "compare", "evaluate", "export", "prepare", "race", "report", "sample", "serve",
          "train", "tune")  # fmt: skip
_HOMES = {
    **{verb: f"waveform.verbs.{verb}" for verb in _VERBS},
    "UserError": "waveform.system.errors",
    "build": "waveform.models.registry",
    "listen": "waveform.speech.notebook",
    "load": "waveform.speech.run",
    "metrics": "waveform.speech.notebook",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'waveform' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
