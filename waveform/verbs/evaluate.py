"""`waveform evaluate`: NLL of a run on held-out audio."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from waveform.audio.audio_format import LOOKS_AHEAD, differences, format_of
from waveform.audio.corpus.prepare import DataConfig
from waveform.engine.evaluator import Evaluation
from waveform.engine.metrics import bits
from waveform.engine.token_set import TokenSet
from waveform.quality.measure import QualityConfig, measure_quality
from waveform.quality.report import describe as describe_quality
from waveform.ranks.distributed import World
from waveform.runs import scoring
from waveform.runs.configured_model import num_parameters
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions
from waveform.runs.settings import typed
from waveform.speech import Run, load, open_data, require_audio
from waveform.system.atomic import require_writable
from waveform.system.console import counted, printable, table
from waveform.system.errors import UserError
from waveform.system.output import write_json

UNLABELLED = "(unlabelled)"
_MOST_LABELS = 20  # rows of a table


def evaluate(
    run_dir: Path | str,
    options: EvaluateOptions | None = None,
    quality: QualityConfig | None = None,
    *,
    data: Path | str | None = None,
    split: str = "test",
    json_file: Path | str | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """NLL of a run on a split, in nats and bits per sample; prints it and returns (and writes) the figures.

    options.protocol: `utterance` (state is carried from each utterance's start), `chunk` (reset every train.chunk
    samples), `carry` or `clip` (waveform/engine/evaluator). A dynamic evaluation is reported separately as `dynamic`;
    the run on disk does not change. With quality.quality, samples are drawn and measured beside real clips and noise,
    as `quality`. Raises UserError as `load` does, and for clips that the data does not have.
    """
    require_writable(json_file, option="--json")
    options = options or EvaluateOptions()
    run = load(run_dir, device=device, **options.model_fields)
    require_clips(run, options.protocol)
    dynamic = options.dynamic_config(run)
    tokens = open_split(run, data=data, split=split, show_progress=show_progress)
    measured = None
    if quality is not None and quality.quality:  # first, because it may be refused
        others = open_split(run, data=data, split="train", show_progress=False)
        measured = measure_quality(
            [(run.name, run)], quality, held_out=tokens, others=others, show_progress=show_progress
        )
    result = scoring.score(run, tokens, protocol=options.protocol, show_progress=show_progress)
    figures = describe(run, result, split=split, tokens=tokens)
    if show_progress:
        beside = {"linear prediction alone": "linear_prediction", "unigram": "unigram"}
        known = {name: figures[f"{key}_nats_per_sample"] for name, key in beside.items()}
        print(
            f"{run.name}, step {run.step}, {split} split, state by {result.protocol}"
            f"{LOOKS_AHEAD if figures['looks_ahead'] else ''}: "
            f"{result.nats_per_token:.4f} nats = {bits(result.nats_per_token):.4f} bits per sample "
            f"({figures['num_samples']:,} samples of {counted(figures['num_utterances'], 'utterance')}"
            + "".join(f"; {name} {nats:.4f} nats" for name, nats in known.items() if nats is not None)
            + ")"
        )
        if "nll_by_label" in figures:
            print(format_by_label(figures["nll_by_label"]))
    if dynamic is not None:
        learned = scoring.score(run, tokens, protocol=options.protocol, dynamic=dynamic, show_progress=show_progress)
        apart = scoring.describe_dynamic(learned, dynamic, plain=result, unit="sample")
        figures["dynamic"] = apart
        if show_progress:
            print(
                f"dynamic, {apart['optimiser']} at {apart['lr']:g}: {learned.nats_per_token:.4f} nats = "
                f"{learned.bits_per_token:.4f} bits per sample ({apart['difference_to_plain_nats']:+.4f} nats)"
            )
    if measured is not None:
        figures["quality"] = measured.as_json()
        if show_progress:
            print(describe_quality(measured))
    write_json(json_file, figures)
    return figures


def open_split(run: Run, *, data: Path | str | None, split: str, show_progress: bool = True) -> TokenSet:
    """The tokens of a split of the run's own data set, or of another (prepared first if it is raw audio).

    Raises UserError for a damaged shard, which it names, and if the data is gone or of another kind.
    """
    if data is None:
        return scoring.own_tokens(run, split=split)
    data = Path(data)
    if not data.exists():
        raise UserError(f"no such folder: --data {data}")
    config: DataConfig = typed(DataConfig, run.config["data"], section="data")
    # Labels are a data set's own, of raw audio none; how many processes run is not for a run to say.
    config = replace(config, **vars(run.audio_format), labels=None, num_workers=None)
    try:
        dataset = open_data(data, run_dir=run.given, config=config, world=World(), show_progress=show_progress)
    except UserError as error:
        if "data." not in str(error):
            raise
        raise type(error)(
            f"{error}; give settings to `waveform prepare {data} DATA_DIR`, and then --data DATA_DIR"
        ) from error
    require_audio(dataset.modality, data)
    if different := differences(run.audio_format, format_of(dataset.modality)):
        raise UserError(f"--data {data} has different tokens from those that {run.given} was trained on: {different}")
    tokens = dataset.open_split(split)
    tokens.verify()
    return tokens


def require_clips(run: Run, protocol: str | None) -> None:
    """Raises UserError if the protocol is `clip` and the run's data is not cut into clips."""
    if protocol == "clip" and run.audio_format.piece_samples is None:
        raise UserError(
            f"--protocol clip is for data that is cut into clips, and that of {run.given} is not; use utterance, or "
            "prepare with data.piece_samples=N and train on that"
        )


def describe(run: TrainedRun, result: Evaluation, *, split: str, tokens: TokenSet) -> dict[str, Any]:
    """What `evaluate --json` writes of the result of a run on `tokens`."""
    by_label = scoring.nll_by_label(result, tokens, unit="sample")
    return {
        "model": run.name,
        "run": str(run.given),
        "split": split,
        "sample_rate_hz": run.config["dataset"]["modality"]["sample_rate_hz"],
        "looks_ahead": format_of(run.config["dataset"]["modality"]).looks_ahead,
        "protocol": result.protocol,
        "chunk": run.config["train"]["chunk"] if result.protocol == "chunk" else None,
        "nll_nats_per_sample": result.nats_per_token,
        "nll_bits_per_sample": result.bits_per_token,
        "unigram_nats_per_sample": scoring.unigram_nats(run, tokens),
        "linear_prediction_nats_per_sample": scoring.linear_prediction_nats(run, tokens, protocol=result.protocol),
        "prediction": run.config["model"].get("prediction", "none"),
        "num_samples": int(result.counts.sum()),
        "num_utterances": len(result.names),
        "num_parameters": num_parameters(run.model),
        "step": run.step,
        "train_seconds": run.train_seconds,
        "train_samples_seen": run.tokens_seen,
        "data_checksum": tokens.checksum,
        "model_config": dict(run.config["model"]),
        **({"nll_by_label": by_label} if by_label else {}),
    }


def by_label_rows(entries: Sequence[Sequence[dict[str, Any]]]) -> list[list[str]]:
    """Rows of a table, at most 20: label, number of utterances, and the nats of each of several runs."""
    rows = [
        [
            UNLABELLED if of_runs[0]["label"] is None else printable(of_runs[0]["label"]),
            str(of_runs[0]["num_utterances"]),
            *(f"{entry['nll_nats_per_sample']:.4f}" for entry in of_runs),
        ]
        for of_runs in zip(*entries, strict=True)
    ]
    if len(rows) > _MOST_LABELS:
        more = f"({len(rows) - _MOST_LABELS} more labels: --json)"
        rows = [*rows[:_MOST_LABELS], [more, *[""] * (len(rows[0]) - 1)]]
    return rows


def format_by_label(entries: Sequence[dict[str, Any]]) -> str:
    """The NLL of each label as a table, at most 20 of them."""
    return "\n".join(table(["label", "utterances", "nats/sample"], by_label_rows([entries])))
