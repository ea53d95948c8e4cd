"""`waveform evaluate`: NLL of a run on held-out audio."""

from pathlib import Path
from typing import Any

from waveform.audio.corpus.prepare import DataConfig
from waveform.engine.dynamic import DynamicConfig
from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import bits
from waveform.engine.shards import TokenSet
from waveform.ranks.distributed import World
from waveform.runs import evaluation
from waveform.runs.folder import num_parameters
from waveform.runs.settings import typed
from waveform.speech import Run, load, open_data
from waveform.system.atomic import require_writable
from waveform.system.errors import UserError


def evaluate(
    run_dir: Path | str,
    *,
    data: Path | str | None = None,
    split: str = "test",
    protocol: str | None = None,
    dynamic: bool = False,
    dynamic_optimiser: str = "sgd",
    dynamic_lr: float | None = None,
    json_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
    **model_fields: int,
) -> dict[str, Any]:
    """NLL of a run on a split, in nats and bits per sample; prints it and returns (and writes) the figures.

    protocol: `utterance` (state carried from each utterance's start), `chunk` (reset every train.chunk samples), or
    None for what the run was trained with. model_fields: a longer `memory` or `compressed`. dynamic: score again,
    learning on the way by `dynamic_optimiser` at `dynamic_lr` (see `DynamicConfig`), reported apart as `dynamic`; the
    run itself stays as it is. Raises UserError as `load`.
    """
    require_writable(json_file, option="--json")
    run = load(run_dir, device=device, **model_fields)
    dynamic_config = evaluation.dynamic_config(run, optimiser=dynamic_optimiser, lr=dynamic_lr) if dynamic else None
    tokens = test_tokens(run, data=data, split=split, show_progress=show_progress)
    result = score(run, tokens, protocol=_protocol(run, protocol), show_progress=show_progress)
    figures = describe(run, result, split=split, checksum=tokens.checksum, unigram=evaluation.unigram_nats(run, tokens))
    if show_progress:
        unigram = figures["unigram_nats_per_sample"]
        print(
            f"{run.name}, step {run.step}, {split} split, state by {result.protocol}: "
            f"{result.nats_per_token:.4f} nats = {bits(result.nats_per_token):.4f} bits per sample "
            f"({figures['num_samples']:,} samples of {figures['num_utterances']} utterances"
            + (f"; unigram {unigram:.4f} nats)" if unigram is not None else ")")
        )
    if dynamic_config is not None:
        learned = score(
            run, tokens, protocol=_protocol(run, protocol), dynamic=dynamic_config, show_progress=show_progress
        )
        apart = evaluation.describe_dynamic(learned, dynamic_config, plain=result, unit="sample")
        figures["dynamic"] = apart
        if show_progress:
            print(
                f"dynamic, {apart['optimiser']} at {apart['lr']:g}: {learned.nats_per_token:.4f} nats = "
                f"{learned.bits_per_token:.4f} bits per sample ({apart['difference_to_plain_nats']:+.4f} nats)"
            )
    evaluation.write_json(json_file, figures)
    return figures


def test_tokens(run: Run, *, data: Path | str | None, split: str, show_progress: bool = True) -> TokenSet:
    """The tokens of a split of the run's own data set, or of another (prepared first, where it is raw audio).

    Raises UserError for a damaged shard, which it names, and where the data is gone or of another kind.
    """
    if data is None:
        return evaluation.own_tokens(run, split=split)
    data = Path(data)
    if not data.exists():
        raise UserError(f"no such folder: --data {data}")
    config: DataConfig = typed(DataConfig, run.config["data"], section="data")
    dataset = open_data(data, beside=run.folder, config=config, world=World(), show_progress=show_progress)
    if (
        dataset.vocab_size != run.config["dataset"]["vocab_size"]
        or dataset.modality != run.config["dataset"]["modality"]
    ):
        raise UserError(f"--data {data} holds other tokens ({dataset.modality}) than {run.folder} was trained on")
    tokens = dataset.open_split(split)
    tokens.verify()
    return tokens


def _protocol(run: Run, asked: str | None) -> str:
    return asked or ("chunk" if run.config["train"]["state"] == "chunk" else "utterance")


def score(
    run: Run,
    tokens: TokenSet,
    *,
    protocol: str,
    dynamic: DynamicConfig | None = None,
    show_progress: bool = True,
) -> Evaluation:
    """NLL of each utterance of `tokens` under `run`, in fp32 on every device; `dynamic`: as in `evaluation.score`."""
    rate_hz = run.config["dataset"]["modality"]["sample_rate_hz"]
    return evaluation.score(
        run,
        tokens,
        protocol=protocol,
        unit="sample",
        unit_s=1 / rate_hz,
        dynamic=dynamic,
        show_progress=show_progress,
    )


def describe(run: Run, result: Evaluation, *, split: str, checksum: str, unigram: float | None) -> dict[str, Any]:
    """What `evaluate --json` writes."""
    return {
        "model": run.name,
        "run": str(run.folder),
        "split": split,
        "protocol": result.protocol,
        "chunk": run.config["train"]["chunk"] if result.protocol == "chunk" else None,
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
