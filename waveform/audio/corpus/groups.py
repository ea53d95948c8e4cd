"""Turns groups of audio files into token shards: the central step of preparing.

A group is a number of files of one split that share a shard. A finished group leaves two files: the shard in `shards/`,
named by its content, and its record in `unfinished/`, named by what went in (paths, sizes, times). An interrupted
preparation continues from these records; a group's record is written last.
"""

import hashlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from waveform.audio.audio_format import AudioFormat
from waveform.audio.corpus.scan import FoundFile
from waveform.audio.decoding_child import RefusedFile
from waveform.audio.decoding_process import DecodingProcessDied
from waveform.audio.files import AudioFile
from waveform.engine.shards import Shard, ShardWriter, Utterance
from waveform.engine.sound_classes import NUM_CLASSES
from waveform.engine.token_set import piece_name
from waveform.system.atomic import explain_write_errors, write_file
from waveform.system.errors import UserError

FORMAT = 3  # raise it whenever the same audio would give different tokens or records
SHARDS, UNFINISHED = "shards", "unfinished"  # folders inside the data set
SILENCE_FRAMES_PER_S = 50  # of 20 ms
SILENCE_RMS = 1e-3  # -60 dBFS

Records = dict[str, dict[str, Any]]  # path -> what dataset.json says about the file

_MIN_GROUP_BYTES = 8 << 20  # of source files: a few minutes of audio, a second of work
_MAX_GROUPS = 256  # so that training does not have to keep thousands of files open


@dataclass(frozen=True)
class Group:
    """The files of one split that go into one shard, in the order of their paths, and the format of its tokens."""

    split: str
    files: tuple[FoundFile, ...]
    audio_format: AudioFormat

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)  # bytes

    @property
    def key(self) -> str:
        """Hex digest of all that determines the shard and can be known without reading the audio."""
        files = [[file.path, file.size, file.mtime_ns] for file in self.files]
        content = json.dumps([FORMAT, self.audio_format.modality(), self.split, files])
        return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def cut_into_groups(files: Iterable[tuple[FoundFile, str]], audio_format: AudioFormat) -> list[Group]:
    """Cut (file, split) pairs into groups. The groups depend only on the files, so the next run cuts the same ones."""
    by_split = sorted((split, file) for file, split in files)
    limit = max(_MIN_GROUP_BYTES, sum(file.size for _, file in by_split) // _MAX_GROUPS)
    groups: list[tuple[str, list[FoundFile]]] = []
    size = 0
    for split, file in by_split:
        if not groups or groups[-1][0] != split or size + file.size > limit:
            groups.append((split, []))
            size = 0
        groups[-1][1].append(file)
        size += file.size
    return [Group(split, tuple(members), audio_format) for split, members in groups]


def prepare_group(group: Group, *, audio_dir: Path, data_dir: Path) -> Records:
    """Decode, resample and quantise the files of a group into a shard; return their records, refused ones too.

    Raises UserError if the shard or the record cannot be written, or if this machine (of a cluster) lacks a folder.
    """
    for folder in (audio_dir, data_dir / UNFINISHED):
        if not folder.is_dir():
            raise UserError(f"{socket.gethostname()} does not see {folder}; all workers need the same folders")
    partial = data_dir / UNFINISHED / f"{group.key}.{uuid4().hex}.shard"
    records: Records = {}
    with ShardWriter(partial, vocab_size=NUM_CLASSES) as writer:
        for file in group.files:
            record: dict[str, Any] = {"size": file.size, "mtime_ns": file.mtime_ns, "split": group.split}
            try:
                try:
                    record |= _write_file(writer, file.path, audio_dir, group.audio_format)
                except DecodingProcessDied:  # once more: the file may not have been the reason
                    record |= _write_file(writer, file.path, audio_dir, group.audio_format)
            except RefusedFile as refusal:
                record["refused"] = refusal.reason
                if isinstance(refusal, DecodingProcessDied):  # perhaps for lack of RAM; the next run tries again
                    record["died"] = True
            records[file.path] = record
    shard = _name_by_content(partial, Shard(partial).utterances, group.split, data_dir)
    for record in records.values():
        if "refused" not in record:
            record["shard"] = shard
    write_file(_record_path(group, data_dir), json.dumps(records).encode())
    return records


def finished_records(group: Group, data_dir: Path) -> Records | None:
    """Return what an interrupted run recorded of exactly this group; None if nothing, or if something is damaged."""
    try:
        records: Records = json.loads(_record_path(group, data_dir).read_bytes())
        for shard in {record["shard"] for record in records.values() if "refused" not in record}:
            Shard(data_dir / shard)
        return records
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


def _write_file(writer: ShardWriter, name: str, audio_dir: Path, audio_format: AudioFormat) -> dict[str, Any]:
    """Write one file's tokens as one utterance, or one for each piece; return its record, but for the shard's name.

    If it raises RefusedFile, the shard is as before.
    """
    rate = audio_format.sample_rate_hz
    frame, counts = rate // SILENCE_FRAMES_PER_S, Counter[str]()

    def encoded(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the tokens of each block; count samples, whole frames and silent frames."""
        for block in blocks:
            frames = block[: len(block) // frame * frame].reshape(-1, frame)
            silent = np.einsum("ij,ij->i", frames, frames) / frame < SILENCE_RMS**2
            counts.update(used=len(block), frames=len(frames), silent=int(np.count_nonzero(silent)))
            yield audio_format.encode(audio_format.scale(block))

    with closing(AudioFile(audio_dir / name)) as file:
        tokens = encoded(_pieces(file.blocks(sample_rate_hz=rate), audio_format))
        utterances: list[Iterable[np.ndarray]] = [tokens]
        if audio_format.piece_samples is not None:
            utterances = [[piece] for piece in tokens]  # held until the whole file is known to be undamaged
            if not utterances:
                raise RefusedFile(name, f"it is shorter than a piece of {audio_format.piece_samples:,} samples")
        names = [name] if len(utterances) == 1 else [piece_name(name, i) for i in range(len(utterances))]
        written = [writer.write(utterance, blocks) for utterance, blocks in zip(names, utterances, strict=True)]
        digests = [utterance.digest for utterance in written]
        joined = hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
        dropped = -(-file.num_frames * rate // file.sample_rate_hz) - counts["used"]
        return {
            "duration_s": round(counts["used"] / rate, 6),
            "frames": counts["frames"],
            "silent": counts["silent"],
            **({"dropped_s": round(dropped / rate, 6)} if dropped else {}),
            "sample_rate_hz": file.sample_rate_hz,
            "channels": file.num_channels,
            "samples": file.num_frames * file.num_channels,
            "clipped": file.num_clipped,
            "shard": None,  # named when it is whole
            "digest": digests[0] if len(digests) == 1 else joined,
        }


def _pieces(blocks: Iterator[np.ndarray], audio_format: AudioFormat) -> Iterator[np.ndarray]:
    """Yield the pieces [piece_samples] of one file, then what remains of it, unless that is dropped.

    If the format has no pieces, yield the whole file: in one part if it is scaled as a whole, otherwise in blocks.
    """
    if audio_format.piece_samples is None and audio_format.normalise == "none":
        yield from blocks  # whole seconds, except the last, so no 20-ms frame spans two blocks
        return
    size = audio_format.piece_samples or sys.maxsize
    held: list[np.ndarray] = []
    num_held = 0
    for block in blocks:
        while num_held + len(block) >= size:
            num_new = size - num_held
            yield np.concatenate([*held, block[:num_new]])
            block, held, num_held = block[num_new:], [], 0
        held, num_held = [*held, block], num_held + len(block)
    if num_held and not audio_format.drop_rest:
        yield np.concatenate(held)


def _name_by_content(partial: Path, utterances: list[Utterance], split: str, data_dir: Path) -> str | None:
    """Move a written shard to its final name and return that, relative to the data set; remove an empty shard."""
    if not utterances:
        partial.unlink()
        return None
    content = json.dumps([[utterance.name, utterance.length, utterance.digest] for utterance in utterances])
    name = f"{SHARDS}/{split}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}.shard"
    with explain_write_errors(data_dir / name):
        os.replace(partial, data_dir / name)
    return name


def _record_path(group: Group, data_dir: Path) -> Path:
    return data_dir / UNFINISHED / f"{group.key}.json"
