"""Shards: what is written is read; damage is found and named; an interrupted write leaves nothing."""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.training import utterances_of
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_set import TokenSet
from waveform.system.errors import UserError


def write(path: Path, utterances: dict[str, list[int]], *, vocab_size: int = 256) -> Path:
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        for name, tokens in utterances.items():
            writer.write(name, np.array_split(np.array(tokens), 2))
    return path


_UTTERANCES = st.dictionaries(
    st.text(max_size=8), st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=4), max_size=8
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(utterances=_UTTERANCES, vocab_size=st.sampled_from([256, 300, 70_000]), length=st.integers(1, 12))
def test_any_utterances_come_back(
    tmp_path: Path, utterances: dict[str, list[list[int]]], vocab_size: int, length: int
) -> None:
    """In any number of parts, empty ones too, and cut into pieces of any length."""
    path = tmp_path / "a.shard"
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        written = [writer.write(name, parts) for name, parts in utterances.items()]
    shard = Shard(path)
    assert shard.utterances == written
    shard.verify()
    tokens = TokenSet([shard], vocab_size=vocab_size)
    whole = {name: [token for part in parts for token in part] for name, parts in utterances.items()}
    expected = {name: content for name, content in sorted(whole.items()) if content}
    assert dict(zip(tokens.names, utterances_of(tokens), strict=True)) == expected
    assert tokens.lengths == [len(content) for content in expected.values()]
    every = [token for content in expected.values() for token in content]
    assert tokens.num_tokens == len(every)
    assert tokens.counts.tolist() == np.bincount(np.array(every, dtype=int), minlength=vocab_size).tolist()
    pieces = tokens.cut(length)
    assert [token for piece in utterances_of(pieces) for token in piece] == every
    assert all(n <= length for n in pieces.lengths)


def test_checksum_depends_on_content_not_on_shards(tmp_path: Path) -> None:
    one = TokenSet([Shard(write(tmp_path / "1", {"a": [1], "b": [2]}))], vocab_size=256)
    two = TokenSet([Shard(write(tmp_path / "2", {"b": [2]})), Shard(write(tmp_path / "3", {"a": [1]}))], vocab_size=256)
    other = TokenSet([Shard(write(tmp_path / "4", {"a": [1], "b": [3]}))], vocab_size=256)
    assert one.checksum == two.checksum != other.checksum


def test_nothing_is_left_of_an_utterance_whose_source_fails(tmp_path: Path) -> None:
    def blocks(fails: bool) -> Iterator[np.ndarray]:
        yield np.full(5, 7)
        if fails:
            raise EOFError

    with ShardWriter(tmp_path / "a", vocab_size=256) as writer:
        writer.write("a", blocks(fails=False))
        with pytest.raises(EOFError):
            writer.write("bad", blocks(fails=True))
        writer.write("c", blocks(fails=False))
    shard = Shard(tmp_path / "a")
    shard.verify()
    assert [u.name for u in shard.utterances] == ["a", "c"] and shard.counts[7] == 10


def test_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "a", vocab_size=256) as writer:
        writer.write("a", [[1, 2]])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"first": [1, 2, 3], "second": [4, 5]})
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        with pytest.raises(UserError, match=str(path)):
            Shard(path).verify()
        path.write_bytes(whole[:position])
        with pytest.raises(UserError, match=str(path)):
            Shard(path)


def test_damaged_tokens_are_found_when_they_are_read(tmp_path: Path) -> None:
    """Not before, so that opening a corpus costs nothing; and not after the first of them was given out."""
    path = write(tmp_path / "a", {"first": [1, 2, 3], "second": [4, 5]})
    whole = path.read_bytes()
    path.write_bytes(whole[: 64 + 4] + b"\0" + whole[64 + 5 :])
    tokens = TokenSet([Shard(path)], vocab_size=256)
    for damaged in (tokens, tokens.cut(1)):
        assert damaged.read(0, start=0, stop=1).tolist() == [1]
        with pytest.raises(UserError, match=f"{path} is damaged .*second"):
            damaged.read(len(damaged) - 1, start=0, stop=1)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"x": [1, 2]}, vocab_size=70_000)
    content = bytearray(path.read_bytes())
    index = json.loads(content[64 + 8 :])
    content[64:72] = np.array([1, 70_000], dtype=np.int32).tobytes()
    index["utterances"][0][2] = hashlib.blake2b(content[64:72], digest_size=16).hexdigest()
    raw = json.dumps(index).encode()
    header = struct.pack("<8sQQ32s8x", b"WFSHARD1", 8, len(raw), hashlib.blake2b(raw, digest_size=32).digest())
    path.write_bytes(header + content[64:72] + raw)
    with pytest.raises(UserError, match=f"{path} is damaged .the vocabulary of 'x' differs"):
        Shard(path).verify()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(27, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "int32")]
)
def test_the_smallest_dtype_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    path = write(tmp_path / "a", {"x": [0, vocab_size - 1]}, vocab_size=vocab_size)
    assert json.loads(path.read_bytes()[64 + 2 * np.dtype(dtype).itemsize :])["dtype"] == dtype
