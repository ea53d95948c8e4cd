"""`python -m recipes import`: published weights compute what they did, and the run works in every verb."""

import json
import math
import pickle
import shlex
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipes.corpora.tokenizers import load_tokenizer
from recipes.corpora.vocabulary import read_vocabulary
from recipes.published import read_published
from recipes.text import load
from tests.recipes.calling import Capsys, figures_of, mistake, printed, run
from tests.recipes.corpus_files import sentences, write_source
from tests.references import published_transformer_xl as reference
from tests.references.published_transformer_xl import Shape, Weights
from waveform.models.registry import build
from waveform.runs.scoring import own_tokens
from waveform.system.errors import UserError

_BEGIN = 3  # stands for begin-of-utterance
_WORDS = ["<eos>", "<unk>", *sorted({word for line in sentences(400) for word in line.split()})]


def write_checkpoint(
    folder: Path, shape: Shape, *, tensors: str = "torch", words: list[str] = _WORDS, **changes: Any
) -> Weights:
    """Write weights, config.json and the words into `folder`; returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    weights = reference.make_weights(shape)
    if tensors == "torch":
        torch.save(weights, folder / "pytorch_model.bin")
    else:  # each tensor once, as that library's tools leave them
        seen: set[int] = set()
        once = {k: t for k, t in weights.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}
        save_file(once, folder / "model.safetensors")
    names = ("mem_len", "tgt_len", "clamp_len", "same_length", "cutoffs")
    (folder / "config.json").write_text(json.dumps({name: getattr(shape, name) for name in names} | changes))
    return weights


SHAPES = {
    f"{code}, {name}": Shape(hugging_face=code == "Hugging Face", **fields)
    for code in ("Hugging Face", "kimiyoung")
    for name, fields in {
        "tied": {},
        "clamped": {"clamp_len": 4},
        "same length": {"same_length": True, "mem_len": 5},
        "same length, clamped": {"same_length": True, "clamp_len": 9},
        "memory shorter than a segment": {"same_length": True, "mem_len": 3},
        "untied": {"tied": False},
        "equal widths": {"div_val": 1},
        "equal widths, untied": {"div_val": 1, "tied": False},
        "no clusters": {"div_val": 1, "cutoffs": []},
        "no clusters, untied": {"div_val": 1, "cutoffs": [], "tied": False},
        "three times narrower": {"div_val": 3, "d_model": 18, "cutoffs": [8, 20]},
    }.items()
}


@pytest.mark.parametrize(("name", "tensors"), list(zip(SHAPES, cycle(["torch", "safetensors"]), strict=False)))
def test_hidden_vectors_and_probabilities_are_those_of_the_code(name: str, tensors: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    weights = write_checkpoint(tmp_path, shape, tensors=tensors)
    published = read_published(tmp_path, first_input=_BEGIN)
    model: Any = build("transformer_xl", vocab_size=published.vocab_size, **published.fields)
    model.load_state_dict(published.weights)
    model = model.eval().double()
    tokens = torch.randint(shape.vocab_size, (3, 5 * shape.tgt_len), generator=torch.Generator().manual_seed(1))
    expected, log_p = reference.run(weights, shape, tokens)
    with torch.no_grad():
        hidden = model(tokens, model.init_state(3, device="cpu", dtype=torch.float64)).hidden
        # The frequencies of positions are in the file in fp32.
        torch.testing.assert_close(hidden, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(model.head.logits(hidden).log_softmax(-1), log_p, atol=2e-6, rtol=0)
        targets = tokens.roll(-1, dims=1)
        nll = -log_p.gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(model.head.nll(hidden, targets), nll, atol=2e-6, rtol=0)
        words = model.embedding(torch.tensor([_BEGIN, shape.vocab_size]))
        torch.testing.assert_close(words[1], words[0], atol=1e-6, rtol=0)
    assert published.fields["tie_embeddings"] == shape.tied


def word_shape(**changes: Any) -> Shape:
    return Shape(hugging_face=True, **{"vocab_size": len(_WORDS), "clamp_len": 6, "same_length": True, **changes})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder: CHECKPOINT with the words beside the weights, and data prepared with these words."""
    write_checkpoint(tmp_path / "checkpoint", word_shape())
    corpus = write_source("wikitext103", tmp_path / "corpus")
    vocabulary = f"corpus.vocabulary={tmp_path / 'checkpoint' / 'vocab.txt'}"
    run("prepare", "wikitext103", corpus, tmp_path / "data", "corpus.check=false", vocabulary)
    return tmp_path


def test_the_run_works_in_every_verb(source: Path, capsys: Capsys) -> None:
    run_dir, data = source / "run", source / "data"
    tokenizer = load_tokenizer(data)
    assert tokenizer.content() == {"words": _WORDS} and tokenizer.encode_prompt(f"{_WORDS[9]} new").tolist() == [9, 1]
    settings = ["--data", data, "train.max_steps=2", "train.warmup_steps=1"]
    command = printed("import", source / "checkpoint", run_dir, *settings).splitlines()[-1]
    before = figures_of(source / "before.json", "evaluate", run_dir)
    assert before["step"] == 0 and before["memory"] == 7
    words = own_tokens(load(run_dir, device="cpu"), split="test").read(0, start=0, stop=10**6).astype("int64")
    expected = nats_of_the_code(word_shape(), torch.from_numpy(words), begin=_WORDS.index("<eos>"))
    assert before["nats_per_token"] == pytest.approx(expected, abs=1e-5)
    run("evaluate", run_dir, "--memory", "12", "--rows", "4", "--dynamic")
    run("import", source / "checkpoint", source / "other", "--data", data, "model.memory=20", "model.clamp_len=0")
    capsys.readouterr()
    assert figures_of(source / "compared.json", "compare", run_dir, source / "other")[1]["difference_nats"] != 0
    out = capsys.readouterr().out
    assert "perplexity by occurrences in training:" in out and "gain over the first" in out
    run("sample", run_dir, "--tokens", "20", "--prompt", " ".join(_WORDS[2:8]))
    run("analyse", run_dir, "--tokens", "300")
    assert command.startswith("to train it: python -m recipes train")
    run(*shlex.split(command)[6:])
    after = figures_of(source / "after.json", "evaluate", run_dir)
    assert after["step"] == 2 and after["nats_per_token"] != before["nats_per_token"]


def nats_of_the_code(shape: Shape, ids: torch.Tensor, *, begin: int) -> float:
    """NLL of `ids` [T] by the reference, with `begin` before them."""
    inputs = torch.cat([torch.tensor([begin]), ids[:-1]])
    _, log_p = reference.run(reference.make_weights(shape), shape, inputs[None])
    return float(-log_p.gather(-1, ids[None, :, None]).mean())


def test_without_text_the_run_can_be_sampled_from(source: Path) -> None:
    run("import", source / "checkpoint", source / "run")
    run("sample", source / "run", "--tokens", "5")
    assert "has no split 'test'" in mistake(["evaluate", source / "run"])


@pytest.mark.parametrize(
    "content",
    [
        _WORDS,
        {word: i for i, word in reversed(list(enumerate(_WORDS)))},
        "\n".join(_WORDS),
        "".join(f"{word} {i}\n" for i, word in enumerate(_WORDS)),
    ],
    ids=["list", "ids", "lines", "counts"],
)
def test_vocabularies(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert read_vocabulary(path).content() == {"words": _WORDS}


VOCABULARY_MISTAKES = {
    "[1, 2]": "holds something other than words",
    '{"<eos>": 0, "<unk>": 2}': "the ids of its 2 words are not 0, 1, 2",
    '["<eos>", "<unk>", "a", "a"]': "has the word 'a' twice",
    "<eos>\na\n": "lacks <unk>",
    "a\n\n<unk>": "line 2 is empty",
    '["<eos>"': "is not a vocabulary in JSON",
}


@pytest.mark.parametrize("content", VOCABULARY_MISTAKES)
def test_mistakes_in_vocabularies(content: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(content)
    with pytest.raises(UserError, match=VOCABULARY_MISTAKES[content]):
        read_vocabulary(tmp_path / "vocab.json")


class RunsCode:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


def lacking(beginning: str) -> Weights:
    return {name: tensor for name, tensor in WEIGHTS.items() if not name.startswith(beginning)}


WEIGHTS = reference.make_weights(word_shape())
MISTAKES: dict[str, tuple[Any, str]] = {
    "another model": ({"encoder.weight": torch.ones(2)}, "is not a Transformer-XL in a known layout"),
    "no head": (lacking("crit."), "lacks crit.out_projs.0"),
    "a missing key": (lacking("transformer.layers.1.dec_attn.r_net.weight"), "lacks transformer.layers.1"),
    "a missing layer": (lacking("transformer.layers.0.dec_attn.qkv_net.weight"), "lacks transformer.layers.0"),
    "a missing table": (lacking("transformer.word_emb.emb_layers.3.weight"), "lacks transformer.word_emb.emb_layers.3"),
    "a missing table of the head": (lacking("crit.out_layers.2.weight"), "lacks crit.out_layers.2.weight"),
    "a stranger": (WEIGHTS | {"transformer.gate": torch.ones(2)}, "also has transformer.gate, which"),
    "another shape": (
        WEIGHTS | {"transformer.layers.1.dec_attn.o_net.weight": torch.ones(4, 16)},
        "does not fit model=transformer_xl: size mismatch for layers.1.attention.output.weight: copying a param",
    ),
    **{
        f"{name} of shape {shape}": (
            WEIGHTS | {f"transformer.{name}": torch.ones(shape)},
            "a tensor of another shape than",
        )
        for name, shape in {
            "layers.0.dec_attn.r_net.weight": (16,),
            "layers.0.dec_attn.qkv_net.weight": (1, 16),
            "word_emb.emb_layers.0.weight": (),
            "word_emb.emb_layers.2.weight": (4,),
        }.items()
    },
    "code": ({"weight": RunsCode()}, "opening it could run code"),
    "no names": ([torch.ones(2)], "holds something other than named tensors"),
    "words": (b"words", "cannot read weights from"),
    "half a file": (b"PK\x03\x04" + bytes(100), "cannot read weights from"),
    "an old pickle": (pickle.dumps({"weight": Path("x")}, protocol=2), "opening it could run code"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_in_weights(what: str, tmp_path: Path) -> None:
    content, message = MISTAKES[what]
    write_checkpoint(tmp_path, word_shape())
    if isinstance(content, bytes):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, tmp_path / "pytorch_model.bin")
    assert message in mistake(["import", tmp_path, tmp_path / "run"])
    assert not (tmp_path / "run").exists()


CONFIG_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "pre_lnorm": ({"pre_lnorm": True}, "has pre_lnorm=True; only weights with False can be imported"),
    "attn_type": ({"attn_type": 2}, "has attn_type=2; only weights with 0 can be imported"),
    "epsilon": ({"layer_norm_epsilon": 1e-6}, "has layer_norm_epsilon=1e-06; only"),
    "memory": ({"mem_len": -3}, "does not hold the settings of a Transformer-XL: Expected `int` >= 0 - at `$.mem_len`"),
    "memory of no slots": ({"mem_len": 0}, "model.same_length lets queries see model.memory steps, but it is 0"),
    "one table": ({"cutoffs": [8]}, "3 clusters of rare words, which cutoffs=[8] in config.json does not cut"),
}


@pytest.mark.parametrize("what", CONFIG_MISTAKES)
def test_mistakes_in_the_configuration(what: str, tmp_path: Path) -> None:
    changes, message = CONFIG_MISTAKES[what]
    write_checkpoint(tmp_path, word_shape(div_val=1) if what == "one table" else word_shape(), **changes)
    assert message in mistake(["import", tmp_path, tmp_path / "run"])


def test_other_mistakes(source: Path) -> None:
    checkpoint, run_dir = source / "checkpoint", source / "run"

    def message(*arguments: Any) -> str:
        return mistake(["import", *arguments])

    line = message(source / "data", run_dir, "--vocabulary", checkpoint / "vocab.txt")
    assert "is not a file of weights, nor a folder with one of" in line
    assert "no such file or folder" in message(source / "nowhere", run_dir)
    fewer = source / "fewer.txt"
    fewer.write_text("\n".join(_WORDS[:-1]))
    assert f"has {len(_WORDS) - 1:,} words, but the weights" in message(checkpoint, run_dir, "--vocabulary", fewer)
    both = ["--data", source / "data", "--vocabulary", fewer]
    assert "was prepared with other words" in message(checkpoint, run_dir, *both)
    texts = write_source("folder", source / "texts")
    run("prepare", "folder", texts, source / "bytes")
    assert "is read as bytes" in message(checkpoint, run_dir, "--data", source / "bytes")
    assert "model.d_model" in message(checkpoint, run_dir, "model.d_model=15")
    assert "does not fit model=transformer_xl" in message(checkpoint, run_dir, "model.d_feedforward=32")
    assert "is not empty; give a new folder" in message(checkpoint, source / "data")
    (checkpoint / "config.json").unlink()
    assert "config.json is missing" in message(checkpoint, run_dir)
    (checkpoint / "vocab.txt").unlink()
    assert "has no vocab.json or vocab.txt" in message(checkpoint, run_dir)
    prepare = ["prepare", "folder", texts, source / "new", f"corpus.vocabulary={fewer}"]
    assert "holds words, but folder is read as bytes" in mistake(prepare)
    assert not run_dir.exists()


# As Dai et al. 2019's code has them: enwik8's bytes are numbers, text8's are letters and an underscore.
SYMBOLS = {
    "enwik8": [str(byte) for byte in b" etaoinshrdlcumwfgypbvkjxqz<>T.,\xc3\xa9" if byte != ord("\n")],
    "text8": list("_etaoinsrhldcumfpgwybvkxjzq"),
}


def symbol_bytes(recipe: str) -> list[int]:
    return [int(s) if recipe == "enwik8" else ord(" " if s == "_" else s) for s in SYMBOLS[recipe]]


@pytest.fixture(params=SYMBOLS)
def symbols(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Shape, bytes]:
    """A recipe, a folder with CHECKPOINT and data of its symbols, the model's shape, and the text of all splits."""
    recipe = str(request.param)
    letters = (letter for line in sentences(300) for letter in f"{line}\n".lower())
    known = set(symbol_bytes(recipe)) | ({ord("\n")} if recipe == "enwik8" else set())
    text = bytes(byte for byte in "".join(letters).encode() if byte in known)
    (tmp_path / recipe).write_bytes(text)
    shape = Shape(hugging_face=False, div_val=1, cutoffs=[], vocab_size=len(SYMBOLS[recipe]), same_length=True)
    write_checkpoint(tmp_path / "checkpoint", shape, words=SYMBOLS[recipe])
    vocabulary = f"corpus.vocabulary={tmp_path / 'checkpoint' / 'vocab.txt'}"
    run("prepare", recipe, tmp_path / recipe, tmp_path / "data", "corpus.check=false", vocabulary)
    return recipe, tmp_path, shape, text


def test_symbols_are_scored_as_by_the_code(symbols: tuple[str, Path, Shape, bytes]) -> None:
    """Per symbol, after a space, without the ends of lines that the model does not know."""
    recipe, place, shape, text = symbols
    run("import", place / "checkpoint", place / "run", "--data", place / "data")
    figures = figures_of(place / "e.json", "evaluate", place / "run", "--split", "test")
    order = symbol_bytes(recipe)
    test = text[len(text) - len(text) // 20 :]
    ids = torch.tensor([order.index(byte) for byte in test if byte != ord("\n")])
    assert (b"\n" in test) == (recipe == "enwik8")
    assert figures["num_tokens"] == len(ids)
    nats = nats_of_the_code(shape, ids, begin=order.index(ord(" ")))
    assert figures["nats_per_token"] == pytest.approx(nats, abs=1e-5)
    assert figures["bits_per_character"] == pytest.approx(nats / math.log(2), abs=1e-4)
    run("sample", place / "run", "--tokens", "9", "--prompt", "the s")


def test_symbols_without_text(symbols: tuple[str, Path, Shape, bytes]) -> None:
    _, place, _, text = symbols
    run("import", place / "checkpoint", place / "run")
    drawn = printed("sample", place / "run", "--tokens", 9, "--prompt", "the\ns")
    assert drawn.splitlines()[-1].startswith("thes")
    assert "the prompt contains '%'" in mistake(["sample", place / "run", "--prompt", "%"])
    (place / "other").write_bytes(text + b"%" + text)
    vocabulary = f"corpus.vocabulary={place / 'checkpoint' / 'vocab.txt'}"
    prepare = ["prepare", "enwik8", place / "other", place / "new", "corpus.check=false", vocabulary]
    assert f"byte {len(text):,} of other is b'%', which is not in the vocabulary" in mistake(prepare)
    (place / "words.txt").write_text("<eos>\n<unk>\na")
    prepare[-1] = f"corpus.vocabulary={place / 'words.txt'}"
    assert "holds words, but enwik8 is read as bytes" in mistake(prepare)
    (place / "checkpoint" / "vocab.txt").write_text("a\nb")
    assert "has no space" in mistake(["import", place / "checkpoint", place / "run2"])
