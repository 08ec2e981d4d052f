"""Rewards of a language model that judges: trajectories -> what it is told -> its replies -> scores.

    Rubric.told --> Judge.replies, all answers of a step at once --> parser --> reward, or asked again

The first attempt is greedy. A reply that cannot be read is never a reward: the judge is asked again, and an answer
whose last attempt fails has the reward that the configuration says, or none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from tandem.config.judging import JudgeConfig
from tandem.controller.reward_model import Rewards, without_functions
from tandem.controller.roles import Rollout
from tandem.data.chat import encode, render
from tandem.data.rows import BadRow
from tandem.errors import TandemError, UserError
from tandem.http import RequestThreads, post_json
from tandem.reward.judging import Rubric, Unreadable, make_parser
from tandem.types import Group, Prompt, Score, Status, Trajectory
from tandem.workers.rollout import RolloutRequest, RolloutSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JUDGE = 2
"""A purpose for which seeds are drawn, beside training and validation (`tandem.workers.rollout`)."""


class JudgeFailed(Exception):
    """The judge has said nothing about an answer; the message says why."""


class Judge(Protocol):
    """Who is asked."""

    def replies(self, told: Sequence[str], seeds: Sequence[int], greedy: bool) -> list[str | JudgeFailed]:
        """A reply to each text. The same seeds give the same replies where the judge keeps them."""
        ...


class LocalJudge:
    """A frozen model on generation engines of its own."""

    def __init__(self, engines: Rollout, spec: RolloutSpec) -> None:
        """`spec`: what the engines are made from."""
        from transformers import AutoConfig

        self._engines = engines
        self._tokenizer: PreTrainedTokenizerBase = spec.tokenizer
        auto = cast(Any, AutoConfig)
        described = auto.from_pretrained(spec.model.path, trust_remote_code=spec.model.trust_remote_code)
        known: int = getattr(described.get_text_config(), "max_position_embeddings", 2**31)
        self._longest = known - spec.generation.max_response_tokens
        """The most tokens that the judge can read."""
        engines.publish(0).get()

    def replies(self, told: Sequence[str], seeds: Sequence[int], greedy: bool) -> list[str | JudgeFailed]:
        prompts = [self._prompt(number, text) for number, text in enumerate(told)]
        fitting = [one for one in prompts if len(one.token_ids) <= self._longest]
        requests = [RolloutRequest(one, (seeds[one.index],)) for one in fitting]
        answered = self._engines.generate(requests, greedy=greedy).get() if requests else []
        found: dict[int, str] = {prompt.index: answer.text for prompt, (answer,) in zip(fitting, answered, strict=True)}
        return [found.get(one.index, self._too_long(one)) for one in prompts]

    def _prompt(self, number: int, text: str) -> Prompt:
        tokenizer: Any = self._tokenizer  # its template is not typed
        if tokenizer.chat_template is None:
            ids = encode(self._tokenizer, text, special_tokens=True)
        else:
            try:
                shown = render(self._tokenizer, [{"role": "user", "content": text}], generation_prompt=True)
            except BadRow as error:
                raise UserError(f"model.judge_path: {error}") from error
            ids = encode(self._tokenizer, shown, special_tokens=False)
        return Prompt(number, np.array(ids, np.int32), text, "judge", None)

    def _too_long(self, prompt: Prompt) -> JudgeFailed:
        return JudgeFailed(
            f"what the judge would read has {len(prompt.token_ids)} tokens, and it reads {self._longest} "
            "beside generation.max_response_tokens"
        )


class ServedJudge:
    """A model behind an OpenAI-compatible endpoint, asked in threads."""

    def __init__(self, config: JudgeConfig, timeout_s: float) -> None:
        assert config.url is not None
        self._config = config
        self._timeout_s = timeout_s
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        key = os.environ.get(config.api_key_env)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def replies(self, told: Sequence[str], seeds: Sequence[int], greedy: bool) -> list[str | JudgeFailed]:
        threads = RequestThreads(self._config.concurrency, "judge")
        return threads.map(lambda one: self._reply(*one, greedy), zip(told, seeds, strict=True))

    def _reply(self, text: str, seed: int, greedy: bool) -> str | JudgeFailed:
        generation = self._config.generation
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0 if greedy else generation.temperature,
            "max_tokens": generation.max_response_tokens,
            "seed": seed % 2**31,
        }
        try:
            answer = post_json(self._url, body, timeout_s=self._timeout_s, headers=self._headers)
            return str(answer["choices"][0]["message"]["content"])
        except TandemError as error:
            return JudgeFailed(str(error))
        except (KeyError, IndexError, TypeError):
            return JudgeFailed(f"{self._url} answered with something that is no chat completion")


@dataclass(slots=True)
class _Verdict:
    """What came of one answer."""

    value: float | None = None
    reply: str = ""
    problem: str = ""
    attempts: int = 0


class JudgeRewards:
    """weight * the judge's reward (`reward/judge`), plus the functions' reward; where one fails, so does the reward."""

    by_step = True
    """The answers of a step are judged together."""

    def __init__(self, judge: Judge, config: JudgeConfig, functions: Rewards, *, alone: bool, seed: int) -> None:
        """`alone`: the functions are not asked. Raises UserError where template or parser cannot be used."""
        self._judge = judge
        self._config = config
        self._functions = functions
        self._alone = alone
        self._seed = seed
        self._rubric = Rubric(config)
        self._parse = make_parser(config)

    def score(self, answers_by_prompt: Sequence[list[Trajectory]], step: int = 0) -> list[Group]:
        """Answers without a reward from elsewhere are not judged."""
        groups = without_functions(answers_by_prompt) if self._alone else self._functions.score(answers_by_prompt, step)
        judged = [
            (trajectory, group.scores, place)
            for group in groups
            for place, trajectory in enumerate(group.trajectories)
            if group.scores[place].value is not None
        ]
        start = time.perf_counter()
        verdicts = self._verdicts([trajectory for trajectory, _, _ in judged], step)
        seconds = (time.perf_counter() - start) / max(len(judged), 1)
        for (_, scores, place), verdict in zip(judged, verdicts, strict=True):
            scores[place] = self._add(scores[place], verdict, seconds)
        return groups

    def check_share(self, groups: Iterable[Group]) -> None:
        """What the functions say of it."""
        self._functions.check_share(groups)

    def _verdicts(self, trajectories: Sequence[Trajectory], step: int) -> list[_Verdict]:
        told = [self._rubric.told(trajectory) for trajectory in trajectories]
        verdicts = [_Verdict() for _ in told]
        for attempt in range(self._config.attempts):
            open_ones = [place for place, verdict in enumerate(verdicts) if verdict.value is None]
            if not open_ones:
                break
            seeds = [self._draw(trajectories[place], step, attempt) for place in open_ones]
            replies = self._judge.replies([told[place] for place in open_ones], seeds, greedy=attempt == 0)
            for place, reply in zip(open_ones, replies, strict=True):
                self._read(verdicts[place], reply)
        return verdicts

    def _draw(self, trajectory: Trajectory, step: int, attempt: int) -> int:
        """The seed of an attempt: a resumed run draws the same ones."""
        place = (self._seed, JUDGE, step, trajectory.prompt.index, trajectory.sample, attempt)
        return int(np.random.SeedSequence(place).generate_state(1, "u8")[0])

    def _read(self, verdict: _Verdict, reply: str | JudgeFailed) -> None:
        verdict.attempts += 1
        if isinstance(reply, JudgeFailed):
            verdict.problem = str(reply)
            return
        verdict.reply = reply
        try:
            verdict.value = self._parse(reply)
        except Unreadable as error:
            verdict.problem = f"{error}: {reply[-300:]!r}"

    def _add(self, score: Score, verdict: _Verdict, seconds: float) -> Score:
        before = score.value
        assert before is not None
        value = self._config.unparsed if verdict.value is None else verdict.value
        score = replace(score, seconds=score.seconds + seconds, judgement=verdict.reply or None)
        counts = {"judge_attempts": float(verdict.attempts), "judge_unparsed": float(verdict.value is None)}
        if value is None:
            error = f"reward.judge: no reward in {verdict.attempts} attempts; the last: {verdict.problem}"
            return replace(score, value=None, parts=counts, failure=Status.REWARD_ERROR, error=error)
        parts = {**score.parts, "judge": value, **counts}
        return replace(score, value=before + self._config.weight * value, parts=parts)
