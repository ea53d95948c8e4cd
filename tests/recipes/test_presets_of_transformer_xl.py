"""Transformer-XL's presets have the papers' parameters; tests/runs/test_sources.py has their sizes and optimisers."""

from typing import Any

import pytest
import torch

from recipes.text import compose_config
from tests.recipes.test_settings import VOCABULARY, fits
from waveform.models.registry import build
from waveform.system.errors import UserError

MILLIONS = {  # of parameters
    ("enwik8", "dai_12l"): 41, ("enwik8", "dai_18l"): 88, ("enwik8", "dai_24l"): 277,
    ("text8", "dai_12l"): 41,  # its other presets are those of enwik8
    ("wikitext103", "dai_standard"): 151, ("wikitext103", "dai_large"): 283,
    ("lm1b", "dai_base"): 355, ("lm1b", "dai_large"): 838, ("ptb", "dai"): 24,
}  # fmt: skip


def compose(recipe: str, preset: str, *overrides: str) -> dict[str, Any]:
    return compose_config(recipe, [f"preset={preset}", "model=transformer_xl", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "preset"), MILLIONS)
def test_presets_have_the_papers_number_of_parameters(recipe: str, preset: str) -> None:
    config = compose(recipe, preset)
    fits(config, vocab_size=VOCABULARY[recipe])
    assert config["train"]["decay_steps"] is None  # the cosine ends with training
    fields = {name: value for name, value in config["model"].items() if name != "name"}
    with torch.device("meta"):
        built: Any = build("transformer_xl", vocab_size=VOCABULARY[recipe], **fields)
    assert sum(p.numel() for p in built.parameters()) / 1e6 == pytest.approx(MILLIONS[recipe, preset], abs=1.0)


def test_penn_treebank_has_our_sizes_variational_dropout_and_checkpoints_to_average() -> None:
    model, train = (compose("ptb", "dai")[section] for section in ("model", "train"))
    sizes = [model[n] for n in ("num_layers", "d_model", "num_heads", "d_feedforward", "window", "memory")]
    assert sizes == [16, 380, 10, 700, 70, 70] and model["num_position_features"] == 380
    assert [train[n] for n in ("batch_size", "max_steps", "warmup_steps", "chunk")] == [20, 40_000, 1000, 70]
    assert model["dropout_mask"] == "window" and train["keep_checkpoints"] == 20
    assert compose("ptb", "paper")["model"]["dropout_mask"] == "step"


@pytest.mark.parametrize(
    ("recipe", "preset", "model", "known"),
    [
        ("enwik8", "dai_24l", "compressive_transformer", "enwik8 with model=transformer_xl"),
        ("ptb", "dai_24l", "transformer_xl", "enwik8 with model=transformer_xl"),
        ("enwik8", "paper", "lstm", "compressive_transformer, transformer_xl"),
    ],
    ids=["model", "recipe", "paper"],
)
def test_a_preset_without_sizes_for_these_is_refused(recipe: str, preset: str, model: str, known: str) -> None:
    message = f"preset={preset} has no sizes for {recipe} with model={model}; it has some for {known}"
    with pytest.raises(UserError, match=message):
        compose_config(recipe, [f"preset={preset}", f"model={model}"])
