"""Labels on their way through the engine: token sets, streams, passes, training and sampling."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import laws, plugin_models
from tests.analyses.conftest import run_of
from tests.engine.test_trainer import assert_exact_resume
from tests.engine.training import MakeTokens
from waveform.analyses.context import ContextGrid, losses_by_context
from waveform.engine.interface import ForwardDecoder
from waveform.engine.labels import MAX_LABELS, is_label, label_names, labels_checksum
from waveform.engine.sampler import SamplingConfig, read_prompt, sample
from waveform.engine.single_pass import deal
from waveform.engine.streams import TokenStream
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.models import registry
from waveform.models.registry import build, model_names
from waveform.ranks.distributed import World
from waveform.system.errors import UserError
from waveform.system.progress import Progress

LENGTHS = [13, 4, 40, 1, 22, 8, 17]
NAMES = ["a", "b"]
V = laws.VOCAB_SIZE


def labelled(
    token_set: MakeTokens, lengths: list[int] = LENGTHS, labels: Sequence[str | None] = ("a", "b", "c", None)
) -> TokenSet:
    """Utterances with these labels in turn, of which the reader does not know c."""
    tokens = token_set(lengths)
    tokens.labels = [labels[i % len(labels)] for i in range(len(tokens))]
    return tokens.numbered(NAMES)


def test_only_a_reader_who_knows_the_labels_gets_them(token_set: MakeTokens) -> None:
    tokens = labelled(token_set)
    assert tokens.label_numbers == [1, 2, 0, 0, 1, 2, 0]
    assert token_set(LENGTHS).label_numbers == tokens.numbered([]).label_numbers == [0] * 7
    assert tokens.numbered(["c", "a"]).label_numbers == [2, 0, 1, 0, 2, 0, 1]
    assert label_names(tokens) == ["a", "b", "c"]
    pieces = tokens.cut(5)
    for utterance, numbers in (("utterance_001", [2]), ("utterance_004", [1] * 5)):
        assert [pieces.label_numbers[i] for i, name in enumerate(pieces.names) if name.startswith(utterance)] == numbers
    assert tokens.checksum == token_set(LENGTHS).checksum  # NLL is comparable
    relabelled = labelled(token_set)
    relabelled.labels[2] = "a"
    assert labels_checksum([tokens]) == labels_checksum([labelled(token_set)]) != labels_checksum([relabelled])


def test_there_are_not_too_many(token_set: MakeTokens) -> None:
    tokens = token_set([3])
    tokens.labels = [str(i) for i in range(MAX_LABELS + 1)]
    with pytest.raises(UserError, match="has 10,001 labels; a run can have 10,000"):
        label_names(tokens)


def test_a_model_that_knows_no_labels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "model_class", lambda name: plugin_models.LSTM)
    build("lstm", vocab_size=V)
    says = "model 'lstm' does not know labels of utterances; train it with data.labels=none"
    with pytest.raises(UserError, match=says):
        build("lstm", vocab_size=V, num_labels=3)


def test_every_context_begins_with_the_label(token_set: MakeTokens) -> None:
    tokens = labelled(token_set, [60] * 4)
    model = laws.randomise(build("lstm", vocab_size=V, **laws.CONFIGS["lstm"]["labelled"]))
    grid = ContextGrid(step=8, num_steps=2, block=2, starts=[(0, 20), (1, 20), (3, 20)])
    progress = Progress("contexts", total=None, unit="token", enabled=False)
    runs = [run_of(model, window=5, labels=labels) for labels in (NAMES, [])]
    read, unread = (losses_by_context(run, tokens, grid, progress=progress) for run in runs)
    assert (read[:, :4] != unread[:, :4]).all() and (read[:, 4:] == unread[:, 4:]).all()


@pytest.mark.parametrize("mode", ["utterance", "chunk", "carry"])
def test_every_begin_has_its_label(mode: str, token_set: MakeTokens) -> None:
    tokens = labelled(token_set)
    config = TrainConfig(batch_size=2, chunk=8, state=mode, label_dropout=0.0)
    stream = TokenStream(tokens, config, window=4, seed=3, world=World())
    every = 8 if mode == "chunk" else max(LENGTHS)
    read, expected = Counter(), Counter()
    while stream.epoch == 0:
        chunk = stream.next_chunk()
        for window, rows in zip(chunk.windows, chunk.spans, strict=True):
            read.update(window.inputs[window.inputs >= V].tolist())
            begun = [span for row in rows for span in row if span.start % every == 0]
            expected.update(V + tokens.label_numbers[span.utterance] for span in begun)
    assert read == expected and len(expected) == 3


@pytest.mark.parametrize("rows", [None, 3])
def test_a_pass_begins_with_labels(rows: int | None, token_set: MakeTokens) -> None:
    tokens = labelled(token_set)
    for chunk in (None, 8) if rows else (None,):
        for dealt in deal(tokens, range(len(tokens)), window=4, rows=rows, chunk=chunk):
            begin = dealt.start == 0 or (chunk is not None and dealt.start % chunk == 0)
            for row, index in enumerate(dealt.utterances):
                first = int(dealt.window.inputs[row, 0])
                assert first == V + tokens.label_numbers[index] if begin else first < V


@pytest.mark.parametrize("mode", ["utterance", "chunk", "carry"])
def test_a_share_of_the_labels_is_dropped_as_the_seed_decides(mode: str, token_set: MakeTokens) -> None:
    tokens = labelled(token_set, [9] * 400, ["a"])

    def begins(num_ranks: int, rank: int) -> torch.Tensor:
        config, world = TrainConfig(batch_size=4, chunk=12, state=mode, label_dropout=0.25), World(rank, num_ranks)
        stream, other = (TokenStream(tokens, config, window=4, seed=5, world=world) for _ in range(2))
        for _ in range(3):
            stream.next_chunk()
        other.seek(stream.cursor())  # what is dropped depends on the place alone
        return torch.cat([torch.cat([w.inputs for w in other.next_chunk().windows], dim=1) for _ in range(70)], dim=1)

    read = begins(1, 0)
    dropped, kept = int((read == V).sum()), int((read == V + 1).sum())
    assert 0.15 < dropped / (dropped + kept) < 0.35
    assert torch.equal(read, torch.cat([begins(2, rank) for rank in range(2)]))


def test_other_labels_are_dropped_in_the_next_epoch(token_set: MakeTokens) -> None:
    config = TrainConfig(batch_size=1, chunk=8, label_dropout=0.5)
    stream = TokenStream(labelled(token_set, [8] * 30, ["a"]), config, window=8, seed=5, world=World())
    epochs = [[stream.next_chunk().spans[0][0][0] for _ in range(30)] for _ in range(2)]
    first, second = ({span.utterance: span.begin for span in spans} for spans in epochs)
    assert first.keys() == second.keys() and first != second


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("mode", ["utterance", "carry"])
def test_resume_is_bitwise_exact_with_labels(name: str, mode: str, token_set: MakeTokens, tmp_path: Path) -> None:
    lengths = [21, 37, 13, 30, 18, 44, 26, 15, 33, 24]  # the run stops and goes on within utterances
    tokens = labelled(token_set, lengths, NAMES)
    options = {"state": mode, "fields": laws.CONFIGS[name]["labelled"], "decay_steps": 8, "label_dropout": 0.3}
    whole, first = assert_exact_resume(name, tokens, tmp_path, **options)
    assert first.learner.state.labels[0].any()
    assert whole.learner.module.get_parameter("label_embedding.table").any(dim=1).all()  # each label is learned


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("prompted", [False, True])
def test_streams_are_samples_of_their_labels(name: str, prompted: bool) -> None:
    """Sampling with labels equals stepping `forward` from inputs that begin with them, stream by stream."""
    model = laws.randomise(build(name, vocab_size=V, **laws.CONFIGS[name]["labelled"])).float().eval()
    prompt = torch.tensor([3, 1, 4, 1, 5, 9, 2]) if prompted else None
    labels, options = [2, 0, 1, 2], {"vocab_size": V, "num_steps": 40, "config": SamplingConfig(seed=4)}
    made = sample(model, num_streams=4, prompt=prompt, labels=labels, **options)
    generators = [torch.Generator().manual_seed(4 * 1_000_003 + i) for i in range(4)]
    uniform = torch.stack([torch.rand(40, generator=generator) for generator in generators], dim=1)
    with torch.inference_mode():
        state, inputs = read_prompt(model, torch.empty(0) if prompt is None else prompt, labels=labels, vocab_size=V)
        assert state.labels[0].tolist() == (labels if prompted else [0] * 4)
        expected = ForwardDecoder(model, state).draw(inputs, uniform, options["config"]).t()
    assert torch.equal(made, expected)
    other = sample(model, num_streams=4, prompt=prompt, labels=[1, 0, 1, 2], **options)
    assert not torch.equal(other[0], made[0]) and torch.equal(other[1:], made[1:])
    plain = sample(model, num_streams=4, prompt=prompt, **options)
    assert torch.equal(plain, sample(model, num_streams=4, prompt=prompt, labels=[0] * 4, **options))


@pytest.mark.parametrize(
    "name", ["", " ", "a ", "a/b", "a\\b", "$HOME", "[x]", "{x}", "a\nb", "\udce9", "é" * 51], ids=repr
)
def test_what_cannot_be_a_label(name: str) -> None:
    assert not is_label(name)
    assert is_label("größe 日本 (1)")
