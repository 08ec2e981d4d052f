"""A judge: what it is told, how its replies are read, and that none that cannot be read becomes a reward in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tandem.batching.packing import to_batch
from tandem.config.judging import JudgeConfig
from tandem.controller.judge import JudgeFailed, JudgeRewards
from tandem.errors import UserError
from tandem.reward.judging import Rubric, Unreadable, make_parser
from tandem.tracking.trajectories import read_groups, write_trajectories
from tandem.types import Prompt, Status, Trajectory


def answered(text: str, sample: int = 0, status: Status = Status.COMPLETED) -> Trajectory:
    ids = np.arange(3, dtype=np.int32)
    prompt = Prompt(7, ids, "2+2?", "sums", "4", {"prompt": [{"role": "user", "content": "2+2?"}]})
    return Trajectory(prompt, sample, ids, ids >= 0, ids * np.float32(-0.1), ids * 0, text, status)


class Scripted:
    """A judge that gives these replies in turn, and keeps what it was asked."""

    def __init__(self, *replies: str | JudgeFailed) -> None:
        self._replies = list(replies)
        self.asked: list[tuple[list[str], list[int], bool]] = []

    def replies(self, told: Sequence[str], seeds: Sequence[int], greedy: bool) -> list[str | JudgeFailed]:
        self.asked.append(([*told], [*seeds], greedy))
        return [self._replies.pop(0) for _ in told]


def rewards(judge: Scripted, **given: Any) -> JudgeRewards:
    nobody: Any = None
    return JudgeRewards(judge, JudgeConfig.model_validate(given), nobody, alone=True, seed=3)


def test_the_answers_of_a_step_are_judged_at_once_and_greedily():
    judge = Scripted("Right. Score: 10", "Score: 2.5")
    (group, other) = rewards(judge, weight=2.0).score([[answered("4")], [answered("5")]], step=1)
    assert [group.scores[0].value, other.scores[0].value] == [2.0, 0.5]
    assert other.scores[0].parts == {"judge": 0.25, "judge_attempts": 1.0, "judge_unparsed": 0.0}
    assert other.scores[0].judgement == "Score: 2.5"
    ((told, _, greedy),) = judge.asked
    assert greedy and "2+2?" in told[0] and "\n4\n" in told[0] and "\n5\n" in told[1]


def test_a_reply_that_cannot_be_read_is_asked_for_again_and_then_is_an_error():
    judge = Scripted("Score: 5", "well", "hm", "Score: 11", "Score: 2")
    siblings = [answered(text, sample) for sample, text in enumerate("abc")]
    (group,) = rewards(judge, attempts=2).score([siblings])
    good, bad, repaired = group.scores
    assert [good.value, bad.value, repaired.value] == [0.5, None, 0.2]
    assert bad.failure is Status.REWARD_ERROR and bad.parts["judge_unparsed"] == 1
    assert bad.error == "reward.judge: no reward in 2 attempts; the last: no score from 0 to 10: 'Score: 11'"
    assert repaired.parts == {"judge": 0.2, "judge_attempts": 2.0, "judge_unparsed": 0.0}
    assert [len(told) for told, _, _ in judge.asked] == [3, 2]
    assert [greedy for _, _, greedy in judge.asked] == [True, False]
    first, again = judge.asked[0][1], judge.asked[1][1]
    assert len({*first, *again}) == 5, "every attempt at every answer has a seed of its own"


def test_the_configured_score_stands_for_what_cannot_be_read_and_is_counted():
    (group,) = rewards(Scripted("?"), attempts=1, unparsed=-1.0).score([[answered("4")]])
    score = group.scores[0]
    assert score.value == -1.0 and score.parts == {"judge": -1.0, "judge_attempts": 1.0, "judge_unparsed": 1.0}


def test_a_judge_that_fails_is_an_error_with_its_reason():
    (group,) = rewards(Scripted(JudgeFailed("no connection")), attempts=1).score([[answered("4")]])
    assert group.scores[0].failure is Status.REWARD_ERROR and "no connection" in str(group.scores[0].error)


def test_answers_that_were_called_off_are_not_judged():
    judge = Scripted("Score: 10")
    (group,) = rewards(judge).score([[answered("4", 0, Status.ABORTED), answered("4", 1)]])
    assert [score.value for score in group.scores] == [None, 1.0] and len(judge.asked[0][0]) == 1


PARSED: list[tuple[dict[str, Any], str, float | str]] = [
    ({}, "Score: 3, no: **Score**: 7", 0.7),
    ({"most": 5}, "score = 4", 0.8),
    ({}, "Score: -1", "no score from 0 to 10"),
    ({}, "Score: −1", "no score from 0 to 10"),
    ({}, "Score (0-10): 7", 0.7),
    ({}, "Score (0 to 10) = 7/10", 0.7),
    ({}, "Score: 5/5", 1.0),
    ({}, "Score: **4** / 5. I would not give it 2/5.", 0.8),
    ({"most": 5}, "Score: **8**/10", 0.8),
    ({}, "Score: 3.5 out of 5", 0.7),
    ({}, "Score: 4 (out of 5)", 0.8),
    ({}, "Score: 6/5", "no score from 0 to 5"),
    ({}, "Score: 0/0", "no score from 0 to 0"),
    ({}, "The score (0–10) is high.", "no score from 0 to 10"),
    ({}, "Score: 10-20", "no score from 0 to 10"),
    ({}, "", "no score from 0 to 10"),
    ({"parser": "verdict"}, "<verdict>no</verdict> wait <verdict> YES </verdict>", 1.0),
    ({"parser": "verdict"}, "yes", "no <verdict> that is one of yes, no"),
    ({"parser": "verdict", "verdicts": {"A": 1, "tie": 0.5}}, "<verdict>Tie</verdict>", 0.5),
]


@pytest.mark.parametrize(("given", "reply", "found"), PARSED)
def test_replies_are_read(given: dict[str, Any], reply: str, found: float | str):
    parse = make_parser(JudgeConfig.model_validate(given))
    if isinstance(found, str):
        with pytest.raises(Unreadable, match=found):
            parse(reply)
    else:
        assert parse(reply) == pytest.approx(found)


def test_a_parser_of_the_users(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def grade(reply):\n    return {'A': 1, 'F': 0, '?': None, 'x': float('nan')}[reply]\n")
    parse = make_parser(JudgeConfig(parser=f"{file}:grade"))
    assert parse("A") == 1.0
    for reply, reason in (("?", "gave None"), ("x", "gave nan"), ("B", "raised KeyError")):
        with pytest.raises(Unreadable, match=reason):
            parse(reply)
    with pytest.raises(UserError, match="there is no function of that name"):
        make_parser(JudgeConfig(parser=f"{file}:no"))


def test_pictures_of_a_question_are_told_in_words(tmp_path: Path):
    """And a question in parts is its text, not Python's notation of them."""
    file = tmp_path / "told.txt"
    file.write_text("{question}|{answer}")
    parts = [{"type": "image", "key": "0" * 64}, {"type": "text", "text": "How many?"}]
    asked, rubric = {"role": "user", "content": parts}, Rubric(JudgeConfig(template=file))
    called = {"role": "assistant", "tool_calls": [], "content": None}
    for row, said in (([asked], ""), ([asked, called, asked], "user: ")):
        answer = answered("3")
        answer.prompt = replace(answer.prompt, row={"prompt": row})
        assert rubric.told(answer).startswith(f"{said}[image: not shown]How many?")
        assert "{" not in rubric.told(answer)


def test_the_template_is_the_users_and_its_fields_are_known(tmp_path: Path):
    file = tmp_path / "told.txt"
    file.write_text("{question}|{reference}|{answer}|{rubric}\n")
    assert Rubric(JudgeConfig(template=file, rubric="Nice?")).told(answered("{x}")) == "2+2?|4|{x}|Nice?"
    for text, reason in (("{answr}", r"the field \{answr\}"), ("{question}", r"lacks \{answer\}"), ("{", "cannot be")):
        file.write_text(text)
        with pytest.raises(UserError, match=reason):
            Rubric(JudgeConfig(template=file))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"url": "http://x/v1"}, "a served judge has a url and a model; give model, too"),
        ({"model": "m"}, "give url, too"),
        ({"parser": "numbr"}, "'numbr' is neither number nor verdict"),
    ],
)
def test_what_makes_no_judge_is_refused(given: dict[str, Any], reason: str):
    with pytest.raises(ValidationError, match=reason):
        JudgeConfig.model_validate(given)


def test_judgements_are_in_the_trajectory_files(tmp_path: Path):
    groups = rewards(Scripted("Fine. Score: 8")).score([[answered("4")]])
    write_trajectories(tmp_path / "step_000001.parquet", 1, groups, to_batch(groups))
    (group,) = read_groups(tmp_path / "step_000001.parquet", 1)
    assert group.scores[0].judgement == "Fine. Score: 8" and group.scores[0].value == 0.8
