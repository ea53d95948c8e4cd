"""Splitting by hash and by folder."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waveform.audio.corpus.splits import (
    SPLITS,
    SplitConfig,
    SplitPlan,
    divide_in_order,
    plan_split,
    require_all_splits,
)
from waveform.system.errors import UserError

_NAMES = st.text("abcé ", min_size=1, max_size=6)
_PATHS = st.lists(st.builds("{}/{}/{}.wav".format, _NAMES, _NAMES, _NAMES), min_size=1, max_size=40, unique=True)


def _plan(by: str = "file", *, valid: float = 0.05, test: float = 0.05, layout: str = "") -> SplitPlan:
    return SplitPlan(by=by, valid=valid, test=test, layout=layout)


def test_known_positions_never_change() -> None:
    """A release that moved files between splits would leak test files into training."""
    assert _plan().position("speaker/clip.wav") == pytest.approx(0.9013785471665366)
    assert _plan("folder").position("speaker/clip.wav") == pytest.approx(0.8449807496665878)


def test_shares_are_kept() -> None:
    paths = [f"clip{index}.wav" for index in range(20_000)]
    plan = _plan(valid=0.1, test=0.03)
    counts = {split: sum(plan.split_of(path) == split for path in paths) for split in SPLITS}
    assert abs(counts["valid"] - 2000) < 200 and abs(counts["test"] - 600) < 120


@given(_PATHS)
def test_a_folder_stays_together(paths: list[str]) -> None:
    plan = _plan("folder", valid=0.3, test=0.3)
    splits: dict[str, set[str | None]] = {}
    for path in paths:
        splits.setdefault(path.split("/")[0], set()).add(plan.split_of(path))
    assert all(len(found) == 1 for found in splits.values())


@given(_PATHS)
def test_raising_a_share_takes_no_file_out_of_test(paths: list[str]) -> None:
    for path in paths:
        if _plan(test=0.2).split_of(path) == "test":
            assert _plan(test=0.4, valid=0.2).split_of(path) == "test"


_SHARES = st.floats(0.01, 0.45)
_LAYOUTS = st.sampled_from(["", "train/test", "train/valid/test"])


@given(_PATHS, _PATHS, st.sampled_from(["file", "folder"]), _LAYOUTS, _SHARES, _SHARES)
def test_splits_are_disjoint_and_added_files_move_none(
    paths: list[str], added: list[str], by: str, layout: str, valid: float, test: float
) -> None:
    plan = _plan(by, valid=valid, test=0.0 if layout else test, layout=layout)
    before = {path: plan.split_of(path) for path in paths}
    after = {path: plan.split_of(path) for path in sorted({*added, *paths})}
    assert all(after[path] == split for path, split in before.items())
    # The shares alone determine the bounds between splits.
    for path, split in after.items():
        if not layout:
            position = plan.position(path)
            assert split == ("test" if position < test else "valid" if position < test + valid else "train")
        else:
            top = path.split("/")[0]
            assert split is None if top not in layout.split("/") else split in layout.split("/") or split == "valid"


@given(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.sampled_from(["file", "folder"]),
    _SHARES,
    _SHARES,
)
def test_shares_hold_for_any_names(stem: str, by: str, valid: float, test: float) -> None:
    """Whatever names have in common, their positions are spread evenly: within 5 standard errors of the share."""
    plan = _plan(by, valid=valid, test=test)
    num = 1000
    splits = [plan.split_of(f"{stem}{index}/{stem}.wav") for index in range(num)]
    for split, share in (("valid", valid), ("test", test)):
        assert abs(splits.count(split) / num - share) < 5 * (share * (1 - share) / num) ** 0.5


@given(_PATHS, st.sampled_from(["file", "folder"]), st.sampled_from(["", "train/test"]))
def test_the_suggested_shares_work(paths: list[str], by: str, layout: str) -> None:
    if layout:
        paths = [f"train/{path}" for path in paths] + ["test/a.wav"]
    plan = _plan(by, test=0.0 if layout else 0.05, layout=layout)
    try:
        require_all_splits(plan, paths)
    except UserError as error:
        message = str(error)
        found = dict(re.findall(r"data\.split\.(valid|test)=([0-9.e-]+)", message))
        shares = {name: float(value) for name, value in found.items()}
        if shares:
            require_all_splits(_plan(by, layout=layout, **({"test": 0.0} | shares)), paths)
        positions = {plan.position(path) for path in paths if layout == "" or path.startswith("train/")}
        assert bool(shares) == (len(positions) >= (2 if layout else 3))
        assert "the corpus is too small" in message


def test_layouts(tmp_path: Path) -> None:
    assert plan_split(tmp_path, SplitConfig()).layout == ""
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
    plan = plan_split(tmp_path, SplitConfig(valid=0.5))
    assert plan.layout == "train/test"
    taken = {plan.split_of(f"train/{index}.wav") for index in range(50)}
    assert taken == {"train", "valid"}
    assert {plan.split_of(f"test/{index}.wav") for index in range(50)} == {"test"}
    assert plan.split_of("extra/a.wav") is None and plan.split_of("a.wav") is None and plan.split_of("valid/a") is None
    by_speaker = plan_split(tmp_path, SplitConfig(by="folder", valid=0.5))
    assert len({by_speaker.split_of(f"train/anna/{index}.wav") for index in range(50)}) == 1
    assert {by_speaker.split_of(f"train/{index}/a.wav") for index in range(50)} == {"train", "valid"}
    (tmp_path / "valid").mkdir()
    plan = plan_split(tmp_path, SplitConfig(valid=0.5))
    assert [plan.split_of(f"{split}/x/a.wav") for split in SPLITS] == list(SPLITS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SplitConfig(by="speaker"), "data.split.by is 'speaker'; use file, folder or order"),
        (SplitConfig(valid=0), "data.split.valid is 0; use a share above 0"),
        (SplitConfig(test=1.5), "data.split.test is 1.5"),
        (SplitConfig(test=float("nan")), "data.split.test is nan"),
        (SplitConfig(valid=0.6, test=0.4), "keep it below 1"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, config: SplitConfig, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plan_split(tmp_path, config)


def test_one_folder_only_suggests_by_file() -> None:
    with pytest.raises(UserError, match=r"1 folder to split.*set data.split.by=file"):
        require_all_splits(_plan("folder"), ["wav/a.wav", "wav/b.wav"])


def test_an_empty_folder_of_a_layout_is_named() -> None:
    with pytest.raises(UserError, match="no usable audio in valid/"):
        require_all_splits(_plan(layout="train/valid/test"), ["train/a.wav", "test/b.wav"])


def test_files_are_divided_in_natural_order() -> None:
    paths = [f"{i}.wav" for i in range(4328)]
    division = divide_in_order(reversed(paths), SplitConfig("order", valid=0.06, test=0.06))
    splits = [division.split_of(path) for path in paths]
    # The card of the corpus Beethoven: 0 to 3807 train, 3808 to 4067 validate, 4068 to 4327 test.
    assert splits == ["train"] * 3808 + ["valid"] * 260 + ["test"] * 260
    assert division.split_of("4328.wav") is None
    hundred = divide_in_order([f"b{i}/2" for i in range(100)], SplitConfig("order", valid=0.06, test=0.06))
    assert [hundred.split_of(f"b{i}/2") for i in (87, 88, 93, 94)] == ["train", "valid", "valid", "test"]


def test_order_and_folders_exclude_each_other(tmp_path: Path) -> None:
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
    with pytest.raises(UserError, match=r"data.split.by is order, but .* by its folders train/test; leave it out"):
        plan_split(tmp_path, SplitConfig("order"))


def test_too_few_files_for_an_order() -> None:
    with pytest.raises(UserError, match=r"valid would be empty, divided in natural order: train, then valid 0\.05"):
        require_all_splits(divide_in_order("abc", SplitConfig("order")), "abc")
