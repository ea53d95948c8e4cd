"""The configurations of every recipe compose and fit their model; tests/runs/test_sources.py has their figures."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import recipes
from recipes.corpora.catalogue import RECIPES
from recipes.text import compose_config
from waveform.engine.streams import check_sizes
from waveform.engine.train_config import TrainConfig
from waveform.models.registry import build, model_class
from waveform.runs.configured_model import window_of
from waveform.runs.settings import typed
from waveform.system.errors import UserError

MODELS = ("compressive_transformer", "transformer_xl")
VOCABULARY = {"enwik8": 256, "text8": 27, "wikitext103": 267_735, "pg19": 32_000, "lm1b": 793_471, "ptb": 10_000}
STUDIES = sorted(str(name) for name in OmegaConf.load(Path(recipes.__path__[0], "conf", "studies.yaml")))


def fits(config: dict[str, Any], *, vocab_size: int) -> Any:
    """Check a configuration as training does; return the model's."""
    train = typed(TrainConfig, config["train"], section="train")
    check_sizes(train, window=window_of(config), num_ranks=1)
    fields = {name: value for name, value in config["model"].items() if name != "name"}
    return model_class(config["model"]["name"]).Config(vocab_size=vocab_size, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "small", "cpu", "smoke"])
@pytest.mark.parametrize(("recipe", "model"), list(zip(RECIPES, itertools.cycle(MODELS), strict=False)))
def test_every_configuration_composes(recipe: str, preset: str, model: str) -> None:
    """Of each recipe with one of the models, which do not depend on it."""
    config = compose_config(recipe, [f"preset={preset}", f"model={model}"])
    assert (config["recipe"], config["preset"], config["model"]["name"]) == (recipe, preset, model)
    built = fits(config, vocab_size=VOCABULARY.get(recipe, 256))
    resets = recipe in ("recall", "folder") or (recipe == "pg19" and preset != "paper")
    assert config["train"]["state"] == ("utterance" if resets else "carry")
    assert built.head == ("adaptive" if recipe in ("wikitext103", "lm1b") else "softmax")
    assert built.tie_embeddings == (recipe in ("wikitext103", "lm1b", "ptb", "pg19"))


@cache
def papers(*choices: str) -> dict[str, Any]:
    return compose_config("enwik8", ["preset=paper", *choices])


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_every_study_composes_over_the_papers_model(study: str) -> None:
    model = "model=transformer_xl" if study.startswith("txl_") else "model=compressive_transformer"
    plain, config = papers(model), papers(model, f"study={study}")
    fits(config, vocab_size=256)
    different = {(s, name) for s in ("model", "train") for name in plain[s] if plain[s][name] != config[s][name]}
    same_as_paper = {"none", "table5_conv", "rate_3"}
    assert bool(different) == (study not in same_as_paper)


def test_the_literal_study_is_algorithm_1() -> None:
    """With the paper's positions, as many as the model is wide; tests/runs/test_sources.py has its other values."""
    shared = ["preset=paper", "model.d_model=512"]
    plain, literal = (compose_config("enwik8", [*shared, f"study={name}"]) for name in ("none", "literal"))
    different = {name for name, value in literal["model"].items() if value != plain["model"][name]}
    assert different == {"norm", "empty_memory", "num_position_features", "activation", "compression_init"}
    assert literal["model"]["num_position_features"] == 512 and literal["train"] == plain["train"]


def test_figure_3_has_five_curves_that_part_in_mid_training() -> None:
    """All learn at 3e-4 up to 15,000 iterations, whatever the preset's decay, and read 25,000 chunks of a row."""
    late = {"lr_3e-4": (3e-4, 1), "lr_1e-7": (1e-7, 1), "lr_1e-9": (1e-9, 1), "lr_0": (0.0, 1),
            "update_period_2": (3e-4, 2)}  # fmt: skip
    assert {name.removeprefix("figure3_") for name in STUDIES if name.startswith("figure3")} == set(late)
    for name, expected in late.items():
        config = papers("model=compressive_transformer", f"study=figure3_{name}")
        train: TrainConfig = typed(TrainConfig, config["train"], section="train")
        for step in (4_000, 14_999, 15_000, train.max_steps - 1):
            rate, period = (3e-4, 1) if step < 15_000 else expected
            assert train.learning_rate(step, seconds=0.0) == pytest.approx(rate, rel=1e-8, abs=0.0)
            assert train.chunks_of_update(step) == period
        assert train.max_steps == 25_000


@pytest.mark.parametrize("model", MODELS)
def test_only_the_papers_presets_start_as_published(model: str) -> None:
    for preset, share in (("paper", 0), ("small", 0.5), ("smoke", 0.5)):
        assert compose_config("enwik8", [f"preset={preset}", f"model={model}"])["model"]["local_layers"] == share


MILLIONS = {  # of parameters
    ("enwik8", "dai_12l"): 41, ("enwik8", "dai_18l"): 88, ("enwik8", "dai_24l"): 277,
    ("text8", "dai_12l"): 41,  # its other presets are those of enwik8
    ("wikitext103", "dai_standard"): 151, ("wikitext103", "dai_large"): 283,
    ("lm1b", "dai_base"): 355, ("lm1b", "dai_large"): 838, ("ptb", "dai"): 24,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "preset"), MILLIONS)
def test_presets_have_the_papers_number_of_parameters(recipe: str, preset: str) -> None:
    config = compose_config(recipe, [f"preset={preset}", "model=transformer_xl"])
    fits(config, vocab_size=VOCABULARY[recipe])
    assert config["train"]["decay_steps"] is None  # the cosine ends with training
    fields = {name: value for name, value in config["model"].items() if name != "name"}
    with torch.device("meta"):
        built: Any = build("transformer_xl", vocab_size=VOCABULARY[recipe], **fields)
    assert sum(p.numel() for p in built.parameters()) / 1e6 == pytest.approx(MILLIONS[recipe, preset], abs=1.0)


def test_penn_treebank_has_sizes_of_ours() -> None:
    """Those that neither the table of sources nor the number of parameters holds."""
    config = compose_config("ptb", ["preset=dai", "model=transformer_xl"])
    assert [config["model"][name] for name in ("d_model", "num_heads", "memory")] == [380, 10, 70]
    assert config["train"]["max_steps"] == 40_000
    assert compose_config("ptb", ["preset=paper", "model=transformer_xl"])["model"]["dropout_mask"] == "step"


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
