"""The settings that models have in common. A config checks its values when it is made."""

from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Annotated

from waveform.engine.sound_classes import SoundClasses
from waveform.system.errors import UserError
from waveform.system.rules import PART, check_rules, one_of, whole_number

# Far above any model that was ever trained, and low enough for the RAM that a config asks for to be computed quickly.
MAX_LAYERS, MAX_WIDTH, MAX_SLOTS = 1000, 2**16, 2**24
MAX_CUTOFFS = 100
Width = Annotated[int, whole_number(1, MAX_WIDTH)]


@dataclass
class ModelConfig:
    """Fields of every model."""

    vocab_size: Annotated[int, whole_number(1)]  # V; the input has one more id, begin-of-utterance
    _: KW_ONLY
    # none: as published; linear: input and head are given what linear filters expect (models/linear_prediction.py)
    prediction: Annotated[str, one_of("none", "linear")] = "none"
    # With prediction=linear: coefficient i of a filter is multiplied by this to the power of i. A lower value widens
    # resonances, which a model sharpens when it goes on from its own samples; filters alone then predict a little worse
    prediction_widening: Annotated[float, PART] = 0.994
    # Number of labels of utterances, unknown included; 0: none. Decided by the data, as vocab_size is
    num_labels: Annotated[int, whole_number(0)] = 0
    classes: SoundClasses | None = None  # what tokens mean as amplitudes, for prediction=linear. Decided by the data

    def __post_init__(self) -> None:
        check_rules(self, section="model")

    @property
    def predicted_classes(self) -> SoundClasses | None:
        """What linear prediction predicts: classes of sound; None without it."""
        if self.prediction == "none":
            return None
        assert self.classes is not None
        return self.classes


@dataclass
class LargeVocabularyConfig(ModelConfig):
    """Fields of models whose embedding and head can serve hundreds of thousands of words."""

    _: KW_ONLY
    # softmax | adaptive: for large vocabularies sorted by frequency; inputs are adaptive too
    head: Annotated[str, one_of("softmax", "adaptive")] = "softmax"
    cutoffs: list[int] = field(default_factory=list)  # first ids of the adaptive head's clusters after the first
    div_value: Width = 4  # how many times narrower a cluster's vectors are than those of the cluster before
    tie_embeddings: bool = False  # the head uses the vectors (and projections) of the input embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds, cutoffs = [0, *self.cutoffs, self.vocab_size], f"model.cutoffs is {list(self.cutoffs)}"
        if len(self.cutoffs) > MAX_CUTOFFS:
            raise UserError(f"model.cutoffs has {len(self.cutoffs)} ids; give at most {MAX_CUTOFFS}")
        if any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"{cutoffs}; they must rise, from above 0 to below the vocabulary of {self.vocab_size}")
        if bool(self.cutoffs) != (self.head == "adaptive"):
            raise UserError(
                f"{cutoffs} with model.head={self.head}; head=adaptive needs some, for example "
                "[20000,40000,200000], and softmax takes none"
            )
        if self.prediction != "none" and (self.head != "softmax" or self.tie_embeddings):
            raise UserError("model.prediction=linear is for model.head=softmax without model.tie_embeddings")
