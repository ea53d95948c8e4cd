"""`python -m recipes` as a user sees it: every recipe end to end; every mistake reported in one line, exit code 2."""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from recipes.corpora.catalogue import RECIPES
from recipes.corpora.tokenizers import detokenize, load_tokenizer
from recipes.text import Text
from recipes.verbs.sample import _evenly_spaced
from recipes.verbs.sweep import save_plot, sweep
from tests.content import content
from tests.ranks.run_ranks import command_on_ranks
from tests.recipes.calling import Capsys, figures_of, mistake, printed, run
from tests.recipes.corpus_files import write_source
from tests.test_cli import words
from waveform.engine.dataset import read_dataset
from waveform.engine.metrics import read_metrics
from waveform.runs.scoring import EvaluateOptions, ScoredRun
from waveform.verbs.evaluate import evaluate

SHORT = ["train.max_steps=4", "train.evaluate_every=4", "train.checkpoint_every=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a data set and a short run on words."""
    place = tmp_path_factory.mktemp("odd [name], a=b")
    run("prepare", "wikitext103", write_source("wikitext103", place / "source"), place / "data", "corpus.check=false")
    run("train", place / "data", place / "run", "preset=smoke", *SHORT)
    return place


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        *(
            pytest.param(name, "compressive_transformer", marks=() if name == "folder" else pytest.mark.slow)
            for name, recipe in RECIPES.items()
            if recipe.generate is None
        ),
        ("folder", "transformer_xl"),
        pytest.param("wikitext103", "transformer_xl", marks=pytest.mark.slow),
    ],
)
def test_smoke_end_to_end(recipe: str, model: str, tmp_path: Path) -> None:
    source = write_source(recipe, tmp_path / "source")
    data, run_dir = tmp_path / "data", tmp_path / "runs" / "run"
    settings = ["corpus.check=false"]
    if recipe == "folder" and model == "transformer_xl":
        settings += ["corpus.tokens=subwords", "corpus.vocab_size=300"]
    if recipe == "pg19":
        settings += ["corpus.vocab_size=400"]
    run("prepare", recipe, source, data, *settings)
    steps = [] if model == "compressive_transformer" else SHORT
    run("train", data, run_dir, f"model={model}", "preset=smoke", *steps)
    figures = figures_of(tmp_path / "figures.json", "evaluate", run_dir)
    headline = RECIPES[recipe].headline
    assert figures["headline"] == headline and 0 < figures[headline] < math.inf
    assert figures["published_corpus"] is (None if recipe in ("folder", "recall") else False)
    nats = figures["nats_per_token"] * figures["num_tokens"]
    if headline == "perplexity":
        assert figures[headline] == pytest.approx(math.exp(figures["nats_per_token"]))
    elif headline == "word_perplexity":
        assert figures[headline] == pytest.approx(math.exp(nats / figures["num_words"]))
        published = figures_of(tmp_path / "published.json", "evaluate", run_dir, "--published-words")
        assert published[headline] == pytest.approx(math.exp(nats / 6_966_499))  # Rae et al. 2019, Table 2
        assert published["words_are"] == f"as published; this text has {figures['num_words']:,}"
    else:
        assert figures[headline] == pytest.approx(nats / math.log(2) / figures["num_bytes"])
    if model == "compressive_transformer":  # learns something in its few seconds
        vocab_size = json.loads((data / "dataset.json").read_text())["vocab_size"]
        assert figures["nats_per_token"] < 0.9 * math.log(vocab_size)
    prompt = "kaka lolo" if recipe in ("text8", "enwik8", "folder") else "kaka lolo\n"
    text = printed("sample", run_dir, "--prompt", prompt, "--tokens", 20, "--top-k", 40)
    assert text.startswith("kaka lolo")


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one(place: Path, tmp_path: Path) -> None:
    """Under torchrun: the same run, and the processes together score each token of the test split once."""

    def ranks(*arguments: Any) -> str:
        return command_on_ranks("recipes", arguments, tmp_path / "ranks")

    run_dir = tmp_path / "run"
    out = ranks("train", place / "data", run_dir, "preset=smoke", *SHORT)
    assert "2 x cpu" in out and "1 thread in each process: OMP_NUM_THREADS=1" in out and "finished: step 4" in out
    said = ranks("sample", run_dir, "--documents", 3, "--prefix", 4, "--tokens", 4)
    assert said.count("=== as it goes on") == 3  # a share is drawn by each, and one says them all
    dynamic = ["--dynamic", "--dynamic-optimiser", "adam", "--dynamic-lr", "1e-3"]
    alone = figures_of(tmp_path / "alone.json", "evaluate", run_dir, "--rows", 3, *dynamic)
    ranks("evaluate", run_dir, "--rows", 3, *dynamic, "--json", tmp_path / "together.json")
    together = json.loads((tmp_path / "together.json").read_text())
    one = figures_of(tmp_path / "one_process.json", "evaluate", place / "run", "--rows", 3)
    assert together["num_tokens"] == alone["num_tokens"]
    assert together["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
    assert together["dynamic"]["perplexity"] == pytest.approx(alone["dynamic"]["perplexity"], rel=1e-4)
    assert together["dynamic"]["perplexity"] < 0.95 * together["perplexity"]
    assert together["perplexity_by_frequency"] == {
        bucket: {"perplexity": pytest.approx(entry["perplexity"], rel=1e-6), "num_tokens": entry["num_tokens"]}
        for bucket, entry in alone["perplexity_by_frequency"].items()
    }
    assert alone["perplexity"] == pytest.approx(one["perplexity"], rel=1e-3)


@pytest.mark.slow
def test_a_run_is_scored_as_it_was_trained(tmp_path: Path) -> None:
    """A run of train.state=carry carries memory from each document to the next, unless --protocol says otherwise."""
    data, carried, reset = tmp_path / "data", tmp_path / "carried", tmp_path / "reset"
    run("prepare", "folder", write_source("folder", tmp_path / "source"), data, "corpus.test=0.4")
    run("train", data, carried, "preset=smoke", *SHORT, "train.state=carry")
    run("train", data, reset, "preset=smoke", *SHORT)
    default, carry, utterance, rows = (
        figures_of(tmp_path / "f.json", "evaluate", carried, *options)
        for options in ([], ["--protocol", "carry"], ["--protocol", "utterance"], ["--rows", 4])
    )
    assert default["num_utterances"] > 1
    assert default["nats_per_token"] == carry["nats_per_token"] != utterance["nats_per_token"]
    assert default["state"] == carry["state"] == "by carry" and utterance["state"] == "by utterance"
    assert "pieces" in rows["state"]
    assert "leave one of them out" in mistake(["evaluate", carried, "--rows", 4, "--protocol", "carry"])
    assert "reset at different places, by carry and by utterance" in mistake(["compare", carried, reset])
    assert "or --rows for text, which report takes too" in mistake(["report", carried, reset])
    compared = figures_of(tmp_path / "compared.json", "compare", carried, reset, "--protocol", "utterance")
    assert compared[0]["nats_per_token"] == pytest.approx(utterance["nats_per_token"])


def test_a_run_that_has_the_setting_of_speech_resumes(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    """`train.sample_seconds` was a setting of text runs too, and did nothing there."""
    command = ["train", place / "data", tmp_path / "run", "preset=smoke", *SHORT]
    shutil.copytree(place / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("\ntrain:\n", "\ntrain:\n  sample_seconds: 1.0\n"))
    run("evaluate", tmp_path / "run")
    run(*command, "train.max_steps=5")
    assert "finished: step 5" in capsys.readouterr().out and "sample_seconds" not in path.read_text()
    assert "train.sample_seconds" in mistake([*command, "train.sample_seconds=1"])
    assert "contains a run with a different configuration" in mistake([*command, "train.lr=1"])
    path.write_text(path.read_text().replace("  lr: ", "  lr: 1"))
    assert "config.yaml has been changed" in mistake([*command, "train.max_steps=6"])


def test_longer_memories_and_rows(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    trained, given, longer, rows = (
        figures_of(tmp_path / "f.json", "evaluate", place / "run", *options)
        for options in ([], ["--memory", 16, "--compressed", 8], ["--memory", 32, "--compressed", 24], ["--rows", 7])
    )
    assert trained["perplexity"] == given["perplexity"] != longer["perplexity"]
    assert longer["compressed"] == longer["model_config"]["compressed"] == 24
    assert longer["num_parameters"] == trained["num_parameters"]
    assert rows["num_tokens"] == trained["num_tokens"] and rows["perplexity"] != trained["perplexity"]
    assert "cut for speed, state reset at the start of 7 pieces: " in capsys.readouterr().out
    run("evaluate", place / "run", "--rows", 7, "--protocol", "chunk")
    assert "cut for speed, state reset at the start of 7 pieces and of each chunk: " in capsys.readouterr().out


def test_compare(tmp_path: Path, capsys: Capsys) -> None:
    run("prepare", "folder", write_source("folder", tmp_path / "source"), tmp_path / "data", "corpus.test=0.6")
    shutil.copytree(tmp_path / "data", tmp_path / "other")  # the same documents
    runs = [tmp_path / name for name in ("one", "two", "three")]
    for run_dir, steps, data in zip(runs, (2, 6, 2), ("data", "data", "other"), strict=True):
        run("train", tmp_path / data, run_dir, "preset=smoke", f"train.max_steps={steps}", "train.evaluate_every=2")
    capsys.readouterr()
    first, second, third = figures_of(tmp_path / "c.json", "compare", *runs, "--plot", tmp_path / "c.png")
    table = capsys.readouterr().out
    for entry in (first, second):
        assert f"{entry['bits_per_byte']:.4f}  " in table and f"{entry['word_perplexity']:,.2f}  " in table
    assert (third["difference_nats"], third["interval_95"]) == (0, [0, 0])
    assert second["interval_95"][0] < second["difference_nats"] < second["interval_95"][1] < 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_of_the_data_that_is_named(data: Path, tmp_path: Path) -> None:
    """A run on bytes of any text is scored on other bytes, by what papers quote of them, and not on characters."""
    run("train", data, tmp_path / "run", "preset=smoke", "model=lstm", "train.max_steps=1", "train.evaluate_tokens=0")
    for recipe in ("enwik8", "text8"):
        run("prepare", recipe, write_source(recipe, tmp_path / f"of {recipe}"), tmp_path / recipe, "corpus.check=false")
    command = ["evaluate", tmp_path / "run", "--rows", 8, "--data"]
    figures = figures_of(tmp_path / "f.json", *command, tmp_path / "enwik8")
    assert (figures["recipe"], figures["published_corpus"]) == ("enwik8", False) and "bits_per_character" in figures
    assert "has a different vocabulary" in mistake([*command, tmp_path / "text8"])


def test_sweep_chooses_on_the_validation_split(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    result = figures_of(tmp_path / "sweep.json", "sweep", place / "run", "--compressed", "16,4,8", "--memory", 20)
    table = capsys.readouterr().out
    entries, chosen = result["sizes"], result["chosen"]
    assert [entry["compressed"] for entry in entries] == [4, 8, 16]
    assert {(entry["memory"], entry["split"]) for entry in entries} == {(20, "valid")}
    assert len({entry["perplexity"] for entry in entries}) == 3
    for entry in entries:
        assert f"20      {entry['compressed']:<10}  {entry['perplexity']:.4f}" in table
    best = min(entries, key=lambda entry: entry["perplexity"])
    assert chosen == figures_of(
        tmp_path / "e.json", "evaluate", place / "run", "--memory", 20, "--compressed", best["compressed"]
    )
    assert f"compressed {best['compressed']}, on the test split: {chosen['perplexity']:.4f}" in table
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "mine.png").write_text("a picture of mine")
    line = mistake(["sweep", place / "run", "--compressed", "4", "--json", tmp_path / "mine.json"])
    assert "mine.png exists" in line and (tmp_path / "mine.png").read_text() == "a picture of mine"
    with pytest.raises(SystemExit, match="2"):
        run("sweep", place / "run", "--memory", "8;9")
    assert "argument --memory: invalid numbers value: '8;9'" in capsys.readouterr().err
    assert "name the sizes" in mistake(["sweep", place / "run"])
    result = sweep(place / "run", compressed=[4, 8], memory=[8, 16], show_progress=False)
    assert [(entry["compressed"], entry["memory"]) for entry in result["sizes"]] == [(4, 8), (4, 16), (8, 8), (8, 16)]


def test_a_sweep_with_sizes_by_layer_is_drawn(tmp_path: Path) -> None:
    known = {"recipe": "enwik8", "split": "valid", "model": "m", "step": 1, "headline": "perplexity"}
    entries = [{**known, "compressed": [0, 8], "memory": memory, "perplexity": 9.0 / memory} for memory in (8, 16)]
    save_plot(tmp_path / "a.png", {"sizes": entries, "chosen": entries[1]})
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_chooses_by_the_figure_that_it_shows(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recall, nats per token and bits per answer may be lowest at different sizes."""
    measure = Text.measure

    def other_nats(*args: Any, **how: Any) -> ScoredRun:
        one = measure(*args, **how)
        return replace(one, figures={**one.figures, "nats_per_token": -one.figures["nats_per_token"]})

    monkeypatch.setattr(Text, "measure", other_nats)
    result = sweep(place / "run", compressed=[4, 8, 16], show_progress=False)
    best = min(result["sizes"], key=lambda entry: entry["perplexity"])
    assert result["chosen"]["compressed"] == best["compressed"]


def test_dynamic_evaluation_is_separate(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    before = content(place / "run")
    plain = figures_of(tmp_path / "plain.json", "evaluate", place / "run")
    arguments = ["evaluate", place / "run", "--dynamic", "--dynamic-optimiser", "adam", "--dynamic-lr", "1e-3"]
    figures = figures_of(tmp_path / "dynamic.json", *arguments)
    dynamic = figures.pop("dynamic")
    assert figures == plain and (dynamic["optimiser"], dynamic["lr"]) == ("adam", 1e-3)
    assert dynamic["perplexity"] == pytest.approx(math.exp(dynamic["nats_per_token"]))
    assert dynamic["perplexity"] < 0.9 * plain["perplexity"]
    assert dynamic["perplexity_by_frequency"].keys() == plain["perplexity_by_frequency"].keys()
    assert f"dynamic, adam at 0.001: {dynamic['perplexity']:.4f}" in capsys.readouterr().out
    assert "--dynamic-lr is -1.0; it must be 0 or more" in mistake([*arguments[:3], "--dynamic-lr", "-1"])
    continued = ["evaluate", place / "run", "--dynamic", "--dynamic-optimiser", "continued"]
    own = figures_of(tmp_path / "own.json", *continued)["dynamic"]
    given = figures_of(tmp_path / "given.json", *continued, "--dynamic-lr", "1e-3")["dynamic"]
    assert own["lr"] == pytest.approx(1e-2) and given["lr"] == 1e-3  # the fifth of five steps of warm-up comes next
    assert own["perplexity"] < given["perplexity"] < plain["perplexity"]
    assert given["perplexity"] != dynamic["perplexity"]  # of Adam that starts afresh
    assert before == content(place / "run")


def test_analyse(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    options = ["--tokens", 4000, "--split", "train", "--plot", tmp_path / "a.png"]
    figures = figures_of(tmp_path / "a.json", "analyse", place / "run", place / "run", *options)
    assert len(figures["runs"]) == 2 and figures["unit"] == "token"
    regions = figures["runs"][0]["attention_by_position"]["regions"]
    assert set(regions) == {"compressed", "memory", "window"}
    assert len(figures["effective_context"]["by_ratio"]["0.1"]) == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "relative effective context in tokens of the group" in capsys.readouterr().out
    heads = figures["runs"][0]["attention_by_head"]
    assert list(heads["terms"]) == ["a", "b", "c", "d"] and len(heads["widest"]) == 3
    options += ["--compressed", 12, "--memory", 8]
    run_figures = figures_of(tmp_path / "a.json", "analyse", place / "run", *options)["runs"][0]
    regions = run_figures["attention_by_position"]["regions"]
    assert (regions["compressed"]["slots"], regions["memory"]["slots"]) == (12, 8)
    assert run_figures["attention_by_head"]["buckets"][-1]["to"] == 16 + 8 + 2 * 12 - 1
    assert "is not a .png" in mistake(["analyse", place / "run", "--plot", tmp_path / "a.pdf"])


def test_samples_continue_held_out_documents(place: Path) -> None:
    """The prefix is the document's, then what the first one's gives as a prompt, others drawn apart, then the truth."""
    sample = partial(printed, "sample", place / "run")
    lines = sample("--documents", 3, "--prefix", 9, "--tokens", 5, "--split", "valid", "--seed", 4).splitlines()
    data = read_dataset(place / "data")
    tokens, tokenizer = data.open_split("valid"), load_tokenizer(place / "data")
    assert len(tokens) == 1
    headers = [i for i, line in enumerate(lines) if line.startswith("=== valid")]
    assert len(headers) == 3 and sum("as it goes on" in line for line in lines) == 3
    middle = -(-tokens.num_tokens // 3)
    read, truth = (tokens.read(0, start=middle + a, stop=middle + b).tolist() for a, b in ((0, 9), (9, 14)))
    part = "\n".join(lines[headers[1] : headers[2]])
    assert part.startswith(f"=== valid#000001: 9 tokens of the valid split\n{detokenize(tokenizer.decode(read))}\n===")
    assert part.endswith(f"=== as it goes on\n{detokenize(tokenizer.decode(truth))}\n")
    for number, start in enumerate((0, middle)):
        prompt = tokenizer.decode(tokens.read(0, start=start, stop=start + 9).tolist())
        continued = sample("--prompt", prompt, "--tokens", 5, "--seed", 4).rstrip("\n").removeprefix(prompt)
        made = "\n".join(lines[headers[number] :]).split("step 4\n")[1].split("\n=== as")[0]
        assert (made.split() == detokenize(continued).split()) == (number == 0)
    assert _evenly_spaced(tokens.cut(-(-tokens.num_tokens // 7)), 3)[1] == [0, 2, 4]
    whole = sample("--documents", 1, "--prefix", 10**6, "--tokens", 1, "--split", "valid")
    assert whole.endswith("=== as it goes on\n\n\n")  # all of it is read, and nothing follows
    both = ["sample", place / "run", "--documents", 1, "--prompt", "kaka"]
    assert "--prompt and --documents both" in mistake(both)
    assert "--documents is 0" in mistake(["sample", place / "run", "--documents", 0])


def test_processes_that_read_different_steps_to_sample_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Mock(side_effect=Text.load)
    monkeypatch.setattr(Text, "load", reading)
    monkeypatch.setattr("waveform.ranks.distributed.World.largest", Mock(side_effect=[[9, -4], [9, -9]]))
    printed("sample", place / "run", "--documents", 1, "--prefix", 4, "--tokens", 1)
    assert reading.call_count == 2


def test_samples_depend_on_prompt_and_seed_alone(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    sample = partial(printed, "sample", place / "run", "--tokens", 30)
    (tmp_path / "prompt.txt").write_text("kaka lolo")
    text = sample("--prompt", "kaka lolo", "--seed", 1)
    assert text == sample("--prompt", tmp_path / "prompt.txt", "--seed", 1) != sample("--prompt", "kaka lolo")
    assert sample("--seed", 1, "--top-p", 0.98) == sample("--seed", 1) != sample("--seed", 1, "--top-p", 1)
    assert sample("--temperature", 0) == sample("--temperature", 0, "--seed", 9)
    run("sample", place / "run", "--tokens", 3, "--prompt", "kaka notaword")
    said = capsys.readouterr()
    assert said.out.startswith("kaka <unk>")
    assert "1 of 2 words of the prompt are not in the vocabulary" in said.err


MISTAKES = [  # commands, as of tests/test_cli, and what is said of them
    ("prepare enwik9 P/source T/d", "choose one of enwik8, text8"),
    ("prepare enwik8 T/none T/d", "no such file or folder"),
    ("prepare folder P/ T/d corpus.chek=1", "corpus.check, "),
    ("prepare folder P/ T/d corpus.check=maybe", "corpus.check:"),
    ("prepare wikitext103 P/source T/d corpus.tokens=bytes", "wikitext103 is read as words"),
    ("prepare wikitext103 P/source/wikitext-103-v1.zip P/data", "is not empty; give a new folder, or remove it to"),
    # A slice instead of the corpus, another corpus, and too few files
    ("prepare wikitext103 P/source/wikitext-103-v1.zip T/d", "not 103,227,021. Expected: wiki.train.tokens"),
    ("prepare ptb P/source/wikitext-103-v1.zip T/d", "ptb.train.txt"),
    ("prepare folder P/source T/d", "has no .txt files that are not empty"),
    ("train T/x T/r", "give a folder of audio or a prepared data set"),
    ("train ptb P/data T/r preset=smoke", "a data set knows its recipe; leave out ptb, and name"),
    ("train enwik8 T/r", "no such folder: enwik8; give a prepared data set"),
    (
        "train P/data T/r preset=big",
        "choose one of cpu, dai, dai_12l, dai_18l, dai_24l, dai_base, dai_large, dai_standard, paper, small, smoke",
    ),
    ("train P/data T/r study=table9", "table5_max"),
    ("train P/data T/r data.labels=folder", "unknown setting"),
    ("train P/data T/r preset=small", "model.cutoffs is [20000, 40000, 200000]"),  # beyond the vocabulary
    ("train P/data T/r recipe=enwik8", "recipe is enwik8, but the data is of wikitext103; leave"),
    ("evaluate P/run --split dev", "has no split 'dev'"),
    ("evaluate P/run --delays 3", "--delays is not for runs on text; leave it out"),
    ("compare P/run --envs 3", "--envs is not for runs on text; leave it out"),
    ("evaluate P/run --rows 0", "--rows is 0"),
    ("evaluate P/run --protocol clip", "--protocol clip is for runs on audio; leave it out"),
    ("evaluate P/run --memory -1", "model.memory is -1"),
    (
        "sweep P/run --compressed 4,0",
        "the run was not trained with compressed 0, which has other parameters; give another size",
    ),
    ("analyse P/run --json T/a.png --plot T/x/../a.png", "would be one file, "),
    ("sweep P/run --memory 8 --json T/./a.png", "a.png; give --json another name"),
    ("sample P/run --tokens 0", "--tokens is 0"),
    ("sample P/run --split valid", "--prefix and --split are for --documents; give it too"),
    ("sample P/run --int8", "--int8 is for runs on audio"),
    ("sample P/run --top-p 0", "top-p is 0"),
]


@pytest.mark.parametrize(("command", "says"), MISTAKES)
def test_a_mistake_is_one_line(command: str, says: str, place: Path, tmp_path: Path) -> None:
    before = sorted(place.rglob("*"))
    assert says in mistake(words(command, place, tmp_path))
    assert sorted(place.rglob("*")) == before
    assert not [path for path in tmp_path.rglob("*") if path.name != ".train.lock" and path.is_file()]
    assert not (tmp_path / "d").exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_a_page_of_two_runs(place: Path, tmp_path: Path) -> None:
    """Of words, without players."""
    page, marked = tmp_path / "page.html", tmp_path / "<b>a"
    run("train", place / "data", marked, "preset=smoke", "seed=1", *SHORT)
    options = ["--documents", 2, "--prefix", 8, "--tokens", 5, "--split", "train", "--out", page]
    figures = figures_of(tmp_path / "f.json", "report", marked, place / "run", *options)
    html = page.read_text()
    assert "<b>" not in html and "<audio" not in html and 'id="listen"' not in html
    section = re.search(r'<section id="read">.*?</section>', html, re.DOTALL)
    assert section is not None and section[0].count("<details") == 2
    assert section[0].count("<h3>") == 6 and section[0].count("as it goes on") == 2  # two runs and the truth, twice
    assert 'id="perplexity-by-frequency"' in html and "gain over the first" in html
    assert "Attention by position" in html
    assert "<td>seed</td>" in html
    assert len(figures["comparison"]) == len(figures["by_place"]) == len(figures["attention"]) == 2
    assert figures["by_place"][0]["edges"][:3] == [0, 64, 128]
    before = content(place / "run")
    assert "is named twice" in mistake(["report", place / "run", place / "run"])
    config = place / "run" / "config.yaml"
    assert f"{config} exists, and is not a page" in mistake(["report", place / "run", "--out", config])
    run("report", place / "run", "--documents", 0, "--out", page)  # its own is replaced
    assert "--tokens is 0" in mistake(["report", place / "run", "--tokens", 0])
    assert content(place / "run") == before


def test_a_vocabulary_that_is_gone_is_reported(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "run"
    run("prepare", "text8", write_source("text8", tmp_path / "source"), data, "corpus.check=false")
    run("train", data, run_dir, "preset=smoke", *SHORT)
    assert "contains 'K'" in mistake(["sample", run_dir, "--prompt", "Kaka"])
    (data / "tokenizer.json").write_text("{")
    assert "tokenizer.json is damaged" in mistake(["sample", run_dir])
    assert "tokenizer.json is damaged" in mistake(["train", data, tmp_path / "new", "preset=smoke"])
    data.rename(tmp_path / "moved")
    assert "is gone" in mistake(["sample", run_dir])
    assert "is gone" in mistake(["evaluate", run_dir])


def test_validation_in_training_fills_its_rows(place: Path) -> None:
    """WikiText's validation split is one document; a quick look cuts it into a piece per row and scores it all."""
    (look,) = (record for record in read_metrics(place / "run") if record["kind"] == "evaluate")
    by_rows, whole = (
        evaluate(place / "run", EvaluateOptions(rows=rows, split="valid"), device="cpu", show_progress=False)
        for rows in (16, None)
    )
    assert look["nll_nats"] == pytest.approx(by_rows["nats_per_token"], rel=1e-6)
    assert look["nll_nats"] != pytest.approx(whole["nats_per_token"], rel=1e-6)
