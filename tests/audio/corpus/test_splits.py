"""Splitting by hash and by folder."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waveform.audio.corpus.splits import (
    SPLITS,
    SplitConfig,
    divide,
    divide_in_order,
    find_layout,
    position_of,
    require_all_splits,
)
from waveform.system.errors import UserError

_NAMES = st.text("abcé ", min_size=1, max_size=6)
_PATHS = st.lists(st.builds("{}/{}/{}.wav".format, _NAMES, _NAMES, _NAMES), min_size=1, max_size=40, unique=True)
_SHARES = st.floats(0.01, 0.45)
_RANK = {split: rank for rank, split in enumerate(SPLITS)}
_LAYOUTS = st.sampled_from(["", "train/test", "train/valid/test"])


def test_known_positions_never_change() -> None:
    """A release that moved files between splits would leak test files into training."""
    assert position_of("speaker/clip.wav") == pytest.approx(0.9013785471665366)
    assert position_of("speaker") == pytest.approx(0.8449807496665878)


@given(_PATHS, _PATHS, st.sampled_from(["file", "folder"]), _LAYOUTS, _SHARES, _SHARES)
def test_splits_are_disjoint_and_nothing_that_trained_is_scored_later(
    paths: list[str], added: list[str], by: str, layout: str, valid: float, test: float
) -> None:
    config = SplitConfig(by, valid, test)
    before = divide(paths, config, layout=layout).splits
    after = divide({*added, *paths}, config, layout=layout).splits
    assert all(_RANK[after[path]] <= _RANK[before[path]] for path in before)
    # The shares alone determine the bounds between splits, except that the lowest keys are held out if no others are.
    position = {path: position_of(path if by == "file" else path.split("/")[0]) for path in {*added, *paths}}
    tested = {each for each in position.values() if each < test} or {min(position.values())}
    rest = {*position.values()} - tested
    validated = {each for each in rest if each < test + valid} or {min(rest, default=0)}
    for path, each in position.items():
        if layout:
            assert path in after if path.split("/")[0] in layout.split("/") else path not in after
        else:
            assert after[path] == ("test" if each in tested else "valid" if each in validated else "train")


def test_a_few_files_are_divided() -> None:
    few = divide(["j.wav", "i.wav", "n.wav"], SplitConfig()).splits  # at 0.950, 0.989 and 0.932
    assert few == {"n.wav": "test", "j.wav": "valid", "i.wav": "train"}
    more = divide(["j.wav", "i.wav", "n.wav", "q.wav", "r.wav"], SplitConfig()).splits  # at 0.004 and 0.071
    assert more == {"q.wav": "test", "r.wav": "valid"} | dict.fromkeys(few, "train")
    assert divide("bac", SplitConfig("order")).splits == {"a": "train", "b": "valid", "c": "test"}


@given(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.sampled_from(["file", "folder"]),
    _SHARES,
    _SHARES,
)
def test_shares_hold_for_any_names(stem: str, by: str, valid: float, test: float) -> None:
    """Whatever names have in common, their positions are spread evenly: within 5 standard errors of the share."""
    num = 1000
    paths = [f"{stem}{index}/{stem}.wav" for index in range(num)]
    splits = list(divide(paths, SplitConfig(by, valid, test)).splits.values())
    for split, share in (("valid", valid), ("test", test)):
        assert abs(splits.count(split) / num - share) < 5 * (share * (1 - share) / num) ** 0.5


def test_layouts(tmp_path: Path) -> None:
    half = SplitConfig(valid=0.4)
    assert find_layout(tmp_path, half) == ""
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
    layout = find_layout(tmp_path, half)
    assert layout == "train/test"
    train, test = [f"train/{index}.wav" for index in range(50)], [f"test/{index}.wav" for index in range(50)]
    splits = divide([*train, *test, "extra/a.wav", "a.wav", "valid/a"], half, layout=layout).splits
    assert splits.keys() == {*train, *test} and {splits[path] for path in train} == {"train", "valid"}
    assert {splits[path] for path in test} == {"test"}
    by_speaker = SplitConfig("folder", valid=0.4)
    of_one = divide([f"train/anna/{index}.wav" for index in range(50)], by_speaker, layout=layout)
    assert len(set(of_one.splits.values())) == 1
    of_many = divide([f"train/{index}/a.wav" for index in range(50)], by_speaker, layout=layout)
    assert set(of_many.splits.values()) == {"train", "valid"}
    (tmp_path / "valid").mkdir()
    every = divide([f"{split}/x/a.wav" for split in SPLITS], half, layout=find_layout(tmp_path, half))
    assert list(every.splits.values()) == list(SPLITS)
    with pytest.raises(UserError, match=r"data.split.by is order, but .* by its folders train/valid/test; leave it"):
        find_layout(tmp_path, SplitConfig("order"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SplitConfig(by="speaker"), "data.split.by is 'speaker'; choose file, folder or order"),
        (SplitConfig(valid=0), "data.split.valid is 0; it must be a share above 0"),
        (SplitConfig(test=1.5), "data.split.test is 1.5"),
        (SplitConfig(test=float("nan")), "data.split.test is nan"),
        (SplitConfig(valid=0.6, test=0.4), "keep it below 1"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, config: SplitConfig, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_layout(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "layout", "paths", "message"),
    [
        (SplitConfig(), "", ["a.wav"], "would be empty: 1 file, divided by hash of each file's name: valid 0.05, test"),
        (SplitConfig(), "", "ab", "; to cut a long recording into several: ffmpeg -i LONG -f segment"),
        (SplitConfig("folder"), "", ["wav/a.wav", "wav/b.wav"], "2 files, divided by hash of each folder's name"),
        (SplitConfig(), "train/test", ["train/a.wav"], "valid is 0.05 of train by hash of each file's name; add"),
        (SplitConfig(), "train/valid/test", ["train/a.wav", "test/b.wav"], "valid would be empty: 2 files, divided by"),
        (SplitConfig("order"), "", "ab", "train would be empty: 2 files, divided in natural order: train, then valid"),
    ],
)
def test_an_empty_split_is_refused(config: SplitConfig, layout: str, paths: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        require_all_splits(divide(paths, config, layout=layout), paths)


def test_files_are_divided_in_natural_order() -> None:
    paths = [f"{i}.wav" for i in range(4328)]
    splits = divide_in_order(reversed(paths), SplitConfig("order", valid=0.06, test=0.06)).splits
    # The card of the corpus Beethoven: 0 to 3807 train, 3808 to 4067 validate, 4068 to 4327 test.
    assert [splits[path] for path in paths] == ["train"] * 3808 + ["valid"] * 260 + ["test"] * 260
    hundred = divide_in_order([f"b{i}/2" for i in range(100)], SplitConfig("order", valid=0.06, test=0.06)).splits
    assert [hundred[f"b{i}/2"] for i in (87, 88, 93, 94)] == ["train", "valid", "valid", "test"]
