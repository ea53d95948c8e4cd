"""Run folders: what a run was made with, its data, and its trained model opened for NLL and sampling.

config.yaml  metrics.jsonl  tensorboard/  checkpoints/step_N/
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from waveform.audio.corpus import DataConfig, prepare
from waveform.audio.files import SAMPLE_RATE_HZ, resample_blocks
from waveform.audio.mulaw import decode, encode
from waveform.engine import checkpoint
from waveform.engine.distributed import World, choose_device
from waveform.engine.errors import UserError
from waveform.engine.interface import SequenceModel
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.shards import Dataset, is_dataset, read_dataset
from waveform.models.registry import build

CONFIG_FILE = "config.yaml"


def model_from(config: dict[str, Any]) -> SequenceModel:
    fields = {key: value for key, value in config["model"].items() if key != "name"}
    return build(config["model"]["name"], vocab_size=config["dataset"]["vocab_size"], **fields)


def window_of(config: dict[str, Any]) -> int:
    """Tokens of one forward: train.window, or the model's own window, or the chunk."""
    train = config["train"]
    return int(train["window"] or config["model"].get("window") or train["chunk"])


def num_parameters(model: SequenceModel) -> int:
    """Trainable numbers in a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def cache_of(source: Path, *, beside: Path) -> Path:
    """Where the data set of a folder of raw audio is kept: beside the run `beside`, by the folder's name and place."""
    resolved = source.resolve()
    name = f"{resolved.name}-{hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()}.prepared"
    return beside.absolute().parent / name


def open_data(source: Path, *, beside: Path, config: DataConfig, world: World, show_progress: bool = True) -> Dataset:
    """The data set at `source`; raw audio is first prepared into a folder beside `beside` (the run), which it names.

    Raises UserError as `prepare` does.
    """
    if is_dataset(source):
        return read_dataset(source)
    cache = cache_of(source, beside=beside)
    if world.is_first:
        if show_progress:
            print(f"preparing {source} into {cache} (once; later runs reuse it)")
        prepare(source, cache, config=config, show_progress=show_progress)
    world.barrier()
    return read_dataset(cache)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run. Raises UserError where `run_dir` is no run or config.yaml is damaged."""
    path = run_dir / CONFIG_FILE
    if not run_dir.is_dir():
        raise UserError(f"no such run folder: {run_dir}; `waveform train ... --run {run_dir}` makes one")
    if not path.is_file():
        raise UserError(f"{run_dir} is no run (it has no {CONFIG_FILE}); give the folder that --run named in training")
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(config, dict):
            raise ValueError("it is not a mapping")
        for section, key in (("model", "name"), ("train", "chunk"), ("dataset", "vocab_size")):
            if key not in config[section]:
                raise ValueError(f"{section}.{key} is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}; restore it from a copy") from error
    except Exception as error:  # whatever a YAML parser raises
        raise UserError(f"{path} is no readable YAML: {' '.join(str(error).split())}") from error
    return {str(key): value for key, value in config.items()}


@dataclass
class Run:
    """A trained run, opened: its model in evaluation mode, and what it was trained with."""

    folder: Path
    config: dict[str, Any]
    model: SequenceModel
    step: int
    train_seconds: float
    tokens_seen: int

    @property
    def name(self) -> str:
        """The registered name of its model."""
        return str(self.config["model"]["name"])

    @property
    def window(self) -> int:
        """Tokens of one forward pass."""
        return window_of(self.config)

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def nll(self, audio: np.ndarray | Tensor, *, sample_rate_hz: int) -> np.ndarray:
        """NLL in nats of each 24 kHz sample of one utterance.

        audio: mono [n], floats in [-1, 1], at `sample_rate_hz` (resampled to 24 kHz where it differs). Returns [n'],
        fp32, n' samples at 24 kHz. Raises UserError for other shapes or values that are not finite.
        """
        samples = np.asarray(audio, dtype=np.float32)
        if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
            raise UserError(f"audio of shape {samples.shape}: give finite mono samples [n], n at least 1")
        samples = np.concatenate(list(resample_blocks([samples], sample_rate_hz=sample_rate_hz)))
        tokens = encode(torch.from_numpy(samples)).to(torch.int64)
        vocab_size = int(self.config["dataset"]["vocab_size"])
        inputs = torch.cat([torch.tensor([vocab_size]), tokens[:-1]])
        state = self.model.init_state(1, device=self.device, dtype=torch.float32)
        parts = []
        with torch.inference_mode():
            for x, y in zip(inputs.split(self.window), tokens.split(self.window), strict=True):
                step = self.model.forward(x[None].to(self.device), state)
                state = step.state
                parts.append(self.model.head.nll(step.hidden, y[None].to(self.device))[0].cpu())
        return torch.cat(parts).numpy()

    def sample(
        self,
        *,
        num: int = 1,
        seconds: float = 1.0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        prime: np.ndarray | Tensor | None = None,
        on_block: Any = None,
    ) -> np.ndarray:
        """Generate audio [num, seconds x 24000], fp32 in [-1, 1].

        prime: mono audio [n] at 24 kHz that every sample continues (not part of the result). on_block is called with
        [num, n] samples as they come. Raises UserError for settings out of range.
        """
        num_steps = check_amount(num, seconds)
        config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        prompt = None if prime is None else encode(torch.as_tensor(np.asarray(prime, dtype=np.float32)))
        tokens = sample_tokens(
            self.model,
            vocab_size=int(self.config["dataset"]["vocab_size"]),
            num_streams=num,
            num_steps=num_steps,
            config=config,
            prompt=prompt,
            on_block=None if on_block is None else lambda block: on_block(decode(block.to(torch.uint8)).numpy()),
        )
        return decode(tokens.to(torch.uint8)).numpy()


def check_amount(num: int, seconds: float) -> int:
    """Steps of one of `num` samples of `seconds`. Raises UserError for nothing at all."""
    if num < 1:
        raise UserError(f"num is {num}; it must be at least 1")
    num_steps = round(seconds * SAMPLE_RATE_HZ) if np.isfinite(seconds) else 0
    if num_steps < 1:
        raise UserError(f"seconds is {seconds}; it must be above 0")
    return num_steps


def load(run_dir: Path | str, *, device: str | None = None, **model_fields: int) -> Run:
    """Open the newest checkpoint of a run for `nll` and `sample`.

    device: cpu, cuda, or None for a GPU where there is one. model_fields: fields that change no parameter, such as a
    longer `memory` or `compressed` than in training. Raises UserError where there is no run or no whole checkpoint.
    """
    run_dir = Path(run_dir)
    config = read_config(run_dir)
    device = choose_device(device)
    for field, value in model_fields.items():
        if field not in config["model"]:
            raise UserError(f"model {config['model']['name']!r} of {run_dir} has no {field!r} to set to {value}")
        config["model"][field] = value
    found = checkpoint.newest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} has no finished checkpoint yet; train longer, or wait for the first one")
    model = model_from(config)
    assert isinstance(model, nn.Module)
    weights = found.model_weights()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        raise UserError(f"the weights in {found.folder} do not fit {run_dir / CONFIG_FILE}; was it edited?")
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    return Run(
        folder=run_dir,
        config=config,
        model=model.to(device),
        step=found.step,
        train_seconds=float(found.progress["seconds"]),
        tokens_seen=int(found.progress["tokens_seen"]),
    )
