"""`tandem data`: every published format on rows by hand, then on the real files; columns of one's own."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from data_tokenizer import write_lines

from tandem.cli import main
from tandem.data.preprocess import CONVERTERS, convert
from tandem.data.preprocess.convert import Place, mapping
from tandem.data.rows import BadRow
from tandem.errors import UserError
from tandem.reward.rules.qa import exact_match

DATA = Path(__file__).parents[3] / "shared" / "data"
AT = Place("train", 7)


def made(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return dict(CONVERTERS[name](row, AT))


def test_math_takes_the_last_boxed_answer_with_its_braces() -> None:
    solution = r"First \boxed{1}. So $x = \boxed{\frac{1}{\sqrt{2}}}$."
    (row,) = made("math", {"problem": "x?", "level": "Level 1", "type": "Algebra", "solution": solution}).values()
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{\sqrt{2}}"
    assert row["data_source"] == "math" and row["prompt"][0]["content"].startswith("x?\n\n")
    assert row["extra_info"]["answer"] == solution and row["extra_info"]["level"] == "Level 1"
    (row,) = made("math", {"problem": "x?", "solution": r"$\boxed 5$"}).values()
    assert row["reward_model"]["ground_truth"] == "5"
    with pytest.raises(BadRow, match="no answer in"):
        made("math", {"problem": "x?", "solution": "5"})


def test_math_as_first_published_is_a_file_a_problem(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number in range(2):
            path = tmp_path / "MATH" / split / "algebra" / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"problem": "x?", "solution": f"\\boxed{{{number}}}"}, indent=4))
    counts = convert.convert(CONVERTERS["math"], tmp_path / "MATH", tmp_path / "out")
    assert counts == {"rows read": 4, "test": 2, "train": 2, "skipped": 0}


def test_pictures_are_in_the_rows(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(b"PNG")
    puzzle = {"image": "images/a.png", "question": "Which?", "options": [6, 3], "answer": "3", "puzzle": "rings"}
    write_lines(tmp_path / "puzzles.jsonl", [puzzle])
    assert convert.convert(CONVERTERS["puzzlevqa"], tmp_path, tmp_path / "out")["train"] == 1
    (row,) = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert row["images"] == [{"bytes": b"PNG"}] and row["reward_model"]["ground_truth"] == "B"
    assert row["prompt"][0]["content"].startswith("<image>Which?\n\n(A) 6\n(B) 3\n\n")
    for wrong in ({**puzzle, "answer": "4"}, {**puzzle, "image": "b.png"}):
        write_lines(tmp_path / "puzzles.jsonl", [wrong])
        with pytest.raises(UserError, match=r"options are|b.png', and there is no such file"):
            convert.convert(CONVERTERS["puzzlevqa"], tmp_path / "puzzles.jsonl", tmp_path / "out")

    problem = {"images": [{"bytes": b"PNG", "path": None}], "problem": "<image>Find x.", "answer": "3"}
    (row,) = made("geo3k", problem).values()
    assert row["images"] == [{"bytes": b"PNG"}] and row["data_source"] == "hiyouga/geometry3k"
    assert row["extra_info"]["answer"] == r"\boxed{3}"
    with pytest.raises(BadRow, match="0 times <image> in the problem, and 1 pictures"):
        made("geo3k", {**problem, "problem": "Find x."})


def test_choices_are_lettered() -> None:
    aqua = {"question": "1+1?", "options": ["A)1", "B)2"], "correct": "B"}
    (row,) = made("aqua", aqua).values()
    assert "(A) 1\n(B) 2" in row["prompt"][0]["content"] and row["reward_model"]["ground_truth"] == "B"
    assert row["extra_info"]["answer"] == "The answer is (B)."
    with pytest.raises(BadRow, match="the right choice is 'C'"):
        made("aqua", {**aqua, "correct": "C"})
    swag = {"activity_label": "Vault", "ctx": "He [step] runs", "endings": ["up.", "down."], "label": "1"}
    (row,) = made("hellaswag", swag).values()
    assert "Vault: He runs …" in row["prompt"][0]["content"] and "(B) down." in row["prompt"][0]["content"]
    assert row["reward_model"]["ground_truth"] == "B"
    assert made("hellaswag", {**swag, "label": ""}) == {}


def test_programs_bring_their_tests() -> None:
    prompt = "import math\n\ndef g(x): return x\n\ndef f(x):\n    '''Root.'''\n"
    row = {"prompt": prompt, "entry_point": "f", "canonical_solution": "    return 1\n", "test": "def check(c): ..."}
    made_row = made("humaneval", row)["test"]
    assert made_row["reward_model"]["ground_truth"] == {
        "preamble": "import math\n\ndef g(x): return x\n\n",
        "tests": ["def check(c): ...\ncheck(f)"],
    }
    assert made_row["extra_info"]["answer"] == f"```python\n{prompt}    return 1\n```"
    assert made_row["extra_info"]["split"] == "test"
    row = {
        "text": "Add.",
        "task_id": 511,
        "code": "def f(): ...\r\n",
        "test_list": ["assert f()"],
        "test_setup_code": "a",
    }
    assert made("mbpp", row)["val"]["reward_model"]["ground_truth"] == {"preamble": "", "tests": ["a\nassert f()"]}
    assert "assert f()" in made("mbpp", row)["val"]["prompt"][0]["content"]
    assert [*made("mbpp", {**row, "task_id": 11}), *made("mbpp", {**row, "task_id": 974})] == ["test", "train"]


def test_hh_comes_in_three_forms() -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: A: 1\n\nor 2?\n\nAssistant:"
    files = made("hh", {"chosen": f"{start} Two", "rejected": f"{start} One"})
    roles = [("user", "Hi"), ("assistant", "Hello"), ("user", "A: 1\n\nor 2?")]
    prompt = [{"role": role, "content": content} for role, content in roles]
    two, one = ([{"role": "assistant", "content": content}] for content in ("Two", "One"))
    assert files["preference/train"] == {"prompt": prompt, "chosen": two, "rejected": one}
    assert files["sft/train"] == {"prompt": prompt, "completion": two}
    assert files["rl/train"]["prompt"] == prompt
    assert files["rl/train"]["reward_model"] == {"style": "model", "ground_truth": "Two"}
    full = made("hh", {"prompt": start, "response": " Two", "chosen": " Two", "rejected": " One"})
    assert full["preference/train"] == files["preference/train"]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [(" A", " A"), (" A", ""), (" A", " B\n\nHuman: C\n\nAssistant: D")],
    ids=["same", "empty", "other"],
)
def test_hh_skips_pairs_that_prefer_nothing(chosen: str, rejected: str) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    assert made("hh", {"chosen": start + chosen, "rejected": start + rejected}) == {}
    with pytest.raises(BadRow, match="does not go from"):
        made("hh", {"chosen": "Hi", "rejected": "Ho"})


def test_own_columns_become_rows() -> None:
    row = {"q": "1+1", "a": 2, "level": 3}
    to_rows = mapping({"prompt": "{q} = ?", "ground_truth": "a", "data_source": "sums", "system": "Be brief: {level}"})
    ((split, new),) = to_rows(row, AT)
    assert split == "train" and new["data_source"] == "sums"
    assert new["prompt"] == [{"role": "system", "content": "Be brief: 3"}, {"role": "user", "content": "1+1 = ?"}]
    assert new["reward_model"]["ground_truth"] == 2
    assert new["extra_info"] == {"q": "1+1", "a": 2, "level": 3, "split": "train", "index": 7}
    ((_, new),) = mapping({"prompt": "q", "completion": "{a}!"})(row, AT)
    assert new == {"prompt": "1+1", "completion": "2!"}
    with pytest.raises(BadRow, match="no column 'nope'; the row has q, a, level"):
        list(mapping({"prompt": "{nope}"})(row, AT))
    with pytest.raises(UserError, match="name at least the prompt"):
        mapping({"answer": "a"})


def test_further_columns_of_a_question_are_in_extra_info() -> None:
    """There `tandem reward test` looks for `answer`. What the mapping names wins over an old column of that name."""
    row = {"question": "1+1", "result": 2, "solution": "1+1 is 2", "answer": "B"}
    columns = {"prompt": "question", "ground_truth": "result", "data_source": "mine", "answer": "solution"}
    ((_, new),) = mapping({**columns, "hint": "{result}!"})(row, AT)
    assert new["extra_info"] == {**row, "answer": "1+1 is 2", "hint": "2!", "split": "train", "index": 7}


def test_a_column_that_the_place_of_a_row_would_hide_is_refused() -> None:
    columns = {"prompt": "question", "data_source": "mine"}
    for name in ("split", "index"):
        with pytest.raises(UserError, match=f"--map: {name}: "):
            mapping({**columns, name: "question"})


def test_only_a_published_file_is_asked_whether_it_is_as_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"q": "a"}])
    arguments = ["--in", str(source), "--out", str(tmp_path / "out")]
    assert main(["data", "columns", *arguments, "--map", "prompt=question"]) == 2
    assert capsys.readouterr().err == f"tandem: {source}, row 1: --map: no column 'question'; the row has q\n"
    assert main(["data", "gsm8k", *arguments]) == 2
    assert capsys.readouterr().err.endswith("; is this the file as published?\n")


def test_a_column_of_two_types_is_told(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"q": "a", "n": 1}, {"q": "b", "n": "two"}])
    with pytest.raises(UserError, match=r"train\.parquet: a column does not hold one type"):
        convert.convert(mapping({"prompt": "q", "n": "n"}), source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_rows_are_written_in_chunks(tmp_path: Path) -> None:
    count = 2 * convert.CHUNK_ROWS + 5
    source = write_lines(tmp_path / "rows.jsonl", [{"q": f"question {i}"} for i in range(count)])
    assert convert.convert(mapping({"prompt": "q"}), source, tmp_path / "out")["train"] == count
    file = pq.ParquetFile(tmp_path / "out" / "train.parquet")
    assert (file.num_row_groups, file.metadata.num_rows) == (3, count)
    assert file.read()["prompt"][count - 1].as_py() == f"question {count - 1}"


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [{"q": "a"}])
    arguments = ["--in", str(source), "--out", str(tmp_path / "out")]
    assert main(["data", "columns", *arguments, "--map", "prompt=q"]) == 0
    told = f"rows read 1\nskipped 0\ntrain 1\ndata.train_files: [{tmp_path / 'out/train.parquet'}]\n"
    assert capsys.readouterr().out == told
    assert main(["data", "columns", *arguments]) == 2
    assert main(["data", "gsm8k", *arguments, "--map", "prompt=q"]) == 2
    assert main(["data", "gsm9k", *arguments]) == 2
    assert "gsm8k" in capsys.readouterr().err


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the published files are not in {DATA}")
@pytest.mark.parametrize(
    ("name", "folder", "counts"),
    [
        ("aqua", "aqua_rat", {"val": 254, "test": 254}),
        ("hellaswag", "hellaswag", {"val": 913}),
        ("hh", "hh_rlhf_helpful", {"preference/train": 3991, "sft/train": 3991, "rl/train": 3991}),
        ("humaneval", "humaneval", {"test": 164}),
        ("mbpp", "mbpp", {"prompt": 10, "test": 500, "val": 90, "train": 374}),
    ],
)
def test_all_published_rows_convert(tmp_path: Path, name: str, folder: str, counts: dict[str, int]) -> None:
    found = convert.convert(CONVERTERS[name], DATA / folder, tmp_path)
    assert counts.items() <= found.items()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    assert {str(path.relative_to(tmp_path)): pq.read_metadata(path).num_rows for path in files} == {
        f"{split}.parquet": count for split, count in counts.items()
    }
    assert convert.convert(CONVERTERS[name], DATA / folder, tmp_path) == found
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == files


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"answers": ["a", "b", "a"]}, ["a", "b"]),
        ({"answers": {"text": ["a", "a"], "answer_start": [1, 1]}}, ["a"]),
        ({"golden_answers": ["a"]}, ["a"]),
        ({"answer": "a", "answer_aliases": ["b"], "answerable": True}, ["a", "b"]),
    ],
)
def test_questions_to_be_looked_up(row: dict[str, Any], answers: list[str]) -> None:
    (made_row,) = made("musique", {"id": "7", "question": "Who?", "gold_doc_ids": ["d"], **row}).values()
    assert made_row["data_source"] == "musique" and made_row["reward_model"]["ground_truth"] == answers
    assert made_row["prompt"][0]["content"].startswith("Who?\n\n")
    extra = made_row["extra_info"]
    assert (extra["answer"], extra["id"], extra["gold_doc_ids"]) == ("<answer>a</answer>", "7", ["d"])


@pytest.mark.parametrize("row", [{}, {"answers": []}, {"answers": [3]}, {"answers": {"text": []}}, {"answer": " "}])
def test_questions_without_an_answer_are_bad(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=r"answer"):
        made("squad", {"question": "Who?", **row})


@pytest.mark.skipif(not DATA.is_dir(), reason="the published files are not here")
@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        ("squad", "squad_search/questions.jsonl.gz", 10570),
        ("hotpotqa", "multihop_search/hotpotqa_100.jsonl", 100),
        ("musique", "multihop_search/musique_100.jsonl", 100),
    ],
)
def test_real_questions_are_right_with_their_own_answers(name: str, file: str, rows: int, tmp_path: Path) -> None:
    assert convert.convert(CONVERTERS[name], DATA / file, tmp_path)["train"] == rows
    read = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert all(exact_match(r["extra_info"]["answer"], r["reward_model"]["ground_truth"])["score"] == 1.0 for r in read)


def test_episodes_are_numbered(tmp_path: Path) -> None:
    made = ["data", "episodes", "--rows", "3", "--val-rows", "2", "--prompt", "Play.", "--out", str(tmp_path)]
    assert main(made) == 0
    prompt = [{"role": "user", "content": "Play.\n\n"}]
    rows = [pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val")]
    assert rows == [
        [{"data_source": "episodes", "prompt": prompt, "seed": seed} for seed in seeds] for seeds in ((0, 1, 2), (3, 4))
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["episodes"], "takes --rows N"),
        (["gsm8k", "--rows", "3"], "the data sets and columns take none"),
        (["episodes", "--rows", "3", "--in", "."], "leave --in and --map out"),
        (["gsm8k"], "say with --in where the files are"),
    ],
)
def test_what_is_given_for_episodes_and_for_files_is_told_apart(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
