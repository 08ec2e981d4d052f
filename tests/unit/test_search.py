"""An index of passages: what it finds, what it is on disk, and what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_tokenizer import char_tokenizer, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from tandem.cli import main
from tandem.config.conversation import ToolsEnvironmentConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, ToolCall
from tandem.rollout.make import make_environments
from tandem.rollout.tools.base import CallLimits
from tandem.rollout.tools.builtin.search import SearchToolsConfig
from tandem.rollout.tools.search_tool import SearchTools
from tandem.search.index import Index, Passage, build_index, open_index, shown
from tandem.search.vectors import Embedding
from tandem.search.words import WordRanker, words_of
from tandem.types import Prompt

PUBLISHED = Path(__file__).parents[3] / "shared" / "data"
PROMPT = Prompt(0, np.array([1], np.int32), "?", "test", None)
PASSAGES = [
    Passage("a", "Rivers", "The Rhine flows through Basel."),
    Passage("b", "Mountains", "The Eiger is a mountain, 3,967 m high."),
    Passage("c", "", "Die Zürcher Straße führt nach Basel; nach Basel!"),
    Passage("d", "Rivers", "The Rhine flows through Basel."),
]


def index_of(passages: Sequence[Passage], folder: Path) -> Index:
    assert build_index(iter(passages), folder / "index") == len(passages)
    return open_index(folder / "index")


def test_the_best_passages_come_first_and_equal_ones_in_their_order(tmp_path: Path) -> None:
    index = index_of(PASSAGES, tmp_path)
    assert len(index) == 4
    hits = index.search("where does the RHINE flow?", 3)
    assert [hit.passage for hit in hits][:2] == [PASSAGES[0], PASSAGES[3]]
    assert [hit.passage.id for hit in index.search("zürcher straße", 4)] == ["c"]
    assert [hit.passage.id for hit in index.search("3", 4)] == ["b"]
    assert index.search("?!", 4) == index.search("", 4) == index.search("nowhere", 4) == index.search("Rhine", 0) == []
    assert len(index.search("the " * 100_000, 99)) == 3
    assert shown(index.search("mountains", 1)) == "[b] Mountains\nThe Eiger is a mountain, 3,967 m high."
    assert shown([]) == "Nothing found."


WORDS = st.sampled_from(["ant", "bee", "cat", "dog", "elk", "fox"])
TEXTS = st.lists(st.lists(WORDS, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(texts=TEXTS, query=st.lists(WORDS, max_size=4))
def test_scores_are_those_of_bm25(texts: list[str], query: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against the formula: idf · tf / (tf + k1 (1 - b + b length / mean length)), k1 = 1.5, b = .75."""
    folder = tmp_path_factory.mktemp("words")
    WordRanker.build(iter(texts), folder)
    counts = [Counter(words_of(text)) for text in texts]
    mean = sum(count.total() for count in counts) / len(counts)

    def score(count: Counter[str], word: str) -> float:
        has = sum(word in other for other in counts)
        idf = math.log(1 + (len(counts) - has + 0.5) / (has + 0.5))
        return idf * count[word] / (count[word] + 1.5 * (0.25 + 0.75 * count.total() / mean))

    expected = [sum(score(count, word) for word in query) for count in counts]
    np.testing.assert_allclose(WordRanker.load(folder).scores(" ".join(query)), expected, rtol=1e-5, atol=1e-6)


def test_there_is_no_index_of_no_words_or_of_no_passages(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no words"):
        build_index([Passage("1", "", "…")], tmp_path / "a")
    assert index_of([Passage("1", "", "…"), PASSAGES[0]], tmp_path).search("Rhine", 2)[0].passage.id == "a"
    with pytest.raises(UserError, match="no rows"):
        (tmp_path / "empty.jsonl").touch()
        _index(tmp_path / "empty.jsonl", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_is_on_disk_is_no_code(tmp_path: Path) -> None:
    index_of(PASSAGES, tmp_path)
    files = {path.name for path in (tmp_path / "index").rglob("*") if path.is_file()}
    assert {path.suffix for path in map(Path, files)} == {".json", ".arrow", ".npy"}
    for path in (tmp_path / "index").rglob("*.npy"):
        np.load(path, allow_pickle=False)


@pytest.mark.parametrize("damage", ["index.json", "passages.arrow", "ranker/vocab.index.json", "ranker"])
def test_a_damaged_index_is_told(damage: str, tmp_path: Path) -> None:
    index_of(PASSAGES, tmp_path)
    path = tmp_path / "index" / damage
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
    else:
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(UserError, match=r"is damaged|is no index"):
        open_index(tmp_path / "index")


@pytest.mark.parametrize("about", ["[1]", '{"format": 1}', '{"format": 1, "ranker": "words", "passages": "3"}'])
def test_an_index_of_another_shape_is_told(about: str, tmp_path: Path) -> None:
    index_of(PASSAGES, tmp_path)
    (tmp_path / "index/index.json").write_text(about)
    with pytest.raises(UserError, match=r"is damaged|of another version"):
        open_index(tmp_path / "index")


def test_an_index_is_not_written_over(tmp_path: Path) -> None:
    index_of(PASSAGES, tmp_path)
    with pytest.raises(UserError, match="is there already"):
        build_index(PASSAGES, tmp_path / "index")


def _index(corpus: Path, out: Path) -> None:
    from tandem.jobs.passage_index import make_index

    make_index(corpus, out, None)


def test_the_command_reads_parquet_and_json_lines_in_published_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": 7, "contents": '"Rivers"\nThe Rhine'}, {"id": "8", "contents": "The Rhone"}]
    write_lines(tmp_path / "corpus.jsonl", rows)
    assert main(["search", "index", str(tmp_path / "corpus.jsonl"), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == "passages 2\n"
    hits = open_index(tmp_path / "one").search("rhine rhone", 2)
    assert {hit.passage for hit in hits} == {Passage("7", "Rivers", "The Rhine"), Passage("8", "", "The Rhone")}
    pq.write_table(pa.Table.from_pylist([{"id": "1", "title": None, "text": "The Rhine"}]), tmp_path / "corpus.parquet")
    assert main(["search", "index", str(tmp_path / "corpus.parquet"), str(tmp_path / "two")]) == 0
    assert open_index(tmp_path / "two").search("Rhine", 1)[0].passage == Passage("1", "", "The Rhine")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "a"}, "row 2: column `id` is None"),
        ({"id": "x"}, "row 2: column `text` is missing"),
        ({"id": "x", "text": ""}, "row 2: column `text` is empty"),
        ({"id": "x", "text": " "}, "row 2: column `text` holds only whitespace"),
        ({"id": "x", "text": 3}, "row 2: column `text` has the wrong type: a number, not text"),
        ({"id": "x", "text": "a", "title": 3}, "row 2: column `title` has the wrong type: a number, not text"),
        ({"id": "1", "text": "a"}, "row 2: the id '1' is that of row 1, too"),
        ([], "row 2: the line holds a list"),
    ],
)
def test_rows_that_are_no_passages(line: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"id": "1", "text": "a"}), json.dumps(line)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["search", "index", str(tmp_path / "corpus.jsonl"), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"corpus.jsonl, {said}" in told and len(told.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "corpus.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["index", "no.jsonl", "out"], "no.jsonl: no such file"),
        (["index", "no.jsonl", "out", "--query-prefix", "a"], "are for --dense"),
        (["serve", "out", "--stdio"], "out: is no index"),
    ],
)
def test_mistakes_of_the_commands(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedding")
    tokenizer = char_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(directory)
    return directory


def test_dense_search_is_the_mean_over_tokens_by_cosine(embedding_model: Path, tmp_path: Path) -> None:
    """Against one text at a time without padding: batches change nothing."""
    texts = ["Basel", "the Eiger", "a longer text of some more words", "x" * 200]
    passages = [Passage(str(n), "", text) for n, text in enumerate(texts)]
    build_index(passages, tmp_path / "index", Embedding(str(embedding_model), "query: ", "passage: "))
    index = open_index(tmp_path / "index")
    model, tokenizer = BertModel.from_pretrained(embedding_model).eval(), char_tokenizer()

    def vector(text: str) -> np.ndarray:
        ids = torch.tensor([tokenizer.encode(text)[:64]])
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0)
        return (mean / mean.norm()).numpy()

    for query in ("Basel?", "more"):
        cosines = {str(n): vector(f"passage: {text}") @ vector(f"query: {query}") for n, text in enumerate(texts)}
        hits = index.search(query, 3)
        assert [hit.passage.id for hit in hits] == sorted(cosines, key=lambda n: -cosines[n])[:3]
        np.testing.assert_allclose([hit.score for hit in hits], [cosines[hit.passage.id] for hit in hits], atol=1e-5)


def test_models_that_are_not_used_by_the_mean_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model can be loaded"):
        build_index(PASSAGES, tmp_path / "index", Embedding(str(tmp_path / "none")))
    (tmp_path / "cls" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "cls" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(UserError, match="takes no mean over tokens"):
        build_index(PASSAGES, tmp_path / "index", Embedding(str(tmp_path / "cls")))
    assert not (tmp_path / "index").exists()


def test_search_as_a_tool(tmp_path: Path) -> None:
    index_of(PASSAGES, tmp_path)
    tool = {"type": "search", "index": str(tmp_path / "index"), "name": "look", "passages": 1, "most_passages": 2}
    config = ToolsEnvironmentConfig.model_validate({"tools": [tool]})

    async def scene() -> list[str]:
        environments = make_environments(config)
        await environments.open()
        environment = environments.make(PROMPT)
        await environment.start(PROMPT)
        (schema,) = environment.tools
        assert schema["function"]["name"] == "look"
        asked = [{"query": "Rhine"}, {"query": "Basel", "k": 9}, {"k": 1}, {"query": "a", "k": 0}, {"query": "nothing"}]
        calls = tuple(ToolCall(str(n), "look", arguments) for n, arguments in enumerate(asked))
        reply = await environment.step(Answer("", calls))
        await environment.close()
        await environments.close()
        return [message["content"] for message in reply.messages]

    one, two, *wrong, none = asyncio.run(scene())
    assert one == "[a] Rivers\nThe Rhine flows through Basel."
    assert two.count("[") == 2
    assert wrong[0] == "error: query: field required" and wrong[1].startswith("error: k: input should be greater")
    assert none == "Nothing found."


@pytest.mark.parametrize(("most", "arguments"), [(1, ["query"]), (2, ["query", "k"])])
def test_a_tool_that_brings_one_passage_is_not_asked_how_many(tmp_path: Path, most: int, arguments: list[str]) -> None:
    index_of(PASSAGES, tmp_path)
    tools = SearchTools(
        SearchToolsConfig(type="search", index=tmp_path / "index", most_passages=most), CallLimits(1, 1.0)
    )
    assert list(tools.schemas[0]["function"]["parameters"]["properties"]) == arguments


def test_a_tool_without_an_index_is_told_before_the_run(tmp_path: Path) -> None:
    config = ToolsEnvironmentConfig.model_validate({"tools": [{"type": "search", "index": str(tmp_path / "none")}]})
    with pytest.raises(UserError, match="is no index"):
        make_environments(config)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published files are not here")
@pytest.mark.parametrize(
    ("corpus", "questions", "least"),
    [
        ("squad_search/corpus.jsonl.gz", "squad_search/questions.jsonl.gz", 0.84),
        ("multihop_search/hotpotqa_corpus.jsonl.gz", "multihop_search/hotpotqa_100.jsonl", 0.84),
        ("multihop_search/musique_corpus.jsonl.gz", "multihop_search/musique_100.jsonl", 0.84),
    ],
)
def test_a_gold_passage_of_real_questions_is_among_the_first_three(
    corpus: str, questions: str, least: float, tmp_path: Path
) -> None:
    _index(PUBLISHED / corpus, tmp_path / "index")
    index = open_index(tmp_path / "index")
    path = PUBLISHED / questions
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    start = time.process_time()
    found = [{hit.passage.id for hit in index.search(row["question"], 3)} for row in rows]
    share = sum(bool(ids & set(row["gold_doc_ids"])) for ids, row in zip(found, rows, strict=True)) / len(rows)
    print(f"{corpus}: {share:.3f}, {(time.process_time() - start) / len(rows) * 1e3:.3f} ms a query")
    assert share >= least
