"""Data sets: `dataset.json` is read as written, damage is found, and only its own shards are opened."""

from pathlib import Path

import pytest

from tests.engine.test_shards import write
from waveform.engine.dataset import Dataset, is_dataset, read_dataset, write_dataset
from waveform.system.errors import UserError


def test_a_data_set_names_only_its_own_shards(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": [1]})
    write(tmp_path / "b", {"x": [2]})
    write_dataset(Dataset(tmp_path, 256, {"kind": "text"}, {"train": ["a"], "test": ["b"]}, {}))
    (tmp_path / "a").write_bytes((tmp_path / "b").read_bytes())
    with pytest.raises(UserError, match=f"{tmp_path / 'a'} is not the shard that .*dataset.json names"):
        read_dataset(tmp_path).open_split("train")
    (tmp_path / "data").mkdir()
    for name in ("../a", str(tmp_path / "a")):
        write_dataset(Dataset(tmp_path / "data", 256, {}, {"train": [name]}, {}))
        with pytest.raises(UserError, match=r"dataset.json is damaged .*not in its folder"):
            read_dataset(tmp_path / "data")


def test_every_flipped_byte_of_the_dataset_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "dataset.json"
    write(tmp_path / "a", {"x": [1]})
    write_dataset(Dataset(tmp_path, 256, {"kind": "text"}, {"train": ["a"]}, {"words": 7}))
    whole, meant = path.read_bytes(), read_dataset(tmp_path)
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        try:
            assert read_dataset(tmp_path) == meant  # of white space
        except UserError as error:
            assert str(path) in str(error)


def test_dataset_file(tmp_path: Path) -> None:
    assert not is_dataset(tmp_path)
    with pytest.raises(UserError, match="not a prepared data set"):
        read_dataset(tmp_path)
    write(tmp_path / "a", {"x": [1]})
    write_dataset(Dataset(tmp_path, 256, {"kind": "text"}, {"train": ["a"]}, {}))
    assert read_dataset(tmp_path).open_split("train").num_tokens == 1
    with pytest.raises(UserError, match="no split 'test'"):
        read_dataset(tmp_path).open_split("test")
    write(tmp_path / "a", {"x": []})
    write_dataset(Dataset(tmp_path, 256, {"kind": "text"}, {"train": ["a"], "valid": []}, {}))
    for split in ("train", "valid"):
        with pytest.raises(UserError, match=f"the {split} split of .* has no tokens; prepare"):
            read_dataset(tmp_path).open_split(split)
    (tmp_path / "dataset.json").write_text('{"name": "a corpus", "files": 3}')
    with pytest.raises(UserError, match=r"json was not written by waveform; move it, or name another folder"):
        read_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text('{"format": 2, "vocab')
    with pytest.raises(UserError, match="damaged"):
        read_dataset(tmp_path)
