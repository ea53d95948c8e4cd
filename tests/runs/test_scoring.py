"""Runs of earlier versions are scored, and what a run's own data has become since it was trained."""

import re
import shutil
from pathlib import Path

import pytest
from torch import nn

from tests import laws
from tests.analyses.conftest import run_of
from tests.calling import Capsys, cli
from tests.engine.conftest import write_tokens
from waveform.engine.dataset import Dataset, write_dataset
from waveform.runs.scoring import own_tokens
from waveform.system.errors import UserError


def test_data_that_has_changed_is_warned_of_and_another_vocabulary_refused(tmp_path: Path, capsys: Capsys) -> None:
    tokens = write_tokens(tmp_path / "a.shard", [5])
    write_dataset(Dataset(tmp_path, laws.VOCAB_SIZE, {}, {"test": ["a.shard"]}, {}))
    run = run_of(nn.Identity(), window=6)
    known = {"path": str(tmp_path), "vocab_size": laws.VOCAB_SIZE, "checksums": {"test": tokens.checksum}}
    run.config["dataset"] |= known
    assert own_tokens(run, split="test").lengths == [5] and not capsys.readouterr().err
    run.config["dataset"]["checksums"] = {"test": "of others"}
    assert own_tokens(run, split="test").lengths == [5]
    assert f"the test data of {tmp_path} is not the one that run was trained with" in capsys.readouterr().err
    run.config["dataset"]["vocab_size"] = 7
    with pytest.raises(UserError, match=f"trained with a vocabulary of 7, and .* has one of {laws.VOCAB_SIZE}; "):
        own_tokens(run, split="test")


def test_a_run_from_before_a_setting_existed_has_its_default(speech: Path, tmp_path: Path) -> None:
    shutil.copytree(speech / "run", tmp_path / "older")
    config = tmp_path / "older" / "config.yaml"
    content, num_lines = re.subn(r"  (state|update_period_from): .*\n", "", config.read_text())
    assert num_lines == 2
    config.write_text(content)
    cli("compare", speech / "run", tmp_path / "older")
    cli("export", tmp_path / "older", tmp_path / "hub", "--format", "hub")  # which draws its learning curve
