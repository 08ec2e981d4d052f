"""Reward functions: found, recognised, called with what they ask for, and checked in what they return."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config.reward import RewardConfig, RewardFunctionConfig
from tandem.errors import UserError
from tandem.reward.functions import SIGNATURES, Kind, RewardCall, check_functions, execute, load
from tandem.types import Prompt, Score, Status, Trajectory

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def trajectory(text: str = "4", index: int = 7, sample: int = 0, **row: Any) -> Trajectory:
    none = np.zeros(0, np.int32)
    prompt = Prompt(index, none, "2 + 2?", "sums", "4", row)
    ids = np.array([11, 12], np.int32)
    mask, logprobs = np.ones(2, np.bool_), np.zeros(2, np.float32)
    return Trajectory(prompt, sample, ids, mask, logprobs, ids, text, Status.COMPLETED)


def run_call(reference: str, *siblings: Trajectory, seed: int = 0) -> list[Score]:
    """What a worker does with one call."""
    function = load(reference)
    prompt = siblings[0].prompt
    completions = [function.completion(t) for t in siblings]
    arguments = [pickle.dumps(function.arguments(prompt))] * len(siblings)
    return execute(function, RewardCall(reference, seed, arguments, completions))


def outcome(reference: str) -> tuple[float | None, Any, str | None]:
    score = run_call(reference, trajectory())[0]
    assert score.failure is None
    return score.value, score.parts, score.prediction


@pytest.fixture
def write(tmp_path: Path):
    def write(source: str, name: str = "f") -> str:
        path = tmp_path / f"rewards_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        return f"{path}:{name}"

    return write


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs): return solution_str == '4'",
            "VERL",
        ),
        ("def f(solution_str, ground_truth): return {'score': solution_str == ground_truth}", "VERL"),
        ("def f(prompts, completions, **columns): return [c == '4' for c in completions]", "TRL"),
        ("def f(completions, ground_truth): return [c == t for c, t in zip(completions, ground_truth)]", "TRL"),
        ("def f(completion, ground_truth, **row): return completion == ground_truth", "TRAJECTORY"),
        ("def f(completion): return {'score': int(completion == '4')}", "TRAJECTORY"),
    ],
)
def test_each_signature_sync_and_async(write: Any, source: str, prefix: str, kind: str) -> None:
    reference = write(prefix + source)
    assert load(reference).kind is Kind[kind]
    assert [v.value for v in run_call(reference, trajectory("4"))] == [1.0]
    assert [v.value for v in run_call(reference, trajectory("5"))] == [0.0]


def test_verl_functions_get_extra_info(write: Any) -> None:
    reference = write("def f(data_source, solution_str, ground_truth, extra_info): return extra_info['index'] + 0.5")
    assert run_call(reference, trajectory(extra_info={"index": 2}))[0].value == 2.5


def test_row_columns_go_to_those_who_name_them(write: Any) -> None:
    reference = write("def f(completion, ground_truth, level): return level")
    assert load(reference).arguments(trajectory(level=3, other="x").prompt) == {"ground_truth": "4", "level": 3}
    assert run_call(reference, trajectory(level=3))[0].value == 3.0
    assert "'level'" in str(run_call(reference, trajectory(index=9))[0].error)


def test_trl_answers_messages_with_messages_and_text_with_text(write: Any) -> None:
    function = load(write("def f(prompts, completions, **columns): return [0.0 for _ in prompts]"))
    chat, plain = trajectory(prompt=MESSAGES, level=1), trajectory(prompt="2+2=")
    assert function.arguments(chat.prompt)["prompts"] == MESSAGES and function.arguments(chat.prompt)["level"] == 1
    assert function.completion(chat) == [{"role": "assistant", "content": "4"}]
    assert (function.arguments(plain.prompt)["prompts"], function.completion(plain)) == ("2+2=", "4")


def test_trl_judges_siblings_in_one_call(write: Any) -> None:
    reference = write("def f(prompts, completions, **columns): return [len(completions), None, columns['level'][2]]")
    verdicts = run_call(reference, *(trajectory(sample=s, level=2) for s in range(3)))
    assert [v.value for v in verdicts] == [3.0, None, 2.0]
    assert [v.failure for v in verdicts] == [None, Status.NOT_SCORED, None]


def test_dict_results(write: Any) -> None:
    reference = write(
        "def f(completion): return {'score': 0.5, 'acc': True, 'pred': 4, 'length': 2, 'note': 'x', 'gap': None}"
    )
    assert outcome(reference) == (0.5, {"acc": 1.0, "length": 2.0}, "4")


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor([0.5]), 0.5])
def test_any_single_number_is_a_reward(write: Any, number: Any) -> None:
    function = f"import pickle\ndef f(completion): return pickle.loads({pickle.dumps(number)!r})"
    assert outcome(write(function)) == (0.5, {}, None)


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ("float('nan')", "returned nan as the reward"),
        ("float('-inf')", "returned -inf as the reward"),
        ("'1.0'", "returned str '1.0' as the reward, not a number"),
        ("None", "returned NoneType None as the reward"),
        ("[1.0]", "returned list [1.0] as the reward"),
        ("10 ** 400", "int too large"),
        ("{'acc': 1}", "returned NoneType None as 'score'"),
        ("{'score': None}", "as 'score', not a number"),
        ("{'score': float('nan')}", "returned nan as 'score'"),
        ("{'score': 1, 'part': float('inf')}", "returned inf as 'part'"),
    ],
)
def test_bad_returns_are_errors(write: Any, result: str, complaint: str) -> None:
    reference = write(f"def f(completion): return {result}")
    score = run_call(reference, trajectory(index=41, sample=3))[0]
    assert (score.value, score.failure) == (None, Status.REWARD_ERROR)
    assert complaint in str(score.error)


@pytest.mark.parametrize(
    "result", ["1.0", "'ab'", "None", "[1.0]", "[1.0, 2.0, 3.0]", "{0: 1.0, 1: 2.0}", "[1.0, 'x']"]
)
def test_bad_trl_returns_fail_every_sibling(write: Any, result: str) -> None:
    reference = write(f"def f(completions): return {result}")
    assert all(v.failure is Status.REWARD_ERROR for v in run_call(reference, trajectory(), trajectory(sample=1)))


@pytest.mark.parametrize("error", ["ValueError('odd')", "SystemExit(3)", "KeyboardInterrupt()", "RecursionError()"])
def test_whatever_is_raised_is_that_trajectorys_error(write: Any, error: str) -> None:
    score = run_call(write(f"def f(completion):\n    raise {error}"), trajectory())[0]
    assert score.failure is Status.REWARD_ERROR and f"raise {error}" in str(score.error)


@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_error_shows_the_users_own_frames(write: Any, prefix: str) -> None:
    reference = write(f"def inner():\n    return 1 / 0\n\n{prefix}def f(completion):\n    return inner()")
    path = reference.rpartition(":")[0]
    assert str(run_call(reference, trajectory())[0].error).replace("~", "^").splitlines() == [
        "failed", "Traceback (most recent call last):",
        f'  File "{path}", line 5, in f', "    return inner()", "           ^^^^^^^",
        f'  File "{path}", line 2, in inner', "    return 1 / 0", "           ^^^^^",
        "ZeroDivisionError: division by zero",
    ]  # fmt: skip


def test_an_error_before_the_users_code_shows_no_frames(write: Any) -> None:
    reference = write("def f(completion, level): return 1.0")
    assert (
        run_call(reference, trajectory())[0].error
        == "failed\nTypeError: f() missing 1 required positional argument: 'level'"
    )


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x = 1\ndef f(:", ['  File "{path}", line 2', "    def f(:", "          ^", "SyntaxError: invalid syntax"]),
        (
            "def check(): raise ValueError('odd')\ncheck()\ndef f(completion): ...",
            [
                "Traceback (most recent call last):", '  File "{path}", line 2, in <module>', "    check()",
                '  File "{path}", line 1, in check', "    def check(): raise ValueError('odd')",
                "                 ^^^^^^^^^^^^^^^^^^^^^^^", "ValueError: odd",
            ],
        ),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_imported_shows_its_own_frames(write: Any, source: str, shown: list[str]) -> None:
    reference = write(source)
    path = reference.rpartition(":")[0]
    with pytest.raises(UserError) as caught:
        load(reference)
    first = f"reward function {reference!r}: importing {path} failed:"
    assert str(caught.value).splitlines() == [first, *(line.format(path=path) for line in shown)]


@pytest.mark.parametrize(
    "source",
    [
        "def f(completion, extra_info): extra_info['n'] += 1; return 1.0",
        "def f(completions, extra_info): extra_info[1]['n'] = 9; return [1.0, 1.0]",
        "def f(completions, prompt): prompt[0][0]['content'] = ''; return [1.0, 1.0]",
        "def f(completion, extra_info): extra_info['list'].sort(); return 1.0",
    ],
)
def test_mutated_inputs_are_errors_and_harm_nobody(write: Any, source: str) -> None:
    shared = {"n": 0, "list": [2, 1]}
    siblings = [trajectory(sample=s, extra_info=shared, prompt=MESSAGES) for s in range(2)]
    together = "completions" in source
    for score in run_call(write(source), *(siblings if together else siblings[:1])):
        assert score.failure is Status.REWARD_ERROR and "changed its arguments" in str(score.error)
    assert shared == {"n": 0, "list": [2, 1]} and MESSAGES[0]["content"] == "2 + 2?"


def test_reading_and_copying_inputs_is_fine(write: Any) -> None:
    source = (
        "def f(completion, extra_info): own = dict(extra_info); own['n'] = 5; return own.pop('n') + extra_info['n']"
    )
    assert run_call(write(source), trajectory(extra_info={"n": 1}))[0].value == 6.0


def test_random_rewards_repeat(write: Any) -> None:
    reference = write("import random, numpy\ndef f(completion): return random.random() + numpy.random.rand()")
    first, again, other = (run_call(reference, trajectory(), seed=seed)[0].value for seed in (1, 1, 2))
    assert first == again != other


def test_async_functions_may_await(write: Any) -> None:
    reference = write("import asyncio\nasync def f(completion):\n    await asyncio.sleep(0)\n    return 0.25")
    assert run_call(reference, trajectory())[0].value == 0.25


@pytest.mark.parametrize(
    ("source", "name", "complaint"),
    [
        ("def g(completion): ...", "f", r"has no function 'f'"),
        ("f = 3", "f", "has no function 'f'"),
        ("class f: ...", "f", "no parameter is named"),
        ("def f(a, b): ...", "f", "no parameter is named solution_str or completions or completion"),
        ("def f(*args, **kwargs): ...", "f", "no parameter is named"),
        ("def f(solution_str, ground_truth, tokenizer): ...", "f", "missing a required argument: 'tokenizer'"),
        ("def f(x, /, completion): ...", "f", "'x'.*positional"),
        ("import no_such_module", "f", "No module named 'no_such_module'"),
        ("def f(:", "f", "SyntaxError"),
    ],
)
def test_functions_that_fit_nothing(write: Any, source: str, name: str, complaint: str) -> None:
    reference = write(source, name)
    with pytest.raises(UserError, match=complaint) as caught:
        check_functions(RewardConfig(functions=[reference]), [])
    assert reference in str(caught.value)
    if "signature" in str(caught.value):
        assert SIGNATURES in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("nowhere/reward.py:f", "there is no file .*nowhere/reward.py"),
        ("no_such_package.rewards:f", "No module named 'no_such_package'"),
        ("tandem.reward.rules.gsm8k:no", "has no function 'no'"),
        ("reward.py", "not a reference; write `path/to/file.py:function`"),
    ],
)
def test_references_to_nothing(reference: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_functions(RewardConfig(functions=[reference]), [])


def test_all_problems_are_told_at_once(write: Any) -> None:
    good = write("def f(completion): return 1.0")
    with pytest.raises(UserError) as caught:
        check_functions(
            RewardConfig(functions=["a.py:f", good, RewardFunctionConfig(function=good, weight=2), "b.py:f"]), []
        )
    message = str(caught.value)
    assert "a.py" in message and "b.py" in message and "two functions have the same name" in message


def test_ground_truths_that_no_row_has_are_told() -> None:
    prompts = [Prompt(0, np.zeros(0, np.int32), "", source, None, {"solution": "4"}) for source in ("math", "mine")]
    strict = RewardConfig(functions=["tandem.reward.rules.gsm8k:strict"])
    for config, reference in ((RewardConfig(), "math:boxed"), (strict, "gsm8k:strict")):
        with pytest.raises(UserError, match=rf"{reference}' needs a ground truth, which no row has in here.*solution"):
            check_functions(config, ["math"], {"here": prompts})
    check_functions(RewardConfig(), ["math"], {"here": [*prompts, replace(prompts[0], ground_truth="4")]})
    check_functions(RewardConfig(functions=["tandem.reward.rules.text:format"]), [], {"here": prompts})


def test_sources_without_a_built_in_reward() -> None:
    check_functions(RewardConfig(), ["openai/gsm8k", "gsm8k"])
    with pytest.raises(
        UserError, match=r"reward.functions: no built-in reward for data_source .'mine'. .*openai/gsm8k"
    ):
        check_functions(RewardConfig(), ["gsm8k", "mine"])


def test_files_are_imported_once(write: Any) -> None:
    reference = write("calls = []\ndef f(completion): calls.append(1); return len(calls)")
    assert [run_call(reference, trajectory())[0].value for _ in range(2)] == [1.0, 2.0]


def test_arguments_of_the_configuration_reach_every_call(write: Any) -> None:
    source = "def f(data_source, solution_str, ground_truth, extra_info=None, *, low, high=1): return low + high"
    reference = write(source)
    (function,) = check_functions(RewardConfig(functions=[{"function": reference, "arguments": {"low": 0.5}}]), [])
    call = RewardCall(reference, 0, [pickle.dumps(function.arguments(trajectory().prompt))], ["4"])
    assert [s.value for s in execute(load(reference, arguments={"low": 0.5}), call)] == [1.5]
    together = write("def f(completions, levels): return [levels['a']] * len(completions)")
    call = RewardCall(together, 0, [pickle.dumps({})] * 2, ["4", "5"])
    assert [s.value for s in execute(load(together, arguments={"levels": {"a": 3}}), call)] == [3.0, 3.0]


def test_arguments_that_a_function_does_not_take(write: Any) -> None:
    reference = write("def f(completion): return 1.0")
    with pytest.raises(UserError, match="unexpected keyword argument 'low'"):
        check_functions(RewardConfig(functions=[{"function": reference, "arguments": {"low": 0.5}}]), [])
    with pytest.raises(UserError, match="score_together is for functions of `completions`"):
        check_functions(RewardConfig(functions=[{"function": reference, "score_together": "id"}]), [])


def test_a_reason_becomes_the_scores_note(write: Any) -> None:
    score = run_call(write("def f(completion): return {'score': 0.0, 'reason': 'no number'}"), trajectory())[0]
    assert (score.value, score.failure, score.error, score.parts) == (0.0, None, "no number", {})


@pytest.mark.parametrize(
    ("source", "options", "complaint"),
    [
        (
            "def f(completion, level): ...",
            {},
            r"needs the column `level`, which no row has in data.train_files \(.*prompt",
        ),
        ("def f(completions, prompts, level): ...", {}, "needs the column `level`, which no row has"),
        ("def f(completion, sometimes): ...", {}, "needs the column `sometimes`, which 1 of 2 rows lack"),
        (
            "def f(completion, index): ...",
            {},
            r"needs the column `index`.*it is inside `extra_info`: take the parameter `extra_info`, and read "
            r"extra_info\['index'\]",
        ),
        ("def f(completions, index): ...", {}, r"inside `extra_info`: .* read extra_info\[i\]\['index'\]"),
        ("def f(completions): ...", {"score_together": "index"}, "name it extra_info.index"),
        ("def f(completions): ...", {"score_together": "extra_info.problem"}, "`extra_info.problem`, which no row has"),
        ("def f(completion, level=1): ...", {}, None),
        ("def f(completion, level): ...", {"arguments": {"level": 2}}, None),
        ("def f(completion, extra_info, data_source, ground_truth, **row): ...", {}, None),
        ("def f(solution_str, extra_info, ground_truth): ...", {}, None),
        ("def f(completions): ...", {"score_together": "extra_info.index"}, None),
    ],
)
def test_columns_that_rows_lack_are_told(write: Any, source: str, options: Any, complaint: str | None) -> None:
    config = RewardConfig(functions=[RewardFunctionConfig(function=write(source), **options)])
    rows: list[dict[str, Any]] = [{"sometimes": 1}, {}]
    row = {"prompt": MESSAGES, "extra_info": {"index": 7}}
    data = {"data.train_files": [trajectory(**row, **more).prompt for more in rows], "data.val_files": []}
    if complaint is None:
        check_functions(config, [], data)
        return
    with pytest.raises(UserError, match=complaint):
        check_functions(config, [], data)
