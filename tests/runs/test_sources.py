"""The table of what the papers state: the presets have its values, and `--print-config` says whose they are."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import recipes
import waveform.speech.config
from recipes import text
from recipes.reinforcement import settings as agents
from waveform.runs.sources import annotated, source_table, sources, stated_values

SPEECH = ("compressive_transformer", "transformer_xl", "wavenet")
RAE = ("compressive_transformer", "transformer_xl")
DAI = {"enwik8": ("12l", "18l", "24l"), "text8": ("12l", "18l", "24l"), "wikitext103": ("standard", "large"),
       "lm1b": ("base", "large")}  # fmt: skip


def runs() -> Iterator[str]:
    """DOMAIN/PRESET/MODEL of each preset of a paper, and DOMAIN/PRESET/MODEL/STUDY of each study."""
    yield from (f"audio/speech_paper/{model}" for model in SPEECH)
    yield from (f"{recipe}/paper/{model}" for recipe in ("enwik8", "wikitext103", "pg19") for model in RAE)
    yield from (f"object_matching/paper/{model}" for model in (*RAE, "lstm"))
    yield from (f"{recipe}/dai_{size}/transformer_xl" for recipe, sizes in DAI.items() for size in sizes)
    yield "ptb/dai/transformer_xl"
    for model in RAE:
        yield from (f"{run}/{model}/{study}" for run in ("audio/demo", "enwik8/paper", "object_matching/cpu")
                    for study in ("literal", "sonnet"))  # fmt: skip
    for study in OmegaConf.load(Path(recipes.__path__[0], "conf", "studies.yaml")):
        of_dai = str(study).startswith("txl_")
        run = "wikitext103/dai_standard/transformer_xl" if of_dai else "enwik8/paper/compressive_transformer"
        yield f"{run}/{study}"


@cache
def compose(run: str) -> dict[str, Any]:
    domain, preset, model, *study = run.split("/")
    overrides = [f"preset={preset}", f"model={model}", *(f"study={name}" for name in study)]
    if domain == "audio":
        return waveform.speech.config.compose_config(overrides)
    family: Any = agents if domain == "object_matching" else text
    composed: dict[str, Any] = family.compose_config(domain, overrides)
    return composed


def found(run: str) -> dict[str, str]:
    return sources(compose(run), domain=run.split("/")[0], study=(*run.split("/"), "none")[3])


@pytest.mark.parametrize("run", list(runs()))
def test_presets_have_the_values_that_the_table_states(run: str) -> None:
    stated = {name: value for name, (value, _) in stated_values(run if run.count("/") == 3 else f"{run}/none").items()}
    sections = [name.split(".") for name in stated]
    assert stated == {f"{section}.{key}": compose(run)[section][key] for section, key in sections}


def test_every_line_of_the_table_is_about_some_run() -> None:
    used = {source for run in runs() for source in found(run).values()}
    assert {source for stated in source_table().values() for source in stated} == used


def test_speech_is_section_5_6() -> None:
    """Rae et al. 2019, section 5.6, by hand: what the table says of it too."""
    ours, txl, wavenet = (compose(f"audio/speech_paper/{model}") for model in SPEECH)
    assert [ours["model"][name] for name in ("num_layers", "window", "memory", "compressed", "compression_rate")] == [
        20, 768, 768, 768, 4]  # fmt: skip
    assert (txl["model"]["num_layers"], txl["model"]["window"], txl["model"]["memory"]) == (20, 768, 1536)
    assert wavenet["model"]["num_stacks"] * wavenet["model"]["layers_per_stack"] == 30
    for config in (ours, txl, wavenet):
        schedule = [config["train"][name] for name in ("max_steps", "batch_size", "chunk", "lr", "clip_norm")]
        assert schedule == [400_000, 32, 3840, 3e-4, 0.1]
        assert config["data"]["sample_rate_hz"] == 24_000


def test_sources_are_of_values_that_papers_state() -> None:
    speech = found("audio/speech_paper/compressive_transformer")
    assert speech["model.memory"] == "Rae et al. 2019, section 5.6"
    assert not {"model.d_model", "train.decay_steps", "train.evaluate_every"} & speech.keys()
    characters = found("enwik8/paper/compressive_transformer")
    assert characters["train.warmup_steps"] == "Rae et al. 2019, section 5"
    assert characters["train.batch_size"] == "Dai et al. 2019, public script; Rae et al. state none"
    assert not {"train.max_steps", "model.num_position_features"} & characters.keys()
    assert found("enwik8/dai_18l/transformer_xl")["model.d_model"].startswith("ours")
    assert found("enwik8/dai_24l/transformer_xl")["model.window"].endswith("their script has 768")
    assert found("object_matching/paper/lstm")["learner.entropy_cost"] == "Rae et al. 2019, section 5.7"
    literal = found("audio/demo/transformer_xl/literal")
    assert set(literal) == {"model.norm", "model.empty_memory", "model.activation", "model.local_layers"}
    assert "Rae et al. state none" in literal["model.activation"]


@pytest.mark.parametrize("model", RAE)
@pytest.mark.parametrize("recipe", ["enwik8", "wikitext103", "pg19"])
def test_every_size_of_raes_presets_has_a_source(recipe: str, model: str) -> None:
    sizes = ("num_layers", "d_model", "num_heads", "d_feedforward", "window", "memory")
    stated = {f"model.{name}" for name in sizes} | {"train.batch_size", "train.warmup_steps", "train.lr"}
    assert not stated - found(f"{recipe}/paper/{model}").keys()


@pytest.mark.parametrize("model", RAE)
@pytest.mark.parametrize("recipe", ["text8", "folder"])
def test_other_characters_are_as_enwik8(recipe: str, model: str) -> None:
    other, enwik8 = (compose(f"{name}/paper/{model}") for name in (recipe, "enwik8"))
    assert other["model"] == enwik8["model"]
    differ = {name for name in other["train"] if other["train"][name] != enwik8["train"][name]}
    assert differ == ({"state"} if recipe == "folder" else set())  # documents of a folder are read one by one


def test_values_of_the_user_have_no_source() -> None:
    config = text.compose_config("enwik8", ["preset=paper", "model.memory=7", "train.lr=1e-3"])
    unstated = {"model.memory", "train.lr", "train.beta2", "model.same_length"}  # set by the user, or defaults
    assert not unstated & sources(config, domain="enwik8").keys()
    assert not sources(text.compose_config("enwik8", ["preset=small"]), domain="enwik8")


def test_the_printed_configuration_is_still_yaml_of_the_same_settings() -> None:
    config = compose("wikitext103/dai_large/transformer_xl")
    printed = annotated(config, domain="wikitext103")
    assert OmegaConf.to_container(OmegaConf.create(printed)) == config
    assert "  d_model: 1024  # Dai et al. 2019, public script run_wt103_large.sh\n" in printed
    assert "  cutoffs:  # Dai et al. 2019, public code\n  - 20000\n" in printed
    study = annotated(
        compose("wikitext103/dai_standard/transformer_xl/txl_half_loss"),
        domain="wikitext103", overrides=["study=txl_half_loss"])  # fmt: skip
    assert "  loss_share: 0.5  # Dai et al. 2019, Tables 6 and 10\n" in study
