"""Imports torchaudio for the other audio modules, and tells the user what to do if it does not load."""

from importlib.metadata import requires
from types import ModuleType

from waveform.system.errors import UserError


def import_torchaudio() -> ModuleType:
    """Import torchaudio with its `functional` and `transforms`.

    Raises UserError if it is missing or was built for a different torch: its library then fails to load, with an
    OSError or a RuntimeError that names symbols.
    """
    try:
        import torchaudio
        import torchaudio.functional
        import torchaudio.transforms
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        versions = " ".join(f'"{each}"' for each in requires("waveform") or () if each.startswith("torch"))
        raise UserError(
            f"torchaudio cannot be imported ({reason}); install torch and torchaudio together: pip install {versions}"
        ) from error
    return torchaudio
