"""`waveform bench` as a user meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from tests.calling import Capsys, figures_of, mistake
from waveform.benchmarks import child
from waveform.benchmarks.child import Job, run_in_child
from waveform.benchmarks.preparation import measure_preparation
from waveform.cli import main
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import job
from waveform.system.errors import UserError
from waveform.verbs import bench as verb

TINY = ["--model", "wavenet", "--preset", "demo", "model.num_stacks=1", "model.layers_per_stack=3", "train.chunk=64",
        "data.sample_rate_hz=16000"]  # fmt: skip


@pytest.mark.slow
def test_the_figures_are_there_and_sane(tmp_path: Path, capsys: Capsys, monkeypatch: MonkeyPatch) -> None:
    def run(job: Job) -> dict[str, Any]:  # starting a process for each would take most of the time
        if "config" in job.arguments:
            return run_in_child(job)
        scratch = tmp_path / job.title
        scratch.mkdir()
        return measure_preparation(**job.arguments, scratch=scratch)

    monkeypatch.setattr(verb, "run_in_child", run)
    quick = "from waveform.benchmarks import sampling; sampling._STEPS_S = 0.01; run_job("  # as in tests/conftest.py
    monkeypatch.setattr(child, "_CHILD", child._CHILD.replace("run_job(", quick))
    command = ["bench", "--device", "cpu", "--audio-minutes", 0.1, "--batch-size", 2, *TINY]
    content = figures_of(tmp_path / "bench.json", *command)
    out = capsys.readouterr().out
    assert "training" in out and "sampling" in out and "preparation" in out
    assert max(map(len, out.splitlines())) <= 120
    assert content["command"].startswith("waveform bench model.num_stacks=1")
    assert "train.batch_size=2" in content["command"]
    machine = content["machine"]
    assert all(machine[field] for field in ("cpu", "cores", "memory_bytes", "threads", "python", "torch", "waveform"))
    assert {"numba", "commit", "gpu", "gpu_driver"} <= machine.keys() and content["date"].startswith("2")
    (model,) = content["models"]
    assert (model["model"], model["preset"], model["batch_size"], model["chunk"]) == ("wavenet", "demo", 2, 64)
    assert model["model_config"]["layers_per_stack"] == 3
    training = model["training"]
    assert training["tokens_per_second"]["min"] > 0
    assert training["tokens_per_second"]["repeats"] >= 3
    assert f"{training['tokens_per_second']['median'] / 16_000:.3g} x" in out  # real time is that of the rate
    assert 0 < training["model_flop_utilisation"] < 1.5
    profiled = training["profile"]
    assert profiled["num_operations"] > 100 and profiled["seconds_in_operations"] > 0
    assert f"{profiled['num_operations']:,}" in out
    memory = model["training_memory"]
    assert 0 < memory["peak_without_imports_bytes"] < memory["peak_bytes"]
    assert memory["imports_bytes"] > 50e6
    cases = [(case["num_streams"], case["decoder"]) for case in model["sampling"]]
    assert cases == [(1, "exact"), (1, "int8"), (4, "exact"), (4, "int8")]
    bytes_per_step = {case["decoder"]: case["bytes_per_step"] for case in model["sampling"]}
    assert 0 < bytes_per_step["int8"] < bytes_per_step["exact"] / 2
    for case in model["sampling"]:
        steps_per_second = case["samples_per_second"]["median"] / case["num_streams"]
        read_per_second = bytes_per_step[case["decoder"]] * steps_per_second
        assert case["share_of_bound"] == pytest.approx(read_per_second / case["memory_bytes_per_second"]["median"])
    assert [part["channels"] for part in content["preparation"]] == [1, 2]
    speeds = [(part["samples_per_second"], part["times_real_time"]["median"]) for part in content["preparation"]]
    assert [samples / times for samples, times in speeds] == pytest.approx([16_000, 16_000])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "wavnet"], "unknown model 'wavnet'"),
        (["--preset", "huge"], "unknown preset 'huge'; choose one of clips_4m, demo, hour, small, speech_paper"),
        (["--model", "wavenet", "model.num_heads=2"], "unknown setting 'model.num_heads'"),
        (["--model", "wavenet", "--batch-size", "0"], "train.batch_size is 0"),
        (["preset=demo", "--model", "lstm"], "preset=demo: bench has an option for it; write --presets demo"),
        (["model=lstm"], "model=lstm: bench has an option for it; write --models lstm"),
        (["+model=lstm"], "+model=lstm: bench has an option for it; write --models lstm"),
        (["train.device=cuda"], "train.device=cuda: bench has an option for it; write --device cuda"),
        (["train.update_period=4"], "train.update_period=4: bench measures with train.update_period=1; leave it out"),
        (["train.state=carry"], "train.state=carry: bench measures with train.state=utterance; leave it out"),
        (["--audio-minutes", "-1"], "--audio-minutes -1"),
        (["--model", "wavenet", "data.quantiser=cubic"], "data.quantiser is 'cubic'; choose mu_law"),
        (["--json", f"{__file__}/bench.json"], "test_bench.py is a file, not a folder"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(arguments: list[str], expected: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "run_in_child", lambda job: pytest.fail("work began"))
    assert expected in mistake(["bench", *arguments])


def test_an_update_is_the_one_chunk_whose_tokens_are_counted() -> None:
    overrides = ["train.update_period=4", "train.update_period_from=0"]
    train = verb._model_job("wavenet", "demo", "cpu", overrides, None).arguments["config"]["train"]
    periods = {name: train[name] for name in ("update_period", "update_period_from")}
    assert TrainConfig(**periods).chunks_of_update(0) == 1


def test_a_device_that_cannot_be_used_is_one_line(monkeypatch: MonkeyPatch) -> None:
    for device, module, reason in (("cuda", "cuda", "CUDA device"), ("mps", "backends.mps", "Apple GPU")):
        monkeypatch.setattr(f"torch.{module}.is_available", lambda: False)
        assert f"no usable {reason}" in mistake(["bench", "--device", device])
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert "not on Apple's GPUs" in mistake(["bench", "--device", "mps"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it without torchrun"), job(device="mps", timeout_s=1):
        pass


def test_what_fails_is_named_and_the_rest_is_kept(tmp_path: Path, capsys: Capsys, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_CHILD", "raise MemoryError('no room')")
    file = tmp_path / "bench.json"
    assert main(["bench", "--device", "cpu", "--audio-minutes", "0", "--json", str(file), *TINY]) == 2
    assert "1 of 1 measurements failed, the first with: MemoryError: no room" in capsys.readouterr().err
    failed = {"preset": "demo", "model": "wavenet", "error": "MemoryError: no room"}
    assert json.loads(file.read_text())["models"] == [failed]
