"""Tokenizers: decoding inverts encoding, however a document is cut into blocks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.corpora import sources
from recipes.corpora.documents import Document, read_text, read_words
from recipes.corpora.sources import open_source
from recipes.corpora.tokenizers import (
    TOKENIZERS,
    SubwordTokenizer,
    TextTokenizer,
    WordTokenizer,
    detokenize,
    load_tokenizer,
    save_tokenizer,
)
from tests.recipes.corpus_files import sentences
from waveform.system.checked_json import with_checksum
from waveform.system.errors import UserError

TEXTS = st.text(alphabet=st.sampled_from("ab ,\n\r\t é\xa0\u3000漢"), max_size=60)
SYLLABLES = st.lists(st.sampled_from(["ka", "lo", "min", " ", "  ", "\n", "\r\n", ",", "é", "漢"]), max_size=30)
small_blocks = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def document(folder: Path, content: str | bytes) -> Document:
    (folder / "a.txt").write_bytes(content.encode() if isinstance(content, str) else content)
    return Document.whole(open_source(folder), "a.txt")


def encode(tokenizer: TextTokenizer, text: Document) -> list[int]:
    return [int(i) for part in tokenizer.encode(text) for i in part]


@small_blocks
@given(text=TEXTS, block=st.integers(1, 9))
def test_words_are_those_of_each_line(text: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `for line in file: line.split() + ["<eos>"]`, which the published counts are based on."""
    monkeypatch.setattr(sources, "_BLOCK_BYTES", block)
    found = document(tmp_path, text)
    with open(tmp_path / "a.txt", encoding="utf-8") as file:
        expected = [word for line in file for word in [*line.split(), "<eos>"]]
    assert [word for words in read_words(found) for word in words] == expected


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> SubwordTokenizer:
    folder = tmp_path_factory.mktemp("subwords")
    return SubwordTokenizer.train([document(folder, "\n".join(sentences(300)))], vocab_size=400)


@small_blocks
@given(text=SYLLABLES.map("".join) | TEXTS, block=st.integers(1, 9))
def test_subwords_do_not_depend_on_blocks(
    text: str, block: int, subwords: SubwordTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", block)
    found = document(tmp_path, text)
    assert "".join(read_text(found)) == text
    ids = encode(subwords, found)
    assert ids == subwords.encode_prompt(text).tolist()
    assert subwords.decode(ids) == text


def test_subwords_are_learned_the_same_each_time(subwords: SubwordTokenizer, tmp_path: Path) -> None:
    again = SubwordTokenizer.train([document(tmp_path, "\n".join(sentences(300)))], vocab_size=400)
    assert again.content() == subwords.content()
    assert subwords.vocab_size == 400
    text = " ".join(sentences(20, seed=5))
    assert len(subwords.encode_prompt(text)) < 0.6 * len(text)
    with pytest.raises(UserError, match=r"the prompt contains '\\udcff', which this run does not know"):
        subwords.encode_prompt("a \udcff")  # as Python has a byte of the command line that is not UTF-8


def test_bytes_and_characters(tmp_path: Path) -> None:
    raw = bytes(range(256))
    assert encode(TOKENIZERS["bytes"]({}), document(tmp_path, raw)) == list(range(256))
    assert TOKENIZERS["bytes"]({}).decode([104, 105, 255]) == "hi�"
    tokenizer = TOKENIZERS["characters"]({})
    ids = encode(tokenizer, document(tmp_path, "the abyz "))
    assert (min(ids), max(ids), tokenizer.vocab_size) == (0, 26, 27)
    assert tokenizer.decode(ids) == "the abyz " and tokenizer.encode_prompt("the abyz ").tolist() == ids


def test_a_wrong_character_is_named_with_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 4)
    with pytest.raises(UserError, match=r"byte 9 of a\.txt is b'Z'"):
        encode(TOKENIZERS["characters"]({}), document(tmp_path, "abc def xZ"))


def test_words_by_frequency_with_rare_ones_unknown(tmp_path: Path) -> None:
    text = document(tmp_path, "b a b c\na b <unk> d\n")
    tokenizer, num_tokens = WordTokenizer.train([text], min_count=2)
    # c and d are rare: together with the <unk> in the text they are three.
    assert tokenizer.content()["words"] == ["<unk>", "b", "<eos>", "a"] and num_tokens == 10
    assert encode(tokenizer, text) == [1, 3, 1, 0, 2, 3, 1, 0, 0, 2]
    assert tokenizer.decode([1, 3, 2, 0, 2, 2, 1]) == "b a\n<unk>\n\nb"
    assert tokenizer.encode_prompt("b a\nzebra").tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize("kind", ["words", "subwords"])
def test_text_that_is_not_utf8_is_refused(kind: str, tmp_path: Path) -> None:
    bad = document(tmp_path, b"fine \xff not")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 text \(.*\); convert it$"):
        list((read_words if kind == "words" else read_text)(bad))
    cut = document(tmp_path, "é".encode()[:1])
    with pytest.raises(UserError, match="not UTF-8"):
        list(read_words(cut))


def test_saved_and_loaded(subwords: SubwordTokenizer, tmp_path: Path) -> None:
    words, _ = WordTokenizer.train([document(tmp_path, "kaka lolo\nmimi")], min_count=1)
    for tokenizer in (TOKENIZERS["bytes"]({}), TOKENIZERS["characters"]({}), words, subwords):
        save_tokenizer(tokenizer, tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert (loaded.kind, loaded.vocab_size) == (tokenizer.kind, tokenizer.vocab_size)
        prompt = "kaka lolo"
        np.testing.assert_array_equal(loaded.encode_prompt(prompt), tokenizer.encode_prompt(prompt))
        assert loaded.decode(loaded.encode_prompt(prompt).tolist()) == prompt


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", {"kind": "runes"}, {"kind": "words"}, {"kind": "words", "words": ["a"]}),
        *({"kind": "symbols", "symbols": 9}, {"kind": "subwords", "tokenizer": {"model": 3}}),
    ],
)
def test_a_damaged_tokenizer_is_named(content: str | dict[str, Any], tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(with_checksum(content))
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer.json is damaged"):
        load_tokenizer(tmp_path)


def test_only_the_merges_of_subwords_are_loaded(subwords: SubwordTokenizer) -> None:
    """Other parts can make a text as long as they say."""
    content = subwords.content()
    padding = {"strategy": {"Fixed": 1000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    content["tokenizer"]["padding"] = {**padding, "pad_type_id": 0, "pad_token": "a"}
    longer = {"type": "Replace", "pattern": {"String": "k"}, "content": "k" * 1000}
    content["tokenizer"]["normalizer"] = longer
    loaded = TOKENIZERS["subwords"](content)
    np.testing.assert_array_equal(loaded.encode_prompt("kaka"), subwords.encode_prompt("kaka"))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("a well @-@ known sum of 1 @,@ 234 @.@ 5 , or so .", "a well-known sum of 1,234.5, or so."),
        ("the dog 's tail ( the long one ) did n't wag ; why ?", "the dog's tail (the long one) didn't wag; why?"),
        ('he said " wait " , and " go " .', 'he said "wait", and "go".'),
        ("`` no , '' she said", '"no," she said'),
        (" = Title = \n a line . \n", "= Title =\na line.\n"),
        ("rock ' n roll costs $ 5 , <unk> said", "rock ' n roll costs $5, <unk> said"),
    ],
)
def test_punctuation_is_joined(tokens: str, text: str) -> None:
    """Samples read as print: spaces go where the corpora's tokenizers put them."""
    assert detokenize(tokens) == text
