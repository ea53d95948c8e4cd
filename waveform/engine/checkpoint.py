"""Atomic checkpoints: weights, optimiser, random numbers, stream cursor and model state of every rank.

    checkpoints/step_00001200/
        model.safetensors  optimiser.safetensors  rank_0.safetensors ...  progress.json
        complete.json      digest of each file; written last, before the folder gets its name

Tensors are safetensors and everything else is JSON: nothing that is read here can run code. Links are refused, so that
a run from an untrusted source cannot make anyone read a file outside it.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from waveform.engine.interface import State, map_state, state_tensors
from waveform.ranks.distributed import World
from waveform.ranks.fsdp import like_parameter, whole
from waveform.system.atomic import explain_write_errors, sync, write_file
from waveform.system.errors import UserError

CHECKPOINTS_DIR = "checkpoints"
_COMPLETE = "complete.json"
# To be raised whenever an older waveform would misread a checkpoint. One that states no format has format 1.
FORMAT = 1
_MODEL, _OPTIMISER, _PROGRESS = "model.safetensors", "optimiser.safetensors", "progress.json"
_Read = TypeVar("_Read")


class OtherFormat(UserError):
    """A checkpoint of another version of waveform, which must be neither passed over nor replaced."""


class TrainingProgress(msgspec.Struct, kw_only=True):
    """How far training is: what `progress.json` holds besides what results depend on (`Checkpoint.conditions`)."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e12)]  # spent on training itself
    tokens_seen: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    cursor: dict[str, Any]  # of the stream
    skipped: tuple[int, int] = (0, 0)  # steps in all, and consecutive ones up to this one
    since_log: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # `Learner.sums`
    waited_s: Annotated[float, msgspec.Meta(ge=0, lt=1e12)] = 0.0  # seconds of waiting for a core since the last record
    evaluation_due: bool = False  # at this step, and not done yet
    weights_only: bool = False  # exported without what only training needs
    run: Any = None  # the settings that the run was trained with; older versions did not record them


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder that is complete."""

    folder: Path
    progress: TrainingProgress
    conditions: dict[str, Any]  # for a bit-exact resume, and fields that this version does not recognise

    @property
    def step(self) -> int:
        return self.progress.step

    def model_weights(self) -> dict[str, Tensor]:
        """The model's state dict, on the CPU."""
        return _read_tensors(self.folder / _MODEL)

    def weights_digest(self) -> str:
        """A digest of the file with the model's weights."""
        return _digest(self.folder / _MODEL)


def _require_file(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(f"{path} is not a regular file")


def _digest(path: Path) -> str:
    _require_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # has the operating system's reason only in words
        found = re.search(r"os error (\d+)", str(error))
        raise OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error)) from error
    sync(path)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the generators that work on `device` draws from: `cpu`, and a GPU's under the type of its device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = getattr(torch, device.type).get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue from what `random_state` returned; a GPU's state is ignored on other devices."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        getattr(torch, device.type).set_rng_state(state[device.type])


def _gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Unsharded tensors on the CPU, gathered one by one; every rank takes part, and one that keeps none gets {}."""
    wholes = ((name, whole(tensor.detach())) for name, tensor in tensors.items())
    return {name: tensor.cpu() for name, tensor in wholes if keep}


def save(
    run_dir: Path,
    *,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    state: State,
    progress: TrainingProgress,
    conditions: dict[str, Any],
    world: World,
    keep: int,
) -> None:
    """Write checkpoints/step_N under a temporary name, sync, rename; then drop all but the newest `keep`.

    Every rank calls this at the same step; rank r writes its random numbers and its rows' state. Sharded weights are
    gathered, so a checkpoint is the same with and without sharding. Raises UserError if the disk is full; older
    checkpoints then stay as they are, and what was written of this one is removed.
    """
    parent = run_dir / CHECKPOINTS_DIR
    final, partial = parent / f"step_{progress.step:08d}", parent / f".step_{progress.step:08d}.partial"
    with explain_write_errors(partial), ExitStack() as cleanup:
        with world.first_alone():
            if world.is_first:
                partial.mkdir(parents=True)
                cleanup.callback(shutil.rmtree, partial, ignore_errors=True)  # if it does not get its name
        rank_tensors = {f"state/{i:05d}": tensor for i, tensor in enumerate(state_tensors(state))}
        rank_tensors |= {f"random/{name}": tensor for name, tensor in random_state(world.device).items()}
        _write_tensors(partial / f"rank_{world.rank}.safetensors", rank_tensors)
        weights = _gathered(model.state_dict(), keep=world.is_first)
        remembered = optimiser.state_dict()["state"].items()
        of_optimiser = {f"{i}/{name}": value for i, values in remembered for name, value in values.items()}
        of_optimiser = _gathered(of_optimiser, keep=world.is_first)
        world.barrier()  # every rank has written its file
        with world.first_alone():
            if world.is_first:
                _write_tensors(partial / _MODEL, weights)
                _write_tensors(partial / _OPTIMISER, of_optimiser)
                content = {"format": FORMAT, **msgspec.to_builtins(progress), **conditions}
                write_file(partial / _PROGRESS, json.dumps(content).encode())
                digests = {path.name: _digest(path) for path in sorted(partial.iterdir())}
                write_file(partial / _COMPLETE, json.dumps(digests).encode())
                sync(partial)
                # A checkpoint of this or a later step must be damaged, or this run would have resumed from it.
                _remove(folder for step, folder in _folders(run_dir).items() if step >= progress.step)
                os.replace(partial, final)
                sync(parent)
                _remove(list(_folders(run_dir).values())[keep:])


def tidy(run_dir: Path, *, found: Checkpoint | None, keep: int) -> None:
    """Remove what a killed process left: partial checkpoints, and all but `found` and `keep` - 1 older ones.

    `found` is the newest complete one. Only the process that holds the run's lock may call this. Raises UserError if
    the folder is read-only.
    """
    with explain_write_errors(run_dir / CHECKPOINTS_DIR):
        for leftover in (run_dir / CHECKPOINTS_DIR).glob(".step_*"):
            shutil.rmtree(leftover)
        if found is not None:
            older = [folder for step, folder in _folders(run_dir).items() if step < found.step]
            _remove(older[keep - 1 :])


def _remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints; a process killed meanwhile leaves one that does not count and is cleared later."""
    for folder in folders:
        hidden = folder.with_name(f".{folder.name}.removed")
        os.replace(folder, hidden)
        shutil.rmtree(hidden)


def _folders(run_dir: Path) -> dict[int, Path]:
    """Checkpoint folders by their step, newest first."""
    named = ((path, path.name.removeprefix("step_")) for path in (run_dir / CHECKPOINTS_DIR).glob("step_*"))
    found = {int(digits): path for path, digits in named if re.fullmatch("[0-9]{1,17}", digits)}
    return dict(sorted(found.items(), reverse=True))


def _read_json(path: Path) -> dict[str, Any]:
    _require_file(path)
    try:
        return msgspec.convert(json.loads(path.read_bytes()), dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error})") from error


def _open(folder: Path) -> Checkpoint:
    """Open a checkpoint that has all its files; fields of progress.json that we do not know become `conditions`."""
    try:
        digests = _read_json(folder / _COMPLETE)
        _verify(folder, [_PROGRESS], digests)  # first, because it says which other files there are
        content = _read_json(folder / _PROGRESS)
        if content.get("format", 1) != FORMAT:
            raise OtherFormat(
                f"{folder} has format {content['format']!r}, and this waveform reads format {FORMAT}; use the version "
                "of waveform that wrote it, or another run folder"
            )
        progress = msgspec.convert(content, TrainingProgress)
        if progress.step != int(folder.name.removeprefix("step_")):
            raise ValueError(f"it is of step {progress.step}")
        _verify(folder, _files(progress.num_ranks, weights_only=progress.weights_only), digests)
    except ValueError as error:
        raise UserError(f"{folder / _PROGRESS} is not the progress of this checkpoint ({error})") from error
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    known = {"format", *TrainingProgress.__struct_fields__}
    return Checkpoint(folder, progress, {key: value for key, value in content.items() if key not in known})


def _files(num_ranks: int, *, weights_only: bool) -> list[str]:
    """What a checkpoint must hold, besides the digests of these files."""
    of_training = [_OPTIMISER, *(f"rank_{rank}.safetensors" for rank in range(num_ranks))]
    return [_MODEL, _PROGRESS, *([] if weights_only else of_training)]


def _verify(folder: Path, names: list[str], digests: dict[str, Any]) -> None:
    for name in names:
        if _digest(folder / name) != digests.get(name):
            raise UserError(f"{folder / name} is damaged or cut short, or {folder / _COMPLETE} is")


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None if there is none yet.

    Damaged ones are passed over with a warning. Raises UserError if all of them are damaged, and OtherFormat for one in
    the format of another version.
    """
    problems = []
    for folder in _folders(run_dir).values():
        try:
            found = _open(folder)
        except OtherFormat:
            raise
        except UserError as error:
            if folder not in _folders(run_dir).values():  # training has just removed it, for a newer one
                return newest(run_dir)
            problems.append(str(error))
        else:
            for problem in problems:
                print(f"warning: {problem}; using the checkpoint of step {found.step} instead", file=sys.stderr)
            return found
    if problems:
        raise UserError(f"no usable checkpoint in {run_dir}: {problems[0]}; restore it from a copy, or train again")
    return None


def newest_complete(run_dir: Path, *, at_most: int) -> list[Checkpoint]:
    """The newest complete checkpoints, newest first. Raises UserError if one of them is damaged."""
    return [_open(folder) for folder in list(_folders(run_dir).values())[:at_most]]


def read_while_training(run_dir: Path, read: Callable[[], _Read]) -> _Read:
    """What `read` returns; it reads checkpoints of `run_dir`, and begins again if training has meanwhile removed one.

    Raises what `read` does.
    """
    while True:
        before = _folders(run_dir)
        try:
            return read()
        except (UserError, OSError):
            if before.keys() <= _folders(run_dir).keys():
                raise


def copy(checkpoint: Checkpoint, run_dir: Path, *, weights_only: bool) -> None:
    """Copy a checkpoint into another run folder, without what only training needs if `weights_only`."""
    weights_only = weights_only or checkpoint.progress.weights_only
    folder = run_dir / CHECKPOINTS_DIR / checkpoint.folder.name
    folder.mkdir(parents=True)
    names = _files(checkpoint.progress.num_ranks, weights_only=weights_only)
    for name in names:
        shutil.copyfile(checkpoint.folder / name, folder / name)
    if weights_only:
        content = _read_json(folder / _PROGRESS) | {"weights_only": True, "cursor": {}}
        (folder / _PROGRESS).write_text(json.dumps(content))
    (folder / _COMPLETE).write_text(json.dumps({name: _digest(folder / name) for name in sorted(names)}))


def restore_weights(checkpoint: Checkpoint, model: nn.Module, *, new: str | None = None) -> None:
    """Load the model's weights in place. Raises UserError, naming the checkpoint, if they do not fit.

    new: a parameter that the checkpoint lacks, which stays as it is.
    """
    with _unless(f"the weights in {checkpoint.folder} do not fit this model", then=""):
        like, weights = model.state_dict(), checkpoint.model_weights()
        kept = {} if new is None else {new: like[new]}
        model.load_state_dict(kept | {name: like_parameter(value, like[name]) for name, value in weights.items()})


def restore_optimiser(checkpoint: Checkpoint, optimiser: torch.optim.Optimizer) -> None:
    """Load what the optimiser of training remembers, its learning rate apart, in place.

    The optimiser has the parameters of training in their order. Raises UserError if the checkpoint does not fit them,
    or was exported without it.
    """
    if checkpoint.progress.weights_only:
        raise UserError(
            f"{checkpoint.folder} was exported without its optimiser, so training cannot continue from it exactly; "
            "begin another run with its weights: train ... --from"
        )
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    content = optimiser.state_dict() | {"state": defaultdict(dict)}
    with _unless(f"{checkpoint.folder} does not hold what this run needs"):
        for key, value in _read_tensors(checkpoint.folder / _OPTIMISER).items():
            index, name = key.split("/")
            parameter = parameters[int(index)]
            if name != "step" and value.shape != parameter.shape:
                raise ValueError(f"{key} has shape {tuple(value.shape)}")
            content["state"][int(index)][name] = value if name == "step" else like_parameter(value, parameter)
        optimiser.load_state_dict(content)


@contextmanager
def _unless(problem: str, *, then: str = "; restore it") -> Iterator[None]:
    """Blame the checkpoint if loading it fails: ranks do not communicate within, so it can only be its content."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{problem} ({' '.join(str(error).split())[:200]}){then}") from error


def restore(
    checkpoint: Checkpoint, *, model: nn.Module, optimiser: torch.optim.Optimizer, fresh: State, world: World
) -> State:
    """Load weights, optimiser and random numbers in place; returns the state of this rank's rows.

    `fresh` is a state of this rank's rows, for structure, dtype and device. With the same number of ranks, all is
    bitwise as saved (law 7, exact resume). With another number, rows are dealt anew and the random numbers of dropout
    start from the seed. Raises UserError, naming the checkpoint, if its tensors do not fit this model, or if its state
    is that of another version.
    """
    restore_weights(checkpoint, model)
    restore_optimiser(checkpoint, optimiser)
    num_ranks = checkpoint.progress.num_ranks
    same = num_ranks == world.size
    ranks = [world.rank] if same else range(num_ranks)
    parts = [_read_tensors(checkpoint.folder / f"rank_{rank}.safetensors") for rank in ranks]
    names = sorted(name for name in parts[0] if name.startswith("state/"))
    if len(names) != len(state_tensors(fresh)):
        raise UserError(
            f"{checkpoint.folder} holds {len(names)} tensors of state and this version's model has "
            f"{len(state_tensors(fresh))}, so another version of waveform wrote it; it can be evaluated and sampled, "
            "but training cannot continue from it: train in another run folder"
        )
    saved = (torch.cat([part[name] for part in parts]) for name in names)

    def own_rows(like: Tensor) -> Tensor:
        rows = next(saved)
        if not same:
            rows = rows[world.rank * len(like) :][: len(like)]
        if rows.shape != like.shape:
            raise ValueError(f"a row's state has shape {tuple(rows.shape)}, not {tuple(like.shape)}")
        return rows.to(device=like.device, dtype=like.dtype)

    with _unless(f"{checkpoint.folder} does not hold what this run needs"):
        state = map_state(own_rows, fresh)
        if same:
            random = {name.removeprefix("random/"): value for name, value in parts[0].items() if name not in names}
            set_random_state(random, world.device)
    if not same and world.is_first:
        print(
            f"note: the number of processes was {num_ranks} and is {world.size}: weights and optimiser go on exactly, "
            "rows are divided anew, so results will no longer be bit-identical",
            file=sys.stderr,
        )
    return state
