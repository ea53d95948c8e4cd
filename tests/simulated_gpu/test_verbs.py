"""Every verb of both commands with `--device cuda` on a simulated GPU, on every registered model that it takes.

What the figures are means nothing here; that each verb comes to its end does.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from torch.nn import functional as F

from recipes import metrics
from recipes.studies.catalogue import Study
from recipes.studies.report import ByDistance
from recipes.verbs import study
from tests.calling import cli, figures_of, write_splits
from tests.recipes.calling import run as recipes_verb
from tests.recipes.conftest import calls as calls  # a fixture
from tests.simulated_gpu.device import SimulatedGpu, simulated_gpu, without_gpu
from waveform.analyses import state_reuse
from waveform.benchmarks import sampling, timing, training
from waveform.benchmarks.child import Job
from waveform.engine import cuda_graph
from waveform.models import linear_prediction
from waveform.models.registry import model_names
from waveform.runs import settings
from waveform.speech.domain import Speech
from waveform.verbs import bench, demo

pytestmark = without_gpu
CUDA = ("--device", "cuda")
SHORT = ("train.max_steps=2", "train.max_seconds=null", "train.evaluate_every=2", "train.checkpoint_every=2")
SMOKE = ("preset=smoke", "train.device=cuda", *SHORT)
SPEECH = (*SHORT, "train.batch_size=2", "train.evaluate_tokens=200", "train.sample_seconds=0.003")
NOT_RACED = {"lstm"}  # models that `demo` does not run
FEW_LAYERS = {
    **{name: {"num_layers": 2} for name in ("compressive_transformer", "transformer_xl")},
    "wavenet": {"num_stacks": 1, "layers_per_stack": 4},
}


@pytest.fixture(scope="module", name="gpu")
def open_gpu() -> Iterator[SimulatedGpu]:
    """With few layers, orders of linear prediction and steps of a graph: all launch alike. Nothing is timed twice."""
    layers, lattice, order = settings._layers, linear_prediction.lattice, linear_prediction.ORDER

    def and_few(*section: Any, model: str, **choices: Any) -> Iterator[dict[str, Any]]:
        yield from layers(*section, model=model, **choices)
        yield {"model": FEW_LAYERS[model]}

    with simulated_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_layers", and_few)
        patch.setattr(linear_prediction, "lattice", lambda r: F.pad(lattice(r[..., :4, :4]), (order - 3, 0)))
        patch.setattr(cuda_graph, "GRAPH_STEPS", 4)
        patch.setattr(state_reuse, "ROUNDS", 1)
        for module in (training, timing, sampling):
            patch.setattr(module, "MAX_REPEATS", 1)
        patch.setattr(sampling, "_STEPS_S", 0.0)
        yield gpu


@pytest.fixture(scope="module", name="speech")
def make_speech(gpu: SimulatedGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `demo` leaves: prepared data, and a run of each model, trained, compared and sampled."""
    place = tmp_path_factory.mktemp("speech")
    write_splits(place / "audio", train=2, seconds=0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "demo_speech_dir", lambda: place / "audio")
        patch.setattr(demo, "_SAMPLE_SECONDS", 0.002)
        patch.setattr(demo, "_REPORT_SECONDS", 0.001)
        cli("demo", "--out", place / "demo", *SPEECH)
    return place / "demo"


def test_demo(speech: Path, gpu: SimulatedGpu) -> None:
    assert set(Speech.race_models) == set(model_names()) - NOT_RACED, "a model is not run by `demo`: add it here"
    assert gpu.num_graphs >= len(Speech.race_models), "no decoder was captured"
    assert all((speech / model / "checkpoints").exists() for model in Speech.race_models)


@pytest.mark.parametrize("model", Speech.race_models)
def test_resume_and_evaluate(speech: Path, tmp_path: Path, model: str) -> None:
    more = [each.replace("max_steps=2", "max_steps=3") for each in SPEECH]
    cli("train", speech / "data", speech / model, f"model={model}", "preset=demo", *more)
    assert figures_of(tmp_path / "e.json", "evaluate", speech / model, *CUDA)["step"] == 3


def test_dynamic_evaluation(speech: Path) -> None:
    cli("evaluate", speech / "compressive_transformer", "--dynamic", *CUDA)


def test_sample_after_a_prompt(speech: Path, tmp_path: Path) -> None:
    (prompt,) = (speech.parent / "audio" / "test").iterdir()
    options = ("--out", tmp_path, "--seconds", "0.002", "--num", "2", "--top-p", "0.9", "--prime", prompt)
    for model in Speech.race_models:
        cli("sample", speech / model, *options, *CUDA)


def test_analyse(speech: Path) -> None:
    cli("analyse", *(speech / model for model in Speech.race_models), "--tokens", "2000", *CUDA)


@pytest.mark.usefixtures("no_fp64")
@pytest.mark.parametrize("model", Speech.race_models)
def test_without_fp64(speech: Path, tmp_path: Path, model: str) -> None:
    run = tmp_path / "run"
    cli("train", speech / "data", run, f"model={model}", "preset=demo", *SPEECH)
    cli("compare", run, speech / model, *CUDA)
    cli("sample", run, "--out", tmp_path, "--seconds", "0.002", "--num", "2", *CUDA)
    cli("analyse", run, "--tokens", "2000", *CUDA)


def test_bench(gpu: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Job) -> dict[str, Any]:  # not in another process, which would not know of the device
        return job.measure(**job.arguments, scratch=Path(mkdtemp(dir=tmp_path)))

    monkeypatch.setattr(bench, "run_in_child", run)
    options = ("--preset", "demo", "--audio-minutes", 0, "--batch-size", 2)
    found = figures_of(tmp_path / "b.json", "bench", *CUDA, "--model", *Speech.race_models, *options)
    assert {figures["model"] for figures in found["models"]} == set(model_names()) - NOT_RACED


@pytest.fixture(scope="module", name="recall")
def make_recall(gpu: SimulatedGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes, and a short run of each model on them."""
    place = tmp_path_factory.mktemp("recall")
    small = ("keys=4", "values=4", "episode=48", "train=40", "valid=4", "test=6")
    recipes_verb("prepare", "recall", place / "data", *(f"corpus.{each}" for each in small))
    for model in ("compressive_transformer", "transformer_xl"):
        recipes_verb("train", place / "data", place / model, f"model={model}", *SMOKE)
    return place


@pytest.mark.parametrize("verb", ["evaluate", "compare", "sweep", "sample", "analyse"])
def test_recipes(recall: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Answers are counted on the device, which has no numbers.
    monkeypatch.setattr(metrics, "bits_per", lambda nats, count: 1.0)
    run, other = recall / "compressive_transformer", recall / "transformer_xl"
    arguments = {
        "evaluate": [run, "--rows", 2],
        "compare": [run, other, "--rows", 2],
        "sweep": [run, "--compressed", "4,8", "--rows", 2],
        "sample": [run, "--tokens", 24],
        "analyse": [run, other, "--tokens", 100],
    }
    recipes_verb(verb, *arguments[verb], *CUDA)


@pytest.mark.usefixtures("calls")
def test_study(recall: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "bits_per", lambda nats, count: 1.0)
    monkeypatch.setattr(ByDistance, "draw", lambda *arguments: None)  # no answers are counted either
    few = Study({"most_used": ["model.compression=most_used"]}, ByDistance({"one": {"most_used": "one"}}), "one")
    monkeypatch.setattr(study, "find_study", lambda name: few)
    recipes_verb("study", "recall", recall / "data", tmp_path / "runs", "--seeds", 1, "--jobs", 1, *SMOKE)
