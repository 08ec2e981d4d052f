"""Conversations in the report: whose turn, which tokens are trained on, what was called; and nothing becomes markup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_page import Elements, drawn_page, embedded

from tandem.batching.packing import to_batch
from tandem.tracking.report import write_report
from tandem.tracking.trajectories import trajectories_path, write_trajectories
from tandem.types import Branch, Group, Prompt, Score, Status, Trajectory, Turn

SCRIPT = "</pre></script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
ASKED = Prompt(7, np.array([1, 2], np.int32), "<|user|>2*3?<|assistant|>", "toy", None)
CALL, SAID, RESULT = "<tool_call>2*3</tool_call>", f"Six. {SCRIPT}", f"6 {SCRIPT}"


def branch(opening: str, turns: Sequence[Turn], trained: Sequence[bool]) -> Branch:
    """Its turns, and which of them are trained on."""
    mask = np.repeat(list(trained), [turn.tokens for turn in turns])
    zeros = np.zeros(len(mask), np.int32)
    return Branch(ASKED.token_ids, zeros, mask, zeros.astype(np.float32), zeros, tuple(turns), opening=opening)


def conversation(branches: Sequence[Branch], **more: Any) -> Trajectory:
    first, *others = branches
    arrays = (first.response_ids, first.loss_mask, first.rollout_logprobs, first.versions)
    status = more.pop("status", Status.COMPLETED)
    return Trajectory(ASKED, 0, *arrays, "2*36", status, first.turns, branches=tuple(others), **more)


def called(*arguments: Any) -> dict[str, Any]:
    calls = [{"function": {"name": "calculate", "arguments": given}} for given in arguments]
    return {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}


def write(run: Path, trajectories: list[Trajectory], scores: list[Score]) -> Path:
    run.mkdir()
    (run / "config.yaml").write_text("model: {path: m}\nalgorithm: {type: grpo}\n")
    groups = [Group(trajectories, scores)]
    batch = to_batch(groups)
    batch.tokens.advantages = np.where(batch.loss_mask, np.arange(len(batch.loss_mask)) - 1.0, 0).astype(np.float32)
    write_trajectories(trajectories_path(run, 1), 1, groups, batch)
    return write_report(run)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation of two branches that has met a limit, one whose environment failed, and an answer of one turn."""
    told, asked = Turn("tool", 2, text=RESULT), Turn(f"user{SCRIPT}", 1, text="And?")
    call, end = Turn("policy", 3, 0.25, CALL), Turn("policy", 2, None, SAID)
    lines = [
        branch("", [call, told, end], [True, False, True]),
        branch(f"history {SCRIPT}", [call, told, asked, Turn("policy", 1, -1.0, "Bye.")], [False, False, False, True]),
    ]
    messages = (called({"expression": SCRIPT}), {"role": "tool", "content": RESULT}, called())
    held = conversation(
        lines, messages=messages, numbers={"calls": 2.0, "timeouts": 1.0, "cut_results": 0.0}, status=Status.TRUNCATED
    )
    failed = conversation([branch("", [], [])], status=Status.ENVIRONMENT_ERROR, error=f"gone {SCRIPT}")
    alone = conversation([branch("", [Turn("policy", 2)], [True])])
    scores = [Score(1.0), Score(None, failure=Status.ENVIRONMENT_ERROR, error=f"gone {SCRIPT}"), Score(0.5)]
    return write(tmp_path_factory.mktemp("samples") / "run", [held, failed, alone], scores)


def test_a_conversation_is_shown_turn_by_turn(report: Path) -> None:
    held, alone = embedded(report)["samples"]
    first, second = held["branches"]
    assert first["prompt"] == ASKED.text and second["prompt"] == f"history {SCRIPT}"
    assert [(turn["author"], turn["tokens"], turn["trained"]) for turn in first["turns"]] == [
        ("policy", 3, 3), ("tool", 2, 0), ("policy", 2, 2),
    ]  # fmt: skip
    assert [turn["text"] for turn in first["turns"]] == [CALL, RESULT, SAID]
    assert [turn["reward"] for turn in first["turns"]] == [0.25, None, None]
    assert [turn["advantage"] for turn in first["turns"]] == [0.0, None, 4.5]
    assert first["cells"] == [-1, 0, 1, None, None, 4, 5]
    assert first["turns"][0]["calls"] == [f"calculate {json.dumps({'expression': SCRIPT})}"]
    assert [turn["trained"] for turn in second["turns"]] == [0, 0, 0, 1] and second["cells"] == [None] * 6 + [12]
    assert held["status"] == "truncated" and held["counts"] == {"calls": 2, "timeouts": 1}
    assert alone["branches"] == [] and (alone["prompt"], alone["response"]) == (ASKED.text, "2*36")


def test_what_was_read_as_calls_stands_in_the_turn_that_made_them(tmp_path: Path) -> None:
    """Where branches begin anew, the messages are those of all of them."""
    one, other = (branch(name, [Turn("policy", 1, None, name)], [True]) for name in "ab")
    messages = (called({"x": 1}), {"role": "user", "content": "?"}, called({"x": 2}, {"x": 3}))
    (shown,) = embedded(write(tmp_path / "run", [conversation([one, other], messages=messages)], [Score(1.0)]))[
        "samples"
    ]
    calls = [turn["calls"] for line in shown["branches"] for turn in line["turns"]]
    assert calls == [['calculate {"x": 1}'], ['calculate {"x": 2}', 'calculate {"x": 3}']]


def test_what_is_long_is_cut_visibly(tmp_path: Path) -> None:
    turns = [Turn("policy" if n % 2 == 0 else "tool", 10, None, f"{n} " + "x" * 3_000) for n in range(101)]
    lines = [branch("y" * 7_000, turns, [True, False] * 50 + [True]) for _ in range(9)]
    messages = [called({"x": "z" * 600}) for _ in range(51)]
    (shown,) = embedded(write(tmp_path / "run", [conversation(lines, messages=tuple(messages))], [Score(1.0)]))[
        "samples"
    ]
    line = shown["branches"][1]
    assert len(shown["branches"]) == 8 and shown["more_branches"] == 1 and line["cells"] == []
    assert line["prompt"].endswith("y … (1,000 more characters)")
    assert [turn if isinstance(turn, int) else int(turn["text"].split()[0]) for turn in line["turns"]] == [
        *range(20), 61, *range(81, 101),
    ]  # fmt: skip
    assert line["turns"][0]["text"].endswith("x … (1,002 more characters)")
    assert shown["branches"][0]["turns"][0]["calls"][0].endswith("z … (119 more characters)")


def test_a_conversation_in_which_nobody_spoke_says_why(tmp_path: Path) -> None:
    failed = conversation([branch("", [], [])], status=Status.ENVIRONMENT_ERROR, error="gone")
    score = Score(None, failure=Status.ENVIRONMENT_ERROR, error="gone")
    (shown,) = embedded(write(tmp_path / "run", [failed], [score]))["samples"]
    assert (shown["status"], shown["error"], shown["branches"]) == ("environment_error", "gone", [])


def test_no_word_of_a_conversation_can_leave_the_data_of_the_page(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 1 and "<img" not in page


@pytest.fixture(scope="module")
def drawn(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Elements:
    return drawn_page(report, tmp_path_factory.mktemp("profile"))


def test_the_mask_is_visible_and_explained(drawn: Elements) -> None:
    kinds = [attributes["class"] for tag, attributes in drawn.seen if tag == "div" and "turn" in str(attributes)]
    trained, masked, world = "turn trained", "turn masked", "turn world"
    assert kinds == [trained, world, trained, masked, world, world, trained]
    legend = [text for tag, text in drawn.texts if tag.startswith("span.turn")]
    assert legend == [
        "sampled by the policy, trained on", "sampled, but not trained on here", "said to the policy, never trained on",
    ]  # fmt: skip
    assert "token 3: not trained on" in drawn.text and "token 5: +4" in drawn.text
    cells = [attributes["fill"] for tag, attributes in drawn.seen if tag == "rect" and attributes.get("width") == "1"]
    assert [cell == "var(--line)" for cell in cells[:7]] == [False] * 3 + [True] * 2 + [False] * 2
    assert "branch 1 of 2" in drawn.text and "branch 2 of 2" in drawn.text
    assert "reward 0.25" in drawn.text and "timeouts 1" in drawn.text and "truncated" in drawn.text


def test_words_of_models_and_tools_are_text_on_the_page(drawn: Elements) -> None:
    assert {"script", "img"}.isdisjoint(tag for tag, _ in drawn.seen)
    assert not [attributes for _, attributes in drawn.seen if any(name.startswith("on") for name in attributes)]
    shown = [text for _, text in drawn.texts]
    assert RESULT in shown and SAID in shown and f"user{SCRIPT}" in shown and f"history {SCRIPT}" in shown
    assert f"calculate {json.dumps({'expression': SCRIPT})}" in shown
