"""`python -m recipes evaluate`: a run's metrics on held-out text."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recipes.corpora.catalogue import find_recipe
from recipes.corpora.episodes import is_recall, read_distances, require_recall
from recipes.metrics import UNITS, frequency_bucket, recall_metrics, text_metrics
from recipes.plots import Curve, save_recall
from recipes.reinforcement.settings import is_agent
from recipes.sliding import evaluate_sliding
from recipes.text import load
from recipes.verbs.agents import AgentEvaluation, Playing, evaluate_agents
from waveform.engine.dataset import DATASET_FILE, Dataset, read_dataset
from waveform.engine.evaluator import Classes, Evaluation
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import SCORING_TIMEOUT_S, World, job
from waveform.runs.averaging import average_weights
from waveform.runs.configured_model import num_parameters
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import EvaluateOptions, describe_dynamic, own_tokens, score
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json


def evaluate(
    run_dir: Path | str,
    options: EvaluateOptions | None = None,
    playing: Playing | None = None,
    *,
    split: str = "test",
    json_file: Path | str | None = None,
    plot_file: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Print the recipe's metrics of a run on a split; return (and write) the figures, and draw those of recall.

    options.rows: cut the split into so many pieces, to score them side by side. options.protocol: None resets state as
    in training (`train.state`); `carry` never resets it, from the first document to the last. A dynamic evaluation is
    reported separately as `dynamic`. Under torchrun every process calls this and scores its share of the documents or
    pieces. An agent plays in one process; of `options` it knows the model's memories. Raises UserError if there is no
    complete run, if its data is gone, and if there is nothing to draw.
    """
    options, playing = options or EvaluateOptions(), playing or Playing()
    check_files(json_file=json_file, plot_file=plot_file)
    if is_agent(run_dir):
        chosen = AgentEvaluation(options, playing, split=split, plot_file=plot_file, device=device)
        return evaluate_agents([run_dir], chosen, json_file=json_file, show_progress=show_progress)[0]
    playing.refuse()
    with job(device=device, timeout_s=SCORING_TIMEOUT_S) as world:
        run = load(run_dir, device=world.device.type, **options.model_fields)
        if plot_file is not None:
            require_recall(run)
        shown = show_progress and world.is_first
        figures = measure(run, options, split=split, world=world, show_progress=shown).figures
        if world.is_first:
            if show_progress:
                print(describe(figures))
            write_json(json_file, figures)
            if plot_file is not None:
                save_recall(plot_file, [("recall", [Curve(figures["model"], [figures])])])
        return figures


class Measurement(NamedTuple):
    """A run's evaluation: what `evaluate --json` writes, and the NLL of each document."""

    figures: dict[str, Any]
    result: Evaluation


def measure(
    run: TrainedRun, options: EvaluateOptions, *, split: str, world: World, show_progress: bool = True
) -> Measurement:
    """Evaluate a run on a split of its own data set.

    Raises UserError if the data is gone, or if there are not as many checkpoints as options.average.
    """
    if options.average != 1:
        average_weights(run, options.average)
    modality = run.config["dataset"]["modality"]
    recipe = find_recipe(modality["recipe"])
    tokens = own_tokens(run, split=split)
    data = read_dataset(Path(run.config["dataset"]["path"]))
    checksum, num_documents = tokens.checksum, len(tokens)
    rows, dynamic = options.rows, options.dynamic_config(run)
    metrics_of: Callable[[Evaluation], dict[str, Any]]
    classes: Classes | None = None
    sizes: dict[str, Any] = {}
    if is_recall(run):
        classes = read_distances(data, split)
        metrics_of = partial(recall_metrics, chance_bits=modality["chance_bits"])
    else:
        num_bytes, num_words = _sizes(data, split)
        words_are = data.sources.get("words_are")
        if isinstance(words_are, dict):  # by split; earlier versions wrote one text for all
            words_are = words_are.get(split)
        if options.published_words:
            if split not in recipe.num_words:
                raise UserError(
                    f"the words of {recipe.name}'s {split} split were not published; leave --published-words out"
                )
            num_words, words_are = recipe.num_words[split], f"as published; this text has {num_words:,}"
        metrics_of = partial(
            text_metrics, recipe=recipe, tokens=modality["tokens"], num_bytes=num_bytes, num_words=num_words
        )
        sizes = {"num_bytes": num_bytes, "num_words": num_words, "words_are": str(words_are)}
        if modality["tokens"] == "words":
            classes = frequency_bucket(data.open_split("train").counts)
    protocol = protocol_of(run, options)
    if rows is not None:
        length = _piece_length(tokens, rows)
        tokens = tokens.cut(length)
        classes = classes.cut(length) if isinstance(classes, TokenSet) else classes
    if options.stride is None:
        result = score(run, tokens, protocol=protocol, world=world, classes=classes, show_progress=show_progress)
    else:
        if isinstance(classes, TokenSet):
            raise UserError("--stride does not score recall; leave it out")
        result = evaluate_sliding(
            run, tokens, stride=options.stride, world=world, classes=classes, show_progress=show_progress
        )
    metrics = metrics_of(result)
    headline = recipe.headline
    separate = {}
    if dynamic is not None:
        learned = score(
            run,
            tokens,
            protocol=protocol,
            world=world,
            classes=classes,
            dynamic=dynamic,
            show_progress=show_progress,
        )
        separate["dynamic"] = {
            **describe_dynamic(learned, dynamic, plain=result, unit="token"),
            **metrics_of(learned),
        }
    figures = {
        "recipe": modality["recipe"],
        "model": run.name,
        "run": str(run.given),
        "split": split,
        "headline": headline,
        headline: metrics[headline],
        **{name: value for name, value in metrics.items() if name != headline},
        "num_tokens": int(result.counts.sum()),
        **sizes,
        "published_corpus": data.sources.get("checked") is True,
        "num_documents": num_documents,
        "rows": rows,
        "stride": options.stride,
        "state": f"reset at the start of {len(tokens)} pieces" if rows else f"by {result.protocol}",
        "memory": run.config["model"].get("memory"),
        "compressed": run.config["model"].get("compressed"),
        "num_parameters": num_parameters(run.model),
        "step": run.step,
        "averaged_checkpoints": options.average,
        "train_seconds": run.train_seconds,
        "train_tokens_seen": run.tokens_seen,
        "data_checksum": checksum,
        "model_config": dict(run.config["model"]),
        **separate,
    }
    return Measurement(figures, result)


def protocol_of(run: TrainedRun, options: EvaluateOptions) -> str:
    """Return when state is reset: as chosen, else as in training. Raises UserError if `rows` cuts what is carried."""
    if options.rows is None:
        return options.protocol or str(run.config["train"]["state"])
    if options.protocol == "carry":
        raise UserError("--protocol=carry reads one stream, and --rows cuts it into pieces; leave one of them out")
    return options.protocol or ("chunk" if run.config["train"]["state"] == "chunk" else "utterance")


def _sizes(data: Dataset, split: str) -> tuple[int, int]:
    """Return the bytes and words of a split. Raises UserError if dataset.json does not contain them."""
    sizes = []
    for name in ("bytes", "words"):
        counts = data.sources.get(name)
        count = counts.get(split) if isinstance(counts, dict) else None
        if type(count) is not int or not 0 < count < 1 << 62:
            raise UserError(f"{data.folder / DATASET_FILE} has no count of {name} of {split!r}; prepare the data again")
        sizes.append(count)
    return sizes[0], sizes[1]


def _piece_length(tokens: TokenSet, rows: int) -> int:
    """Return the length of about `rows` equal pieces."""
    if rows < 1:
        raise UserError(f"--rows is {rows}; it must be at least 1")
    return -(-tokens.num_tokens // rows)


def describe(figures: dict[str, Any]) -> str:
    """Return the figures in a few lines."""
    headline = figures["headline"]
    lines = [
        f"{figures['recipe']}, {figures['model']}, step {figures['step']}, {figures['split']} split: "
        f"{figures[headline]:.4f} {UNITS[headline]}",
        f"  {figures['nats_per_token']:.4f} nats = {figures['bits_per_token']:.4f} bits per token, "
        f"{figures['num_tokens']:,} tokens, memory {figures['memory']}, compressed {figures['compressed']}",
    ]
    lines += [f"  {figures[name]:.4f} {unit}" for name, unit in UNITS.items() if name in figures and name != headline]
    for bucket, entry in figures.get("perplexity_by_frequency", {}).items():
        lines.append(
            f"  {bucket:>7} in training: perplexity {entry['perplexity']:,.2f} ({entry['num_tokens']:,} tokens)"
        )
    if "bits_by_distance" in figures:
        lines.append(f"  by distance, where chance is {figures['chance_bits']:.2f} bits:")
        lines += [
            f"  {entry['from']:>7} to {entry['to']:>5} steps: {entry['bits']:.3f} bits "
            f"({entry['num_answers']:,} answers)"
            for entry in figures["bits_by_distance"]
        ]
    if "word_perplexity" in figures:
        lines.append(f"  word-level: {figures['num_words']:,} words, {figures['words_are']}")
    if "dynamic" in figures:
        dynamic = figures["dynamic"]
        lines.append(
            f"  dynamic, {dynamic['optimiser']} at {dynamic['lr']:g}: {dynamic[headline]:.4f} {UNITS[headline]}, "
            f"{dynamic['nats_per_token']:.4f} nats per token ({dynamic['difference_to_plain_nats']:+.4f})"
        )
    if figures["averaged_checkpoints"] > 1:
        lines.append(f"  with the mean weights of the last {figures['averaged_checkpoints']} checkpoints")
    if figures["rows"]:
        lines.append(f"  cut for speed, state {figures['state']}: slightly worse than in one piece")
    if not figures["published_corpus"]:
        lines.append("  not the published corpus: not comparable with the papers' figures")
    return "\n".join(lines)
