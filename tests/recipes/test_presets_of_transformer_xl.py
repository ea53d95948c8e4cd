"""Transformer-XL's presets: the sizes, parameters and optimisers, and where `--print-config` says they are from."""

from typing import Any

import pytest
import torch

from recipes.provenance import annotated, sources
from recipes.text import compose_config
from tests.recipes.test_settings import VOCABULARY, fits
from waveform.models.registry import build
from waveform.runs.settings import to_yaml
from waveform.system.errors import UserError

# Recipe, preset -> layers, width, heads, feed-forward, window, memory, batch, steps, warm-up, parameters (millions).
PRESETS = {
    ("enwik8", "dai_12l"): (12, 512, 8, 2048, 512, 512, 22, 400_000, 0, 41),
    ("enwik8", "dai_18l"): (18, 640, 8, 2200, 784, 784, 64, 400_000, 4000, 88),
    ("enwik8", "dai_24l"): (24, 1024, 8, 3072, 784, 784, 64, 400_000, 4000, 277),
    ("text8", "dai_12l"): (12, 512, 8, 2048, 512, 512, 24, 400_000, 0, 41),
    ("text8", "dai_18l"): (18, 640, 8, 2200, 784, 784, 64, 400_000, 4000, 88),
    ("text8", "dai_24l"): (24, 1024, 8, 3072, 784, 784, 64, 400_000, 4000, 277),
    ("wikitext103", "dai_standard"): (16, 410, 10, 2100, 150, 150, 60, 200_000, 0, 151),
    ("wikitext103", "dai_large"): (18, 1024, 16, 4096, 384, 384, 128, 4_000_000, 16_000, 283),
    ("lm1b", "dai_base"): (18, 1024, 8, 4096, 256, 256, 256, 400_000, 0, 355),
    ("lm1b", "dai_large"): (24, 1280, 16, 8192, 32, 32, 512, 1_200_000, 30_000, 838),
    ("ptb", "dai"): (16, 380, 10, 700, 70, 70, 20, 40_000, 1000, 24),
}


def compose(recipe: str, preset: str, *overrides: str) -> dict[str, Any]:
    return compose_config(recipe, [f"preset={preset}", "model=transformer_xl", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_sizes_and_optimisers_are_dais(recipe: str, preset: str) -> None:
    layers, width, heads, feedforward, window, memory, batch, steps, warmup, millions = PRESETS[recipe, preset]
    config = compose(recipe, preset)
    fits(config, vocab_size=VOCABULARY[recipe])
    model, train = config["model"], config["train"]
    sizes = [model[n] for n in ("num_layers", "d_model", "num_heads", "d_feedforward", "window", "memory")]
    assert sizes == [layers, width, heads, feedforward, window, memory]
    assert [train[n] for n in ("batch_size", "max_steps", "warmup_steps", "chunk")] == [batch, steps, warmup, window]
    rate = 1e-4 if (recipe, preset) == ("lm1b", "dai_large") else 2.5e-4
    assert (train["lr"], train["lr_floor"], train["clip_norm"], train["update_period"]) == (rate, 0, 0.25, 1)
    assert train["decay_steps"] is None  # the cosine ends with training
    assert (model["norm"], model["num_position_features"], model["local_layers"]) == ("post", width, 0)
    fields = {name: value for name, value in model.items() if name != "name"}
    with torch.device("meta"):
        built: Any = build("transformer_xl", vocab_size=VOCABULARY[recipe], **fields)
    assert sum(p.numel() for p in built.parameters()) / 1e6 == pytest.approx(millions, abs=1.0)


def test_penn_treebank_has_variational_dropout_and_checkpoints_to_average() -> None:
    config = compose("ptb", "dai")
    assert config["model"]["dropout_mask"] == "window" and config["train"]["keep_checkpoints"] == 20
    assert compose("ptb", "paper")["model"]["dropout_mask"] == "step"


def test_raes_own_baseline_has_a_memory_of_1024_and_their_schedule() -> None:
    config = compose("wikitext103", "paper")
    model, train = config["model"], config["train"]
    assert (model["num_layers"], model["window"], model["memory"]) == (18, 512, 1024)
    schedule = [train[n] for n in ("lr", "lr_floor", "warmup_steps", "decay_steps", "clip_norm", "batch_size", "chunk")]
    assert schedule == [3e-4, 1e-6, 16_000, 500_000, 0.1, 128, 512]


@pytest.mark.parametrize(
    ("recipe", "model"), [("enwik8", "compressive_transformer"), ("ptb", "transformer_xl")], ids=["model", "recipe"]
)
def test_a_preset_without_sizes_for_these_is_refused(recipe: str, model: str) -> None:
    message = f"preset=dai_24l has no sizes for {recipe} with model={model}; it has some for enwik8 with model=tr"
    with pytest.raises(UserError, match=message):
        compose_config(recipe, ["preset=dai_24l", f"model={model}"])


def test_a_paper_has_no_sizes_for_other_models() -> None:
    message = (
        "preset=paper has no sizes for enwik8 with model=lstm; it has some for compressive_transformer, transformer_xl"
    )
    with pytest.raises(UserError, match=message):
        compose_config("enwik8", ["preset=paper", "model=lstm"])


def test_a_study_of_another_model_is_refused_as_such() -> None:
    with pytest.raises(UserError, match=r"^study=txl_shaw sets 'position', which this model does not have"):
        compose_config("enwik8", ["study=txl_shaw"])
    with pytest.raises(UserError, match=r"^unknown study 'txl_shaws'"):
        compose_config("enwik8", ["study=txl_shaws"])


def test_each_number_says_which_paper_it_is_from() -> None:
    found = sources(compose("enwik8", "dai_24l", "train.batch_size=7"))
    assert found["model.num_layers"] == "Dai et al. 2019, Table 2"
    assert found["model.d_model"] == "Dai et al. 2019, public script enwik8_tpu.sh"  # of the file's first comment
    assert found["model.window"] == "Dai et al. 2019, section 4.1; their script has 768"
    assert found["model.num_position_features"].startswith("Dai et al. 2019")  # refers to another setting
    assert found["train.clip_norm"].startswith("Dai et al. 2019")  # of a file that the preset includes
    assert found["train.chunk"] == "the window"
    assert "train.batch_size" not in found  # set by the user
    assert "model.dropout_mask" not in found and "train.beta2" not in found  # defaults
    eighteen = sources(compose("text8", "dai_18l"))
    assert eighteen["model.d_model"] == "ours"
    assert eighteen["model.dropout"] == "Dai et al. 2019, public script enwik8_tpu.sh"  # two files deeper
    raes = sources(compose("wikitext103", "paper"))
    assert raes["model.memory"].startswith("Rae et al. 2019") and raes["train.lr"].startswith("Rae et al. 2019")
    assert raes["model.dropout"].startswith("Dai et al. 2019")
    study = sources(compose("wikitext103", "dai_standard", "study=txl_half_loss"), study="txl_half_loss")
    assert study["train.loss_share"] == "Dai et al. 2019, Tables 6 and 10"


@pytest.mark.parametrize("model", ["compressive_transformer", "transformer_xl"])
@pytest.mark.parametrize("recipe", ["enwik8", "wikitext103", "pg19"])
def test_every_size_of_raes_presets_has_a_source(recipe: str, model: str) -> None:
    found = sources(compose_config(recipe, ["preset=paper", f"model={model}"]))
    sizes = ("num_layers", "d_model", "num_heads", "d_feedforward", "window", "memory")
    missing = {f"model.{name}" for name in sizes} | {"train.batch_size", "train.warmup_steps", "train.lr"}
    assert not missing - found.keys()


def test_the_printed_configuration_is_still_yaml_of_the_same_settings() -> None:
    from omegaconf import OmegaConf

    config = compose("wikitext103", "dai_large")
    text = annotated(to_yaml(config), config)
    assert OmegaConf.to_container(OmegaConf.create(text)) == config
    assert "  d_model: 1024  # Dai et al. 2019, public script run_wt103_large.sh\n" in text
    assert "  cutoffs:  # Dai et al. 2019, public code\n  - 20000\n" in text
