"""Writes docs/settings.md: every setting, with its default, what it may be, and the comment beside it in the source.

python -m tests.docs_settings > docs/settings.md
"""

import inspect
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from baselines.lstm import LSTMConfig
from baselines.transformer_xl import TransformerXLConfig
from baselines.wavenet import WaveNetConfig
from recipes.corpora.recall import RecallConfig
from recipes.corpora.recipe import CorpusConfig
from recipes.reinforcement.learner import LearnerConfig
from recipes.reinforcement.object_matching import ObjectMatchingConfig
from waveform.audio.audio_format import AudioFormat
from waveform.audio.corpus.prepare import DataConfig
from waveform.audio.corpus.splits import SplitConfig
from waveform.engine.train_config import BaseTrainConfig, TrainConfig
from waveform.models.model_config import LargeVocabularyConfig, ModelConfig
from waveform.models.registry import DECIDED_BY_DATA
from waveform.models.transformer_config import CompressiveTransformerConfig, TransformerConfig
from waveform.speech.config import SpeechTrainConfig
from waveform.system.rules import rules_of

HEAD = """# Settings

Made by `python -m tests.docs_settings` from the dataclasses that hold the settings: do not edit it. Defaults are those
of the fields; a preset sets many of them, and `train ... --print-config` prints what a run would have. Settings are
given as `key=value` after the paths. There are also `model`, `preset`, `study` and `seed`; agents of the recipe `rl`
have `env`, `env_options`, `env_actions` and `env_processes`.
"""
SECTIONS: tuple[tuple[str, str, tuple[type, ...]], ...] = (
    ("Training", "train", (BaseTrainConfig,)),
    ("Training on a data set", "train", (TrainConfig,)),
    ("Training on audio", "train", (SpeechTrainConfig,)),
    ("Data: audio", "data", (AudioFormat, DataConfig)),
    ("Data: division of audio", "data.split", (SplitConfig,)),
    ("Every model", "model", (ModelConfig, LargeVocabularyConfig)),
    ("Transformers", "model", (TransformerConfig,)),
    ("Compressive Transformer", "model", (CompressiveTransformerConfig,)),
    ("Transformer-XL", "model", (TransformerXLConfig,)),
    ("WaveNet", "model", (WaveNetConfig,)),
    ("LSTM", "model", (LSTMConfig,)),
    ("Preparing text", "corpus", (CorpusConfig,)),
    ("Preparing recall", "corpus", (RecallConfig,)),
    ("Agents: learning", "learner", (LearnerConfig,)),
    ("Agents: object matching", "task", (ObjectMatchingConfig,)),
)


def comments(cls: type) -> dict[str, str]:
    """The comments above and behind each field in the source of a dataclass."""
    found, above = {}, []
    for line in inspect.getsource(cls).splitlines():
        code, _, comment = line.strip().partition("#")
        name = code.partition(":")[0]
        if not code:
            above = [*above, comment.strip()] if comment else []
            continue
        if name in cls.__annotations__:
            found[name] = " ".join([*above, comment.strip()]).strip()
        above = []
    return found


def default_of(field: Field[Any]) -> str:
    """A default as it is written in a setting."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING:
        return ""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def page() -> str:
    """The text of docs/settings.md."""
    lines = [HEAD]
    for title, group, classes in SECTIONS:
        named: set[str] = set()  # in this section; a class before gives the rules
        left_out = ("split", *(DECIDED_BY_DATA if group == "model" else ()))
        lines += [f"## {title}", "", "| setting | default | must be | what it is |", "| --- | --- | --- | --- |"]
        for cls in classes:
            said, types = comments(cls), get_type_hints(cls, include_extras=True)
            for field in fields(cls):
                if field.name not in cls.__annotations__ or field.name in (*left_out, *named):
                    continue
                named.add(field.name)
                rule = "; ".join(rule.remedy.removeprefix("it must be ") for rule in rules_of(types[field.name]))
                cells = (f"`{group}.{field.name}`", f"`{default_of(field)}`", rule, said.get(field.name, ""))
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
