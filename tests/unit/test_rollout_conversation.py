"""Conversations of a scripted policy: what is sampled, told, masked, retried and cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.conversation import ConversationConfig
from tandem.errors import EngineError
from tandem.rollout.conversation import Conversations
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply
from tandem.types import Completion, IntArray, Message, Prompt, Request, SamplingParams, Status, Trajectory

STOP = 0
SAMPLING = SamplingParams(max_tokens=100, stop_token_ids=(STOP,))
PROMPT = Prompt(3, np.array([1], np.int32), "?", "default", None, {"prompt": "hello"})


class Letters:
    """A format: a message is its letters and a stop; with `rewrites`, nothing can be appended."""

    def __init__(self, rewrites: bool = False) -> None:
        self.rewrites = rewrites

    def open(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return [token for message in messages for token in (*map(ord, message["content"]), STOP)]

    def extend(self, ids: Sequence[int], new: Sequence[Message], tools: Sequence[Any]) -> list[int] | None:
        return None if self.rewrites else ([] if ids[-1] == STOP else [STOP]) + self.open(new, tools)

    def text(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace("\0", "|")

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[Any]) -> Answer:
        return Answer("".join(map(chr, (token for token in sampled_ids if token != STOP))))


@dataclass
class Engine:
    """Answers each request with what `script` says to its text, one version after the other, and notes requests."""

    script: Callable[[str], str]
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        self.requests.append(request)
        for sample in reversed(range(len(request.seeds))):
            await asyncio.sleep(0)
            said = self.script("".join(map(chr, request.token_ids)).replace("\0", "|"))
            ids = np.array([*map(ord, said), STOP], np.int32)[: request.sampling.max_tokens]
            status = Status.COMPLETED if ids[-1] == STOP else Status.TRUNCATED
            logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
            yield Completion(sample, ids, logprobs, np.full(len(ids), len(self.requests), np.int32), status)


@dataclass
class Asking:
    """An environment that asks `questions` in turn; each may raise in the place of being asked."""

    questions: Sequence[str | Exception]
    rewards: Sequence[float | None] = (None,) * 9
    closing: float | None = None
    log: list[str] = field(default_factory=list)
    tools: Sequence[Any] = ()
    numbers: Mapping[str, float] = field(default_factory=lambda: {"calls": 2.0})
    asked: int = 0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.log.append("start")
        return [{"role": "user", "content": prompt.row["prompt"]}]

    async def step(self, answer: Answer) -> Reply:
        self.log.append(answer.content)
        place, self.asked = self.asked, self.asked + 1
        if place == len(self.questions):
            return Reply(reward=self.rewards[place])
        if isinstance(asked := self.questions[place], Exception):
            raise asked
        return Reply([{"role": "user", "content": asked}], self.rewards[place])

    async def close(self) -> float | None:
        self.log.append("close")
        return self.closing


@dataclass
class Given:
    """Environments: those that are given, in turn."""

    made: list[Any]
    next: int = 0

    async def open(self) -> None: ...

    def make(self, prompt: Prompt) -> Any:
        self.next += 1
        return self.made[self.next - 1]

    async def close(self) -> None: ...


def hold(
    environments: Sequence[Any],
    script: Callable[[str], str] = lambda text: "yes",
    *,
    samples: int = 1,
    tokens: Letters | None = None,
    sampling: SamplingParams = SAMPLING,
    positions: float = 1000,
    **config: Any,
) -> tuple[list[Trajectory], Engine]:
    engine = Engine(script)
    section = ConversationConfig.model_validate({"environment": {"type": "own", "environment": "a:b"}, **config})

    def decode(rows: list[IntArray]) -> list[str]:
        return ["".join(map(chr, row)).replace("\0", "|") for row in rows]

    conversations = Conversations(
        section, Given(list(environments)), tokens or Letters(), engine.generate, decode, lambda: positions
    )
    return asyncio.run(conversations.answer(PROMPT, range(10, 10 + samples), sampling)), engine


def test_what_is_sampled_is_trained_on_and_what_is_said_is_not() -> None:
    (trajectory,), engine = hold([environment := Asking(["a?", "b?"])])
    assert trajectory.text == "yes|a?|yes|b?|yes|" and trajectory.prompt.text == "hello|"
    expected = [letter in "yes" for letter in "yes"] + [True]
    assert trajectory.loss_mask.tolist() == [*expected, *[False] * 3, *expected, *[False] * 3, *expected]
    assert trajectory.rollout_logprobs.tolist() == [-1, -2, -3, -4, 0, 0, 0] * 2 + [-1, -2, -3, -4]
    assert trajectory.versions.tolist() == [1] * 4 + [-1] * 3 + [2] * 4 + [-1] * 3 + [3] * 4
    assert [(turn.author, turn.tokens, turn.text) for turn in trajectory.turns] == [
        ("policy", 4, "yes|"), ("user", 3, "a?|"), ("policy", 4, "yes|"), ("user", 3, "b?|"), ("policy", 4, "yes|"),
    ]  # fmt: skip
    assert [message["content"] for message in trajectory.messages] == ["yes", "a?", "yes", "b?", "yes"]
    assert trajectory.opened_with == ({"role": "user", "content": "hello"},)
    assert trajectory.last_turn is trajectory.status is Status.COMPLETED
    assert environment.log == ["start", "yes", "yes", "yes", "close"]
    none = dict.fromkeys(("out_of_turns", "without_room", "environment_retries"), 0.0)
    assert trajectory.numbers == {"calls": 2.0, **none} and trajectory.branches == ()
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        np.testing.assert_array_equal(after.token_ids[: len(before.token_ids)], before.token_ids)


def test_the_engine_may_keep_what_it_computed_as_long_as_another_turn_may_follow() -> None:
    _, engine = hold([Asking(["a?", "b?"])], max_turns=2)
    assert [request.keep for request in engine.requests] == [True, False]


def test_siblings_ask_for_their_first_turns_at_once_and_later_with_seeds_of_their_own() -> None:
    trajectories, engine = hold([Asking(["a?"]), Asking([]), Asking(["a?"])], samples=3)
    assert [request.seeds for request in engine.requests[:3]] == [(10,), (11,), (12,)] and len(engine.requests) == 5
    later = [request.seeds[0] for request in engine.requests[3:]]
    assert len({*later, 10, 11, 12}) == 5, "a turn draws by other numbers than those before it"
    assert [trajectory.sample for trajectory in trajectories] == [0, 1, 2]
    assert [trajectory.text for trajectory in trajectories] == ["yes|a?|yes|", "yes|", "yes|a?|yes|"]


def test_a_turn_s_seed_does_not_depend_on_who_else_is_there() -> None:
    alone = hold([Asking(["a?", "b?"])])[1].requests[1:]
    together = hold([Asking(["a?", "b?"]), Asking(["c?"])], samples=2)[1].requests[1:]
    assert {request.seeds for request in alone} < {request.seeds for request in together}


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_turns": 2}, "yes|a?|yes|"),
        ({"max_turns": 1}, "yes|"),
        ({"max_turn_tokens": 3}, "yes"),
        ({"sampling": SamplingParams(max_tokens=9, stop_token_ids=(STOP,))}, "yes|a?|ye"),
        ({"sampling": SamplingParams(max_tokens=7, stop_token_ids=(STOP,))}, "yes|"),
        ({"positions": 6 + 8}, "yes|a?|y"),
        ({"positions": 6}, ""),
    ],
)
def test_a_conversation_that_reaches_a_limit_is_truncated(limits: dict[str, Any], text: str) -> None:
    (trajectory,), _ = hold([environment := Asking(["a?", "b?", "c?"])], **limits)
    assert trajectory.status is Status.TRUNCATED and trajectory.text == text
    assert trajectory.numbers["out_of_turns"] == ("max_turns" in limits)
    assert len(trajectory.loss_mask) == len(trajectory.response_ids) == len(text)
    ended = Status.COMPLETED if text.endswith("|") else Status.TRUNCATED
    assert trajectory.last_turn is (ended if text else None), "the limit may be reached between two turns"
    assert environment.log[-1] == "close"
    without = "it opens with 6 tokens, and the engine has 6 positions for them and the answer" if not text else None
    assert (trajectory.numbers["without_room"], trajectory.error) == (float(not text), without)


def test_rewards_of_turns_and_of_the_whole_are_summed() -> None:
    (trajectory,), _ = hold([Asking(["a?", "b?"], rewards=(0.5, None, 2.0), closing=-1.0)])
    assert trajectory.reward == 1.5
    assert [turn.reward for turn in trajectory.turns if turn.author == "policy"] == [0.5, None, 2.0]
    assert hold([Asking([])])[0][0].reward is None


def test_history_that_cannot_be_continued_begins_a_branch_and_each_token_is_trained_once() -> None:
    (trajectory,), engine = hold([Asking(["a?"])], tokens=Letters(rewrites=True))
    (branch,) = trajectory.branches
    assert trajectory.response_ids.tolist() == branch.response_ids.tolist() == [*map(ord, "yes"), STOP]
    np.testing.assert_array_equal(branch.prompt_ids, engine.requests[1].token_ids)
    assert (trajectory.prompt.text, branch.opening) == ("hello|", "hello|yes|a?|")
    assert trajectory.loss_mask.all() and branch.loss_mask.all()
    assert trajectory.text == "yes|\nyes|", "reward functions read all that the policy said"


def test_an_environment_that_fails_is_replaced_and_the_policy_s_draws_stay_the_same() -> None:
    failing, late, good = Asking(["a?", EnvironmentFailed("lost")]), Asking(["a?", ValueError("odd")]), Asking(["a?"])
    (trajectory,), engine = hold([failing, late, good])
    assert trajectory.status is Status.COMPLETED and trajectory.text == "yes|a?|yes|"
    assert trajectory.numbers["environment_retries"] == 2
    assert [environment.log[-1] for environment in (failing, late, good)] == ["close"] * 3
    assert [request.seeds for request in engine.requests[:2]] == [request.seeds for request in engine.requests[2:4]]


@pytest.mark.parametrize("error", [EnvironmentFailed("the server is gone"), RuntimeError("the server is gone")])
def test_one_that_keeps_failing_is_an_environment_error_beside_siblings_that_go_on(error: Exception) -> None:
    bad = [Asking([error]) for _ in range(2)]
    (failed, sound), _ = hold([bad[0], Asking([]), bad[1]], samples=2, environment_retries=1)
    assert failed.status is Status.ENVIRONMENT_ERROR and "the server is gone" in (failed.error or "")
    has_frames = "Traceback" in (failed.error or "") and Path(__file__).name in (failed.error or "")
    assert has_frames == isinstance(error, RuntimeError), "where it was raised, of what nobody meant as a message"
    assert not failed.loss_mask.any() and failed.numbers["environment_retries"] == 1
    assert sound.status is Status.COMPLETED and sound.error is None


def test_environments_that_do_not_start_or_close_are_failures_too() -> None:
    class Never(Asking):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            raise OSError("no such world")

    class Stuck(Asking):
        async def close(self) -> float | None:
            raise OSError("still open")

    (trajectory,), _ = hold([never := Never([]), Stuck([]), Asking([])])
    assert trajectory.status is Status.COMPLETED and trajectory.numbers["environment_retries"] == 2
    assert never.log == ["close"]


def test_how_long_an_environment_takes_to_start_is_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("tandem.rollout.conversation.time.perf_counter", lambda: clock[0])

    class Slow(Asking):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            clock[0] += 60
            return await super().start(prompt)

    (trajectory,), _ = hold([Slow([])])
    assert trajectory.status is Status.COMPLETED and trajectory.generation_s == 0


def test_what_the_engine_raises_is_raised_and_every_environment_closed() -> None:
    def script(text: str) -> str:
        if "a?" in text:
            raise EngineError("out of memory")
        return "yes"

    environments = [Asking(["a?"]), Asking(["b?", "b?", "b?"])]
    with pytest.raises(EngineError, match="out of memory"):
        hold(environments, script, samples=2)
    assert [environment.log[-1] for environment in environments] == ["close"] * 2


def test_a_turn_that_was_aborted_ends_the_trajectory() -> None:
    class Aborting(Engine):
        async def generate(self, request: Request) -> AsyncIterator[Completion]:
            nothing = np.zeros(0, np.int32)
            yield Completion(0, nothing, nothing.astype(np.float32), nothing, Status.ABORTED)

    section = ConversationConfig.model_validate({"environment": {"type": "own", "environment": "a:b"}})
    conversations = Conversations(
        section, Given([Asking([])]), Letters(), Aborting(str).generate, lambda rows: [""] * len(rows), lambda: 100
    )
    (trajectory,) = asyncio.run(conversations.answer(PROMPT, [1], SAMPLING))
    assert trajectory.status is Status.ABORTED and len(trajectory.response_ids) == 0


@pytest.mark.parametrize(
    "worthless", [float("nan"), float("inf"), "much", 10**400, np.zeros(2), pytest.param(10**5000, id="digits")]
)
def test_a_reward_that_is_no_finite_number_is_a_failure_of_the_environment(worthless: Any) -> None:
    of_a_turn, of_all, counted = Asking([], rewards=[worthless]), Asking([], closing=worthless), Asking([])
    counted.numbers = {"calls": worthless}
    for environment in (of_a_turn, of_all, counted):
        (trajectory,), _ = hold([environment], environment_retries=0)
        assert trajectory.status is Status.ENVIRONMENT_ERROR and trajectory.reward is None
        assert "no finite number" in (trajectory.error or "") and environment.log[-1] == "close"


def test_siblings_that_wait_for_each_other_s_end_do_not_wait_for_ever() -> None:
    places = asyncio.Semaphore(2)

    class Crowded(Asking):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            await places.acquire()
            return await super().start(prompt)

        async def close(self) -> float | None:
            places.release()
            return await super().close()

    trajectories, engine = hold([Crowded(["a?"]) for _ in range(5)], samples=5)
    assert [trajectory.text for trajectory in trajectories] == ["yes|a?|yes|"] * 5
    assert [one.seeds for one in engine.requests[:2]] == [(10,), (11,)]


def test_an_environment_that_has_begun_is_closed_also_where_its_conversation_never_begins() -> None:
    class Starting(Asking):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            await super().start(prompt)
            await asyncio.sleep(60)
            raise AssertionError("nobody waits so long")

    async def cancelled(environments: Sequence[Any]) -> None:
        section = ConversationConfig.model_validate({"environment": {"type": "own", "environment": "a:b"}})
        engine = Engine(lambda text: "yes")
        conversations = Conversations(
            section, Given(list(environments)), Letters(), engine.generate, lambda rows: [""] * len(rows), lambda: 100
        )
        answering = asyncio.create_task(conversations.answer(PROMPT, range(len(environments)), SAMPLING))
        await asyncio.sleep(0.01)
        answering.cancel()
        await asyncio.wait([answering])
        assert answering.cancelled()

    environments = [Starting([]), Starting([])]
    asyncio.run(cancelled(environments))
    assert [environment.log for environment in environments] == [["start", "close"]] * 2


def test_numbers_of_numpy_are_plain_ones() -> None:
    environment = Asking([], rewards=[np.float32(0.5)], closing=np.float64(1.0), numbers={"calls": np.int64(2)})
    (trajectory,), _ = hold([environment])
    (turn,) = trajectory.turns
    found = (trajectory.reward, turn.reward, trajectory.numbers["calls"])
    assert found == (1.5, 0.5, 2.0) and {type(number) for number in found} == {float}
