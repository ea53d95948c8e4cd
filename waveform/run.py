"""Run folders: training into one, evaluating and sampling from one. The functions behind the verbs.

config.yaml  metrics.jsonl  tensorboard/  checkpoints/step_N/
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from waveform.audio.corpus import DataConfig, prepare
from waveform.audio.files import SAMPLE_RATE_HZ, WavWriter, read_audio, resample_blocks
from waveform.audio.mulaw import decode, encode
from waveform.config import compose_config, differing_keys, to_yaml, typed
from waveform.engine import checkpoint
from waveform.engine.atomic import explain_write_errors, write_file
from waveform.engine.distributed import World, join, leave
from waveform.engine.errors import UserError
from waveform.engine.evaluator import Evaluation
from waveform.engine.evaluator import evaluate as evaluate_tokens
from waveform.engine.interface import SequenceModel
from waveform.engine.metrics import MetricsLog, bits, unigram_nll
from waveform.engine.progress import Progress
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.shards import Dataset, TokenSet, is_dataset, read_dataset
from waveform.engine.trainer import TrainConfig, Trainer, TrainResult
from waveform.models.registry import build

CONFIG_FILE = "config.yaml"
# They end a run earlier or later but change no step of it (where the cosine does not depend on them).
_BUDGET_KEYS = ("max_steps", "max_seconds")


def _model_from(config: dict[str, Any]) -> SequenceModel:
    fields = {key: value for key, value in config["model"].items() if key != "name"}
    return build(config["model"]["name"], vocab_size=config["dataset"]["vocab_size"], **fields)


def _window(config: dict[str, Any]) -> int:
    """Tokens of one forward: train.window, or the model's own window, or the chunk."""
    train = config["train"]
    return int(train["window"] or config["model"].get("window") or train["chunk"])


def open_data(source: Path, *, beside: Path, config: DataConfig, world: World, show_progress: bool = True) -> Dataset:
    """The data set at `source`; raw audio is first prepared into a folder beside `beside` (the run), which it names.

    Raises UserError as `prepare` does.
    """
    if is_dataset(source):
        return read_dataset(source)
    resolved = source.resolve()
    name = f"{resolved.name}-{hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()}.prepared"
    cache = beside.absolute().parent / name
    if world.is_first:
        if show_progress:
            print(f"preparing {source} into {cache} (once; later runs reuse it)")
        prepare(source, cache, config=config, show_progress=show_progress)
    world.barrier()
    return read_dataset(cache)


@contextmanager
def _locked(run_dir: Path, world: World) -> Iterator[None]:
    """Refuse a second training process on one run folder; a dead process holds no lock."""
    if not world.is_first:
        yield
        return
    path = run_dir / ".train.lock"
    with explain_write_errors(path), open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {run_dir}; wait for it, or give another --run") from None
        yield


def train(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on `source` (a folder of audio, or a prepared data set) into `run_dir`; resumes what is there.

    overrides: `key=value` settings. Under torchrun every process calls this. Raises UserError for bad settings or
    data, for a run folder of another configuration, and where the loss stops being finite.
    """
    source, run_dir = Path(source), Path(run_dir)
    config = compose_config(overrides, config_dir=config_dir)
    train_config: TrainConfig = typed(TrainConfig, config["train"], section="train")
    world = join(device=train_config.device)
    try:
        return _train(source, run_dir, config, train_config, world=world, show_progress=show_progress)
    finally:
        leave()


def _train(
    source: Path, run_dir: Path, config: dict[str, Any], train_config: TrainConfig, *, world: World, show_progress: bool
) -> TrainResult:
    if not source.exists():
        raise UserError(f"no such folder: {source}; give a folder of audio or a prepared data set")
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run {run_dir} is a file; give a folder")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / CONFIG_FILE).exists():
        unknown = [path.name for path in run_dir.iterdir() if path.name != ".train.lock"]
        if unknown:
            raise UserError(f"--run {run_dir} holds other files ({unknown[0]}, ...) and no run; give a new folder")
    _model_from({**config, "dataset": {"vocab_size": 256}})  # refuses bad fields before any data is prepared
    data_config: DataConfig = typed(DataConfig, config["data"], section="data")
    data = open_data(source, beside=run_dir, config=data_config, world=world, show_progress=show_progress)
    splits = {split: data.open_split(split) for split in ("train", "valid", "test")}
    config["dataset"] = {
        "path": str(data.folder.resolve()),
        "vocab_size": data.vocab_size,
        "modality": data.modality,
        "checksums": {split: tokens.checksum for split, tokens in splits.items()},
    }
    if world.is_first:
        _claim(run_dir, config)
    world.barrier()
    torch.manual_seed(config["seed"] + world.rank)
    with _locked(run_dir, world):
        model = _model_from(config)
        trainer = Trainer(
            model,
            train_config,
            train=splits["train"],
            valid=splits["valid"],
            run_dir=run_dir,
            window=_window(config),
            seed=config["seed"],
            world=world,
            units_per_second=data.modality.get("sample_rate_hz"),
            on_evaluate=_audio_summary(train_config, data) if data.modality.get("kind") == "audio" else None,
            show_progress=show_progress,
        )
        if show_progress and world.is_first:
            print(
                f"training {config['model']['name']} ({num_parameters(model):,} parameters, preset {config['preset']}) "
                f"on {splits['train'].num_tokens / data.modality.get('sample_rate_hz', 1) / 60:.1f} minutes of audio, "
                f"{world.size} x {world.device.type}, into {run_dir}",
                flush=True,
            )
        return trainer.run()


def num_parameters(model: SequenceModel) -> int:
    """Trainable numbers in a model."""
    assert isinstance(model, nn.Module)
    return sum(parameter.numel() for parameter in model.parameters())


def _claim(run_dir: Path, config: dict[str, Any]) -> None:
    """Write config.yaml into a new run folder, or refuse a folder of another configuration."""
    path = run_dir / CONFIG_FILE
    if path.exists():
        old = read_config(run_dir)
        compared = [
            {**c, "train": {k: v for k, v in c["train"].items() if k not in _BUDGET_KEYS}} for c in (old, config)
        ]
        different = differing_keys(*compared)
        if different:
            raise UserError(
                f"{run_dir} holds a run of another configuration: {'; '.join(different)}. "
                "Give another --run, or the settings of that run to resume it"
            )
        if old == config:
            return
    with explain_write_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    write_file(path, to_yaml(config).encode())


def _audio_summary(config: TrainConfig, data: Dataset) -> Any:
    """A hook that puts one generated sample, heard and seen, into TensorBoard at each evaluation."""
    if config.sample_seconds <= 0:
        return None

    def summarise(model: SequenceModel, step: int, log: MetricsLog) -> None:
        from waveform.audio.plots import mel_image

        num_steps = int(config.sample_seconds * SAMPLE_RATE_HZ)
        tokens = sample_tokens(
            model, vocab_size=data.vocab_size, num_streams=1, num_steps=num_steps, config=SamplingConfig()
        )
        samples = decode(tokens[0].to(torch.uint8))
        log.tensorboard.add_audio("sample", samples, step, sample_rate=SAMPLE_RATE_HZ)
        log.tensorboard.add_image("sample/mel", mel_image(samples.numpy()), step, dataformats="HWC")

    return summarise


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
        return _window(self.config)

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device  # type: ignore[attr-defined]

    @property
    def autocast(self) -> torch.dtype | None:
        """dtype of matrix products on this device, as in training."""
        config: TrainConfig = typed(TrainConfig, self.config["train"], section="train")
        return config.autocast(self.device)

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
        if num < 1:
            raise UserError(f"num is {num}; it must be at least 1")
        num_steps = round(seconds * SAMPLE_RATE_HZ) if np.isfinite(seconds) else 0
        if num_steps < 1:
            raise UserError(f"seconds is {seconds}; it must be above 0")
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


def load(run_dir: Path | str, *, device: str | None = None, **model_fields: int) -> Run:
    """Open the newest checkpoint of a run for `nll` and `sample`.

    device: cpu, cuda, or None for a GPU where there is one. model_fields: fields that change no parameter, such as a
    longer `memory` or `compressed` than in training. Raises UserError where there is no run or no whole checkpoint.
    """
    run_dir = Path(run_dir)
    config = read_config(run_dir)
    for field, value in model_fields.items():
        if field not in config["model"]:
            raise UserError(f"model {config['model']['name']!r} of {run_dir} has no {field!r} to set to {value}")
        config["model"][field] = value
    found = checkpoint.newest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} has no finished checkpoint yet; train longer, or wait for the first one")
    model = _model_from(config)
    assert isinstance(model, nn.Module)
    weights = found.model_weights()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        raise UserError(f"the weights in {found.folder} do not fit {run_dir / CONFIG_FILE}; was it edited?")
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Run(
        folder=run_dir,
        config=config,
        model=model.to(device),
        step=found.step,
        train_seconds=float(found.progress["seconds"]),
        tokens_seen=int(found.progress["tokens_seen"]),
    )


def test_tokens(run: Run, *, data: Path | None, split: str) -> TokenSet:
    """The tokens of a split of the run's own data set, or of another (prepared first, where it is raw audio)."""
    if data is None:
        folder = Path(run.config["dataset"]["path"])
        if not is_dataset(folder):
            raise UserError(f"the data set of {run.folder}, {folder}, is gone; name one with --data")
        tokens = read_dataset(folder).open_split(split)
        known = run.config["dataset"]["checksums"].get(split)
        if known != tokens.checksum:
            print(
                f"warning: the {split} data of {folder} changed since {run.folder} was trained; files that it trained "
                "on may be among them",
                file=sys.stderr,
            )
        return tokens
    if not data.exists():
        raise UserError(f"no such folder: --data {data}")
    config: DataConfig = typed(DataConfig, run.config["data"], section="data")
    dataset = open_data(data, beside=run.folder, config=config, world=World())
    if (
        dataset.vocab_size != run.config["dataset"]["vocab_size"]
        or dataset.modality != run.config["dataset"]["modality"]
    ):
        raise UserError(f"--data {data} holds other tokens ({dataset.modality}) than {run.folder} was trained on")
    return dataset.open_split(split)


def _protocol(run: Run, asked: str | None) -> str:
    return asked or ("chunk" if run.config["train"]["state"] == "chunk" else "utterance")


def score(
    run: Run, tokens: TokenSet, *, protocol: str, batch_size: int | None = None, show_progress: bool = True
) -> Evaluation:
    """NLL of each utterance of `tokens` under `run`."""
    total = tokens.num_tokens
    label = f"evaluate {run.name}"
    with Progress(label, total=total, unit="token", enabled=show_progress) as progress:
        return evaluate_tokens(
            run.model,
            tokens,
            window=run.window,
            batch_size=batch_size or run.config["train"]["evaluate_batch_size"],
            protocol=protocol,
            chunk=run.config["train"]["chunk"],
            world=World(device=run.device),
            autocast=run.autocast,
            progress=progress,
        )


def describe(run: Run, result: Evaluation, *, split: str, checksum: str, unigram: float | None) -> dict[str, Any]:
    """What `evaluate --json` writes."""
    return {
        "model": run.name,
        "run": str(run.folder),
        "split": split,
        "protocol": result.protocol,
        "nll_nats_per_sample": result.nats_per_token,
        "nll_bits_per_sample": result.bits_per_token,
        "unigram_nats_per_sample": unigram,
        "num_samples": int(result.counts.sum()),
        "num_utterances": len(result.names),
        "num_parameters": num_parameters(run.model),
        "step": run.step,
        "train_seconds": run.train_seconds,
        "train_samples_seen": run.tokens_seen,
        "data_checksum": checksum,
        "model_config": dict(run.config["model"]),
    }


def unigram_nats(run: Run, tokens: TokenSet) -> float | None:
    """NLL per token of the training histogram on `tokens`; None where the training data is gone."""
    folder = Path(run.config["dataset"]["path"])
    if not is_dataset(folder):
        return None
    return unigram_nll(read_dataset(folder).open_split("train").counts, tokens.counts)


def evaluate(
    run_dir: Path | str,
    *,
    data: Path | None = None,
    split: str = "test",
    protocol: str | None = None,
    json_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
    **model_fields: int,
) -> dict[str, Any]:
    """NLL of a run on a split, in nats and bits per sample; prints it and returns (and writes) the figures.

    protocol: `utterance` (state carried from each utterance's start), `chunk` (reset every train.chunk samples), or
    None for what the run was trained with. model_fields: a longer `memory` or `compressed`. Raises UserError as `load`.
    """
    run = load(run_dir, device=device, **model_fields)
    tokens = test_tokens(run, data=data, split=split)
    result = score(run, tokens, protocol=_protocol(run, protocol), show_progress=show_progress)
    figures = describe(run, result, split=split, checksum=tokens.checksum, unigram=unigram_nats(run, tokens))
    if show_progress:
        unigram = figures["unigram_nats_per_sample"]
        print(
            f"{run.name}, step {run.step}, {split} split, state by {result.protocol}: "
            f"{result.nats_per_token:.4f} nats = {bits(result.nats_per_token):.4f} bits per sample "
            f"({figures['num_samples']:,} samples of {figures['num_utterances']} utterances"
            + (f"; unigram {unigram:.4f} nats)" if unigram is not None else ")")
        )
    write_json(json_file, figures)
    return figures


def write_json(path: Path | None, content: Any) -> None:
    """Write `content` as indented JSON; does nothing for None."""
    if path is not None:
        write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def sample(
    run_dir: Path | str,
    out_dir: Path | str,
    *,
    num: int = 1,
    seconds: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    prime: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[Path]:
    """Write `num` WAV files of generated audio into `out_dir`, growing as they are made; returns their paths.

    With `prime`, an audio file, each WAV begins with it and continues it for `seconds`. Files are named by model,
    step, seed and number, and none that exists is overwritten. Raises UserError as `load` does, and for a full disk.
    """
    out_dir = Path(out_dir)
    run = load(run_dir, device=device)
    primer = read_audio(prime) if prime is not None else None
    paths = [out_dir / f"{run.name}_step{run.step}_seed{seed}_{i}.wav" for i in range(num)]
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists; give another --out or --seed, or move it away")
    with explain_write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    writers = [WavWriter(path) for path in paths]
    try:
        if primer is not None:
            for writer in writers:
                writer.append(primer)
        with Progress("sample", total=num * seconds, unit="s of audio", enabled=show_progress) as progress:

            def write(block: np.ndarray) -> None:
                for writer, samples in zip(writers, block, strict=True):
                    writer.append(samples)
                progress.update(block.size / SAMPLE_RATE_HZ)

            run.sample(
                num=num,
                seconds=seconds,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                prime=primer,
                on_block=write,
            )
    finally:
        for writer in writers:
            writer.close()
    if show_progress:
        for path in paths:
            print(path)
    return paths
