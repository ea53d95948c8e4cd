"""Compressive Transformer for raw audio waveforms, compared with WaveNet and Transformer-XL.

`build` makes any registered model, `load` opens a trained run; `prepare`, `train`, `evaluate`, `sample`, `compare`,
`bench` and `analyse` are the functions behind the verbs of the `waveform` command. All are imported on first use, so
that `import waveform` is instant and loads neither torch nor an audio library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waveform.analysis import analyse as analyse
    from waveform.audio.corpus import prepare as prepare
    from waveform.benchmarking import bench as bench
    from waveform.comparison import compare as compare
    from waveform.engine.errors import UserError as UserError
    from waveform.evaluation import evaluate as evaluate
    from waveform.models.registry import build as build
    from waveform.run import load as load
    from waveform.sampling import sample as sample
    from waveform.training import train as train

_HOMES = {
    "UserError": "waveform.engine.errors",
    "analyse": "waveform.analysis",
    "bench": "waveform.benchmarking",
    "build": "waveform.models.registry",
    "compare": "waveform.comparison",
    "evaluate": "waveform.evaluation",
    "load": "waveform.run",
    "prepare": "waveform.audio.corpus",
    "sample": "waveform.sampling",
    "train": "waveform.training",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'waveform' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
